"""Which tests run on this machine; those that do not are named, with the way to get them."""

from __future__ import annotations

from collections import Counter

import pytest

from portal.standalone.needs import NEEDS, missing, sentence
from tests import emptying

NOT_RUN = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long campaigns too")


def pytest_configure() -> None:
    emptying.by_delete()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lacking = {kind: missing(kind) for kind in NEEDS}
    reasons: Counter[str] = Counter()
    for item in items:
        for kind, needs in lacking.items():
            if needs and item.get_closest_marker(kind):
                reasons[sentence(kind, needs)] += 1
                item.add_marker(pytest.mark.skip(reason=sentence(kind, needs)))
                break
        if item.get_closest_marker("long") and not config.getoption("--long"):
            reasons["long campaigns need --long"] += 1
            item.add_marker(pytest.mark.skip(reason="long campaigns need --long"))
    config.stash[NOT_RUN] = reasons
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """What takes long is begun first; last comes what an engine or a network that is being made would hold up."""
    if item.get_closest_marker("early"):
        return 0
    return 2 if "own_engine" in getattr(item, "fixturenames", ()) or item.get_closest_marker("browser") else 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in config.stash.get(NOT_RUN, Counter()).items():
        terminalreporter.write_line(f"{count} not run: {reason}", yellow=True)

"""Reads YAML that users write."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import yaml
from django.utils.translation import gettext as _

from portal.errors import InvalidRequest

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32


class _RefusedError(Exception):
    """Valid YAML that is not accepted."""


class _Loader(yaml.SafeLoader):
    """Safe loader without aliases: a small text cannot stand for a huge one. Times stay text, as in JSON."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in each if tag != "tag:yaml.org,2002:timestamp"]
        for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise _RefusedError(_("Aliases (*name) are not supported; write the value out."))
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse keys that occur twice, of which PyYAML uses the last."""
        seen = set()
        for key, __ in node.value:
            if key.value in seen:
                raise _RefusedError(
                    _("{value} occurs twice, again in line {line}.").format(
                        value=str(key.value)[:60], line=_line(key)
                    )
                )
            seen.add(key.value if isinstance(key.value, str) else None)
        return super().construct_mapping(node, deep)


def load_yaml(text: str, field: str) -> Any:
    """Return the content of a YAML text. Raise InvalidRequest for ``field``."""
    return load_yaml_document(text, field)[0]


def load_yaml_document(text: str, field: str) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML text, and the line of each key by its path, such as ``volumes.0.target``.

    The content is JSON: numbers as keys become text. Raise InvalidRequest for ``field``.
    """
    loader = None
    try:
        if len(text.encode()) > MAX_BYTES:
            raise _RefusedError(
                _("The text is larger than {max_bytes} KiB.").format(max_bytes=MAX_BYTES // 1024)
            )
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return _as_json(loader.construct_document(node)), dict(_lines(node, ""))
    except yaml.YAMLError as error:
        problem = _("It is not valid YAML: {error}").format(error=str(error)[:300])
    except RecursionError:
        problem = _("It is nested too deeply.")
    except _RefusedError as refusal:
        problem = str(refusal)
    except ValueError as error:  # such as an integer of too many digits
        problem = _("It contains a value that cannot be read: {error}").format(error=str(error)[:200])
    finally:
        if loader is not None:
            loader.dispose()
    raise InvalidRequest(fields={field: problem})


def line_of(path: str, lines: Mapping[str, int]) -> int:
    """Return the line of the value at the path, or of the nearest value that contains it; 0 if there is none."""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return lines.get(path, 0)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _lines(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    prefix = f"{path}." if path else ""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield f"{prefix}{key.value}", _line(key)
                yield from _lines(value, f"{prefix}{key.value}")
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield f"{prefix}{number}", _line(value)
            yield from _lines(value, f"{prefix}{number}")


def _as_json(value: Any, depth: int = 0) -> Any:
    """Return the value with numbers as keys as text. Refuse what JSON does not have, and deep nesting."""
    if depth > MAX_DEPTH:
        raise _RefusedError(_("It is nested too deeply."))
    match value:
        case dict():
            return {_json_key(key): _as_json(each, depth + 1) for key, each in value.items()}
        case list():
            return [_as_json(each, depth + 1) for each in value]
        case bool() | int() | str() | None:
            return value
        case float():
            if math.isfinite(value):
                return value
            raise _RefusedError(_("{value} is too large, or not a number.").format(value=value))
    raise _RefusedError(_("{value} is no text, number, list or mapping.").format(value=str(value)[:60]))


def _json_key(key: Any) -> str:
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return str(key)
    raise _RefusedError(_("The key {key} is not text; put it into quotes.").format(key=str(key)[:60]))

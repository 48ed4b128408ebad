"""Metrics that are infinite or not a number, as MLflow's client logs them: tables, curves, CSV and comparisons."""

from __future__ import annotations

import csv
import math
import re

import pytest
from django.conf import settings
from django.test import Client
from mlflow.entities import Metric

from portal.domain.sweeps.sweeps import Direction
from portal.selectors.experiments import experiments as selectors
from portal.web.display.formatting import metric_value
from portal.web.experiments.comparison import best_values
from tests.chromium import PATIENCE_MS, chromium
from tests.tracking.conftest import TrackingWorld
from tests.tracking.test_pages import browser, search

NUMBERS = {
    0: "0", 1: "1", -3: "-3", 64: "64", 1234567: "1,234,567", 0.5: "0.5", 0.123456: "0.1235", 0.0001: "0.0001",
    12345.67: "12,346", -0.00001234: "-1.234e-5", 1e-300: "1e-300", 999999999999: "999,999,999,999", 1e12: "1e+12",
    1.797e308: "1.797e+308", math.inf: "∞", -math.inf: "-∞", math.nan: "NaN", 5e-324: "4.941e-324",
}  # fmt: skip
CURVE = [0.5, math.inf, 0.25, math.nan, -math.inf, 0.125]


@pytest.mark.parametrize(("value", "text"), [*NUMBERS.items(), (-0.0, "0")])
def test_a_number_is_short(value: float, text: str) -> None:
    assert metric_value(value) == text and len(text) <= 15


@pytest.fixture
def runs(tracking: TrackingWorld) -> list[str]:
    """Runs that end with a finite value, with infinity and with NaN."""
    client = tracking.client()
    experiment = client.create_experiment("special")
    made = []
    for name, last in (("fine", 0.125), ("infinite", math.inf), ("lost", math.nan), ("below", -math.inf)):
        run = client.create_run(experiment, run_name=name).info.run_id
        values = [*CURVE[:-1], last]
        client.log_batch(run, metrics=[Metric("loss", value, 1000 + i, i) for i, value in enumerate(values)])
        for name, values in (("huge", (1e308, -1e308, 0.0)), ("tiny", (1e-310, 3e-310, 0.0))):
            client.log_batch(run, metrics=[Metric(name, value, 1000, i) for i, value in enumerate(values)])
        client.log_batch(run, metrics=[Metric("lr", 0.1 * (len(made) + 1), 1000, 0)])
        made.append(run)
    return made


@pytest.mark.django_db(transaction=True)
def test_pages_and_csv_name_special_values_and_none_is_best(tracking: TrackingWorld, runs: list[str]) -> None:
    for direction in (Direction.MINIMIZE, Direction.MAXIMIZE):
        listed = selectors.runs_by_id(tracking.project, runs)
        best = best_values(list(listed.values()), {"loss": direction})["loss"]
        assert best.value == 0.125
    search(tracking, tracking.project, "loss", "maximize")
    at = f"project={tracking.project.public_id}"
    page = browser(tracking.viewer)
    text = page.get(f"/experiments/?{at}&run={runs[0]}&run={runs[1]}").content.decode()
    cells = re.findall(r'data-l="loss">(?:<span class="fw-best">)?([^<]*)', text)
    assert sorted(cells) == sorted(["0.125", "∞", "NaN", "-∞"])
    for run, value in zip(runs, ("0.125", "∞", "NaN", "-∞"), strict=True):
        text = page.get(f"/experiments/{tracking.project.public_id}/{run}/").content.decode()
        assert f'<td class="fw-mono">loss</td><td class="fw-num">{value}</td>' in text
        assert not re.search(r"\d{20}", text)
    curve = page.get(f"/experiments/series/?{at}&run={runs[0]}").json()["metrics"]["loss"][runs[0]]
    assert curve["values"] == [0.5, "Infinity", 0.25, "NaN", "-Infinity", 0.125]
    assert curve["steps"] == list(range(6))
    table = csv.DictReader(page.get(f"/experiments/runs.csv?{at}").getvalue().decode().splitlines())
    assert {row["name"]: row["metrics.loss"] for row in table} == {
        "fine": "0.125", "infinite": "Infinity", "lost": "NaN", "below": "-Infinity",
    }  # fmt: skip


@pytest.mark.browser
@pytest.mark.django_db(transaction=True)
def test_a_curve_leaves_special_values_out_of_its_scale_and_marks_them(
    tracking: TrackingWorld, runs: list[str], live_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    client = Client()
    client.force_login(tracking.viewer)
    cookie = {
        "name": settings.SESSION_COOKIE_NAME,
        "value": client.cookies[settings.SESSION_COOKIE_NAME].value,
    }
    with chromium() as opened:
        context = opened.new_context(viewport={"width": 390, "height": 844})
        context.add_cookies([cookie | {"url": live_server.url}])
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{live_server.url}/experiments/{tracking.project.public_id}/{runs[0]}/")
        panel = page.locator("section.fw-panel", has=page.locator("h3", has_text="loss"))
        note = panel.locator("p").inner_text()
        assert all(part in note for part in ("∞ at step 1", "NaN at step 3", "-∞ at step 4"))
        for name, labels in (("huge", {"-1e+308", "0", "1e+308"}), ("tiny", {"0", "3e-310"})):
            drawn = page.locator("section.fw-panel", has=page.locator("h3", has_text=name))
            assert labels <= set(drawn.evaluate("each => each.plot.axes[1]._values")), name
        assert panel.locator("td").all_inner_texts() == ["fine", "", "0.125", "0.5", "0.125"]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        scale = page.evaluate("document.querySelector('[data-run-charts]').panels.loss.plot.scales.y")
        assert -0.1 < scale["min"] <= 0.125 and 0.5 <= scale["max"] < 1

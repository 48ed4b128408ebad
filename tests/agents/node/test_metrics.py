"""The file by which a task reports metrics: what counts as a line, how much is read, and what it may not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.engines.replies import MAX_METRICS, Container, parse_event
from agents.node.spec import report_files
from agents.wire.fields import InvalidMessageError
from tests.agents.node.conftest import LoneNode, log_with
from tests.agents.node.test_checkpoint import ODD
from tests.agents.node.test_process import eventually, needs_root, start


def read(folder: Path, content: bytes) -> list[tuple[float, float | None]]:
    report_files.create_report_file(report_files.METRIC_FILE, str(folder), None, None)
    (folder / "metric").write_bytes(content)
    return report_files.read_metrics(str(folder))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", []),
        (b"1 0.5\n", [(1.0, 0.5)]),
        (b"1 0.5\n2 0.25\n", [(1.0, 0.5), (2.0, 0.25)]),
        (b"1.5\t-3e-4 \n", [(1.5, -3e-4)]),
        (b"1 nan\n2 inf\n3 -inf\n4 1e300\n", [(1.0, None), (2.0, None), (3.0, None), (4.0, None)]),
        (b"1 Infinity\n2 -NaN\n3 1200000000000000.0\n", [(1.0, None), (2.0, None), (3.0, None)]),
        (b"1 %s\n2 1e-9999\n3 1e9999\n" % (b"9" * 400), [(1.0, None), (2.0, 0.0), (3.0, None)]),
        (
            b"1 .25\n2 -.5e1\n3 0.%s\n4 7.\n" % (b"3" * 40),
            [(1.0, 0.25), (2.0, -5.0), (3.0, 1 / 3), (4.0, 7.0)],
        ),
        (b"1 .\n2 e5\n3 1e\n4 +\n5 infi\n", []),
        (b"1 0.5\n2 0.2", [(1.0, 0.5)]),  # the last line may still be written
        (b"x\n-1 2\n1\n1 2 3\n1 0x10\n2 7\n\xff\xfe\n", [(2.0, 7.0)]),
        (b"9" * 5000 + b"\n1 2\n", [(1.0, 2.0)]),
    ],
)
def test_each_whole_line_is_a_step_and_a_value(
    tmp_path: Path, content: bytes, found: list[tuple[float, float | None]]
) -> None:
    assert read(tmp_path, content) == found


def test_only_the_last_lines_are_read_of_a_long_file(tmp_path: Path) -> None:
    found = read(tmp_path, b"".join(b"%d 0.%d\n" % (n, n) for n in range(1, 1_000_000)))
    assert [step for step, _ in found] == list(range(1_000_000 - report_files.MAX_METRIC_LINES, 1_000_000))
    assert len(found) <= MAX_METRICS


@pytest.mark.parametrize("odd", ODD)
def test_only_a_plain_file_counts(tmp_path: Path, odd: str) -> None:
    assert read(tmp_path, b"1 2\n")
    (tmp_path / "elsewhere").write_text("1 2\n")  # where the link would lead
    ODD[odd](tmp_path / "metric")
    assert report_files.read_metrics(str(tmp_path)) == []


@given(content=st.binary(max_size=200) | st.text("0123456789.-+e naif\n", max_size=200).map(str.encode))
def test_any_content_gives_an_answer_the_portal_can_read(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    found = read(tmp_path_factory.getbasetemp(), content)
    row = {"job": "j", "attempt": 1, "task": 0, "container": "c", "event": "exited", "metrics": found}
    event = parse_event(row)
    assert event is not None and list(event.container.metrics) == found  # type: ignore[union-attr]


@pytest.mark.parametrize("metrics", [[[1]], [["1", 2]], [[-1, 2]], [[1, "x"]], [{"step": 1}], [[1, 2]] * 201])
def test_other_metrics_of_a_node_are_refused(metrics: object) -> None:
    row = {"job": "j", "attempt": 1, "task": 0, "name": "c", "digest": "d", "state": "running"}
    assert Container.from_wire(row).metrics == ()
    with pytest.raises(InvalidMessageError, match="metric"):
        Container.from_wire(row | {"metrics": metrics})


@needs_root
def test_a_task_reports_while_it_runs_and_after_its_end(node: LoneNode) -> None:
    script = (
        'env | grep ^FAIRWAY_; echo "1 0.5" >> "$FAIRWAY_METRIC_FILE"; echo seen;'
        ' while [ ! -e ~/go ]; do sleep 0.05; done; echo "2 0.25" >> "$FAIRWAY_METRIC_FILE"'
    )
    home = [{"kind": "home", "source": "jmetric", "target": "/home/ada"}]
    variables = {"FAIRWAY_PARAM_LR": "0.1", "FAIRWAY_TRIAL": "3", "FAIRWAY_JOB": "other"}
    link = node.open()

    def row() -> dict[str, Any]:
        (found,) = [
            each for each in link.request("list", timeout_s=20)["containers"] if each["job"] == "jmetric"
        ]
        return found

    start(link, node.spec("jmetric", "sh", "-c", script, mounts=home, env=variables))
    log = log_with(link, "jmetric", "seen")
    assert "FAIRWAY_PARAM_LR=0.1" in log and "FAIRWAY_TRIAL=3" in log and "FAIRWAY_JOB=jmetric" in log
    assert row()["metrics"] == [[1.0, 0.5]]
    (node.folder / "homes/jmetric/go").touch()
    eventually(lambda: row()["state"] == "exited")
    assert row()["metrics"] == [[1.0, 0.5], [2.0, 0.25]]

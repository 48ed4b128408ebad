"""Recorded work is read whole or refused with the place of the slip."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from bench.replay.__main__ import main
from bench.replay.tables import TableRow, read_json, read_rows
from scheduler.replay.input_files import MalformedFileError, read_text


def written(tmp_path: Path, content: bytes | str) -> Path:
    path = tmp_path / "table.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def the_row(tmp_path: Path, line: str) -> TableRow:
    return next(read_rows(written(tmp_path, f"name,amount\n{line}\n"), ("name", "amount")))


def test_a_gzip_file_is_known_by_its_first_bytes_not_its_name(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(b"name,amount\na,3\n\nb,4\n", mtime=0))
    rows = list(read_rows(path, ("amount",)))
    assert [(row.line, row.integer("amount")) for row in rows] == [(2, 3), (4, 4)]


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        (gzip.compress(b"name,amount\n" * 999, mtime=0)[:-12], "", "damaged or truncated"),
        (b"name,amount\n\xff\xfe,1\n", "line 2", "UTF-8"),
        ("name\nx\n", "line 1", "column amount is missing"),
        ("name,amount,amount\nx,1,2\n", "line 1", "named twice"),
        ("", "line 1", "column name is missing"),
        ("name,amount\nx,1,2\n", "line 2", "3 cells"),
        ("name,amount\nx\n", "line 2", "1 cells"),
        ('name,amount\n"x,1\n', "line 2", "CSV line"),
    ],
)
def test_a_malformed_table_is_refused_with_its_position(
    tmp_path: Path, content: bytes | str, place: str, message: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(MalformedFileError) as caught:
        list(read_rows(path, ("name", "amount")))
    assert caught.value.location == place
    assert message in caught.value.message
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("cell", ["", "-1", "1.5", "many", "1_000", "nan", "9" * 30, "١"])
def test_a_value_that_is_not_an_integer_is_refused_with_its_column(tmp_path: Path, cell: str) -> None:
    with pytest.raises(MalformedFileError) as caught:
        the_row(tmp_path, f"x,{cell}").integer("amount")
    assert caught.value.location == "line 2, column amount"


@pytest.mark.parametrize("cell", ["", "-0.5", "nan", "inf", "1e400", "soon"])
def test_a_value_that_is_not_a_number_is_refused(tmp_path: Path, cell: str) -> None:
    with pytest.raises(MalformedFileError):
        the_row(tmp_path, f"x,{cell}").number("amount")


def test_numbers_are_read(tmp_path: Path) -> None:
    assert the_row(tmp_path, "x, 12 ").integer("amount") == 12
    assert the_row(tmp_path, "x,1.5e3").number("amount") == 1500.0


def test_a_missing_file_and_a_folder_are_distinguished(tmp_path: Path) -> None:
    with pytest.raises(MalformedFileError, match="no such file"):
        read_text(tmp_path / "nothing.csv")
    with pytest.raises(MalformedFileError, match="cannot be read"):
        read_text(tmp_path)


def test_json_is_refused_with_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(MalformedFileError) as caught:
        read_json(written(tmp_path, '{\n "a": }'))
    assert caught.value.location == "line 2, column 7"


def test_an_unknown_replay_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])
    assert ended.value.code == 2
    assert "nothing" in capsys.readouterr().err

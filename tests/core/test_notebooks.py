"""Which parameters are found in a notebook, and the program that runs it."""

from __future__ import annotations

from portal.domain.jobs.notebooks import (
    executed_notebook,
    notebook_command,
    notebook_program,
    read_notebook_parameters,
)
from portal.domain.jobs.template_parameters import template_errors

SOURCE = """
import os  # is no parameter
lr = 1e-3
EPOCHS: int = 10
name = "résumé {x}"
shuffle = True
layers = [64, 64]
seed = None
path = os.environ["HOME"]
lr = -0.5
größe = 3
_hidden = 1
Epochs = 2
obj.field = 1
a = b = 7
open("/tmp/pwned", "w")
"""


def test_numbers_texts_and_truth_values_are_parameters() -> None:
    found, fixed = read_notebook_parameters(SOURCE)
    shown = {each["label"]: (each["name"], each["type"], each["default"]) for each in found}
    assert shown == {
        "EPOCHS": ("epochs", "integer", 10),
        "name": ("name", "text", "résumé {x}"),
        "shuffle": ("shuffle", "boolean", True),
        "lr": ("lr", "number", -0.5),
        "größe": ("gr_e", "integer", 3),
        "_hidden": ("p_hidden", "integer", 1),
        "Epochs": ("epochs_2", "integer", 2),
        "a": ("a", "integer", 7),
        "b": ("b", "integer", 7),
    }
    assert fixed == ["layers", "seed", "path"]
    command = notebook_command(found)
    assert template_errors({"command": command, "name": "x"}, found) == {}
    assert command[-2:] == ["b", "{b}"] and command[command.index("-y") :][:2] == ["-y", "shuffle: {shuffle}"]


def test_text_other_than_python_has_no_parameters() -> None:
    for source in ("", "x = ", "lr <- 0.1", "\0", "x = " + "(" * 500):
        assert read_notebook_parameters(source) == ([], [])
    for value in ("10**30", "'" + "x" * 2000 + "'", "1e400", "{}", "f'{x}'", "-'a'"):
        assert read_notebook_parameters(f"x = {value}") == ([], ["x"]), value


def test_only_the_program_of_a_notebook_names_one() -> None:
    for path in ("runs/train.ipynb", 'a "b" {x} \\ é.ipynb'):
        program = notebook_program(path)
        compile(program, "program", "exec")
        assert executed_notebook(program, "j1") == (path, path.replace(".ipynb", "-j1.ipynb"))
    for other in (
        "",
        program[2:],
        program.replace("NOTEBOOK", "X"),
        program.replace("NOTEBOOK = ", 'NOTEBOOK = "'),
    ):
        assert executed_notebook(other, "j1") is None

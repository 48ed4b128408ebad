"""YAML of users: what is refused, while it is parsed; whatever is accepted is JSON that a row can hold."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.errors import InvalidRequest
from portal.services.yaml_input import MAX_DEPTH, MAX_VALUES, load_yaml

PORTAL = Path(__file__).parent.parent.parent / "portal"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((each * 20_000, "nested deeper than 32 levels") for each in ("[", "{a: ", "- ", "? ")),
        ("\n".join(" " * level + "a:" for level in range(600)), "nested deeper than 32 levels"),
        ("[" + "a," * MAX_VALUES + "]", "more than 50000 values"),
        ("a: &x [1]\nb: *x", "Aliases"),
        ("a: 1\na: 2", "a occurs twice, again in line 2"),
        ("1: 1\n'1': 2", "1 occurs twice"),
        *((f"a: {each}", "more than 40 characters") for each in ("9" * 41, "0x" + "f" * 9000, "1" + ":01" * 9000)),
        ("a: 1" + ":01" * 9000 + ".5", "more than 40 characters"),
        *((each, "is no text, number") for each in ("!!int ''", "!!int x", "!!bool x", "!!float ''", "!!null x")),
        *((each, "is no text, number") for each in ("!!timestamp x", "!!set {a}", "!!omap [a: 1]", "!!binary x")),
        ("!!python/object/apply:os.system [id]", "is no text, number"),
        *((each, "A key is not text, in line 1") for each in ("{[1]: 2}", "? {a: b}\n: c")),
        ("~: 1", "The key None is not text"),
        *((each, "too large, or not a number") for each in (".inf", ".nan", "1.0e+999")),
        *((each, "cannot be stored") for each in ('"\\0"', '"\\ud800": 1')),
        ("a" * (256 * 1024 + 1), "larger than 256 KiB"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        load_yaml(text, "field")
    assert message in refusal.value.fields["field"]


def test_nothing_behind_a_refused_value_is_parsed() -> None:
    """The end of the text is not YAML; whether it is read shows in the message."""
    for text in ("[" * (MAX_DEPTH + 1) + " ]}", "- " * (MAX_DEPTH + 1) + "\n}", "[a," * 5 + "*x, }"):
        with pytest.raises(InvalidRequest) as refusal:
            load_yaml(text, "field")
        assert "not valid YAML" not in refusal.value.fields["field"]
    assert load_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, "field")


@given(st.text(alphabet=list("!intboflasekmp<>=:-?[]{}&*'\"#|,.~%@0123456789exo \n\\u"), max_size=60))
def test_every_text_is_json_or_refused(text: str) -> None:
    try:
        json.dumps(load_yaml(text, "field"), allow_nan=False).encode()
    except InvalidRequest as refusal:
        assert refusal.fields["field"]


def test_one_loader_reads_the_yaml_of_users() -> None:
    loads = {
        str(path.relative_to(PORTAL))
        for path in PORTAL.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and "load" in node.attr.lower()
        and ast.unparse(node.value) == "yaml"
    }
    # the other file reads what is shipped
    assert loads == {"services/yaml_input.py", "services/cluster/starter_templates.py"}

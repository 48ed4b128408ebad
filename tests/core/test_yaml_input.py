"""YAML of users: what is refused, while it is parsed; whatever is accepted is JSON that a row can hold."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from portal.errors import InvalidRequest
from portal.services.yaml_input import MAX_DEPTH, MAX_VALUES, dump_yaml, load_yaml

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
        *((f"a: {each}", "more than 40 characters") for each in ("9" * 41, "0x" + "f" * 9000, "0." + "1" * 9000)),
        *((each, "neither text, number") for each in ("!!int ''", "!!int x", "!!bool x", "!!float ''", "!!null x")),
        *((each, "neither text, number") for each in ("!!timestamp x", "!!set {a}", "!!omap [a: 1]", "!!binary x")),
        ("!!python/object/apply:os.system [id]", "neither text, number"),
        *((each, "A key is not text, in line 1") for each in ("{[1]: 2}", "? {a: b}\n: c")),
        *((f"{each}: 1", "A key is not text, in line 1") for each in ("~", "true", "1.5")),
        ("a: \x01", "a character in line 1 that YAML does not allow"),
        ("a: 1\n---\nb: 2", "A second document begins with --- in line 2"),
        ("a:\n\tb: 1", "in line 2: found character '\\t' that cannot start any token. Indent with spaces"),
        ("a: 1\nb: c: d", "in line 2: mapping values are not allowed here. Put text with a colon"),
        ("a: [1", "Close each bracket"),
        *((each, "too large, or not a number") for each in (".inf", ".nan", "1.0e+999")),
        *((each, "cannot be stored") for each in ('"\\0"', '"\\ud800": 1')),
        ("a" * (256 * 1024 + 1), "larger than 256 KiB"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        load_yaml(text, "field")
    assert message in refusal.value.fields["field"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((each, each) for each in ("2:30:00", "1:30", "on", "No", "y", "2027-01-01", "0b1", "1_000", "=", "<<")),
        ("010", 10), ("0o10", 8), ("0x1F", 31), ("-3", -3), ("1e3", 1000.0), (".5", 0.5), ("1.", 1.0),
        *((each, None) for each in ("", "~", "Null")), ("True", True), ("FALSE", False),
        ("'1'", "1"), ("!!str 1", "1"), ("TrUe", "TrUe"),
    ],
)  # fmt: skip
def test_plain_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    loaded = load_yaml(f"a: {text}", "field")["a"]
    assert (loaded, type(loaded)) == (value, type(value))


@given(st.text(alphabet="0123456789xob+-.eE_:~nulNULtrfasefonyi", min_size=1, max_size=8))
def test_plain_scalars_are_read_as_by_another_reader_of_yaml_1_2(text: str) -> None:
    try:
        loaded = load_yaml(f"a: {text}", "field")["a"]
    except InvalidRequest:
        return
    if re.search(r"_|^0o?$|^[-+]0[xo]|:$", text):  # ruamel.yaml reads more here than the core schema
        return
    other = YAML(typ="safe", pure=True).load(f"a: {text}")["a"]
    assert (str(loaded), type(loaded)) == (str(other), type(other))


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(-1e9, 1e9),
        st.text(alphabet="0123456789xob+-.eE_:~nulNUtrfasey=<>#'\"!&*[]{}, |\nü", max_size=10),
        st.sampled_from(["on", "no", "1e3", "08", "0o10", "2:30:00", "2027-01-01", "null", "~", ".inf", "1_0"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a0n:~ ", max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(VALUES)
def test_what_is_written_is_read_as_the_same(value: object) -> None:
    assert load_yaml(dump_yaml({"a": value}), "field") == {"a": value}


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
    except InvalidRequest as error:
        assert error.fields["field"]


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
    assert loads == {"services/yaml_input.py", "services/jobs/starter_templates.py"}

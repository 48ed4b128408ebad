"""Reads YAML that users write, by the core schema of YAML 1.2, and writes it.

In YAML 1.1, which PyYAML reads, ``2:30:00`` is 9000, ``on`` is true and ``010`` is 8. In 1.2 they are text, text, 10.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import yaml
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.errors import InvalidRequest

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 50_000
MAX_NUMBER_LENGTH = 40
_COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_TEXT_TAG = "tag:yaml.org,2002:str"
_CORE_SCHEMA = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)
"""Tag, pattern and first characters of plain scalars (YAML 1.2.2, section 10.3.2); \\0 is the empty one."""


def _core_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first in _CORE_SCHEMA:
        for character in first:
            rule = (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
            found.setdefault(character.replace("\0", ""), []).append(rule)
    return found


class _RefusedError(Exception):
    """Valid YAML that is not accepted."""


class _Loader(yaml.SafeLoader):
    """Safe loader without aliases: a small text cannot stand for a huge one. Times stay text, as in JSON."""

    yaml_implicit_resolvers = _core_resolvers()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node. Nothing behind a refused one is parsed."""
        if self.check_event(yaml.events.AliasEvent):
            line = int(self.peek_event().start_mark.line) + 1  # type: ignore[no-untyped-call]
            raise _RefusedError(
                _("Aliases (*name) are not supported, in line {line}; write the value out.").format(line=line)
            )
        self._depth, self._count = self._depth + 1, self._count + 1
        if self._depth > MAX_DEPTH:
            raise _RefusedError(_("It is nested deeper than {max_depth} levels.").format(max_depth=MAX_DEPTH))
        if self._count > MAX_VALUES:
            raise _RefusedError(_("It has more than {max_values} values.").format(max_values=MAX_VALUES))
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node)
        elif node is not None and node.tag not in _COLLECTION_TAGS:
            raise _RefusedError(_not_json(node.tag, node))
        return node

    def _check_scalar(self, node: yaml.ScalarNode) -> None:
        """Refuse types that JSON lacks, a text that is not of its explicit type, and what no row can hold."""
        if re.search("[\\0\ud800-\udfff]", node.value):
            raise _RefusedError(
                _("The text in line {line} contains a character that cannot be stored.").format(
                    line=_line(node)
                )
            )
        if node.tag == _TEXT_TAG:
            return
        implicit = self.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
        if node.tag != implicit:
            raise _RefusedError(_not_json(f"{node.tag} {node.value}", node))
        if node.tag in _NUMBER_TAGS and len(node.value) > MAX_NUMBER_LENGTH:
            raise _RefusedError(
                _("The number {value} in line {line} has more than {max_length} characters.").format(
                    value=f"{node.value[:20]}…", line=_line(node), max_length=MAX_NUMBER_LENGTH
                )
            )
        if node.tag == _NUMBER_TAGS[1] and not math.isfinite(float(_python_float(node.value))):
            raise _RefusedError(
                _("{value} in line {line} is too large, or not a number.").format(
                    value=node.value, line=_line(node)
                )
            )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse keys that occur twice, of which PyYAML uses the last."""
        seen = set()
        for key, __ in node.value:
            is_key = isinstance(key, yaml.ScalarNode) and key.tag in (_TEXT_TAG, _NUMBER_TAGS[0])
            if not is_key:
                raise _RefusedError(
                    _("A key is not text, in line {line}; put it into quotes.").format(line=_line(key))
                )
            if key.value in seen:
                raise _RefusedError(
                    _("{value} occurs twice, again in line {line}.").format(
                        value=str(key.value)[:60], line=_line(key)
                    )
                )
            if key.value == "<<" and key.style is None:
                raise _RefusedError(
                    _("Merge keys (<<) are not supported, in line {line}; write the fields out.").format(
                        line=_line(key)
                    )
                )
            seen.add(key.value)
            key.tag = _TEXT_TAG  # numbers as keys are text, as in JSON
        return super().construct_mapping(node, deep)

    def construct_bool(self, node: yaml.ScalarNode) -> bool:
        return str(node.value).lower() == "true"

    def construct_int(self, node: yaml.ScalarNode) -> int:
        text = node.value
        return (
            int(text, 8) if text.startswith("0o") else int(text, 16) if text.startswith("0x") else int(text)
        )

    def construct_float(self, node: yaml.ScalarNode) -> float:
        return float(_python_float(node.value))


_Loader.add_constructor("tag:yaml.org,2002:bool", _Loader.construct_bool)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_float)


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines, such as programs, as they are instead of with ``\\n``.

    Text that YAML 1.1 or 1.2 would read as another type is quoted.
    """

    yaml_implicit_resolvers = {
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *_core_resolvers().get(first, ())]
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_core_resolvers()}
    }


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_block = "\n" in text and text.replace("\n", "").isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if is_block else None)


_BlockDumper.add_representer(str, _represent_text)


def dump_yaml(value: Any) -> str:
    """Return JSON values as YAML, which ``load_yaml`` reads as equal values."""
    return yaml.dump(value, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=100)


def _python_float(text: str) -> str:
    """Return the text of a float as Python reads it: YAML writes .inf and .nan."""
    return text.replace(".", "") if text.lower().lstrip("+-") in (".inf", ".nan") else text


def _not_json(value: str, node: yaml.Node) -> str:
    return _("{value} in line {line} is neither text, number, list nor mapping.").format(
        value=value.replace("tag:yaml.org,2002:", "!!")[:60], line=_line(node)
    )


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
        return loader.construct_document(node), dict(_lines(node, ""))
    except yaml.MarkedYAMLError as error:
        problem = _syntax_problem(error)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = _("It contains a character in line {line} that YAML does not allow.").format(line=line)
    except yaml.YAMLError as error:
        problem = _("It is not valid YAML: {error}").format(error=str(error)[:300])
    except _RefusedError as error:
        problem = str(error)
    except (ValueError, OverflowError) as error:  # such as 0b, which is no number
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


_SEVERAL_DOCUMENTS = "expected a single document in the stream"
_SYNTAX_HINTS = (
    ("'\\t'", gettext_noop("Indent with spaces, not with tabs.")),
    (
        "mapping values are not allowed",
        gettext_noop("Put text with a colon and a space into quotes, or indent the line."),
    ),
    ("could not find expected ':'", gettext_noop("Write each field as name: value.")),
    (
        "expected <block end>",
        gettext_noop("Indent all fields of a mapping, and all items of a list, equally."),
    ),
    ("expected ',' or", gettext_noop("Close each bracket and brace.")),
    ("'<stream end>'", gettext_noop("Close each bracket and brace.")),
    ("unexpected end of stream", gettext_noop("Close each quote, bracket and brace.")),
    ("cannot start any token", gettext_noop("Put text that begins with this character into quotes.")),
)
"""Part of PyYAML's message, and what to do."""


def _syntax_problem(error: yaml.MarkedYAMLError) -> str:
    """Return one sentence with the line, and one that says what to do where that is known."""
    if error.context == _SEVERAL_DOCUMENTS:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        text = _("A second document begins with --- in line {line}; give each document on its own.")
        return text.format(line=line)
    mark = error.problem_mark or error.context_mark
    reason = " ".join(filter(None, (error.problem or error.context or "", error.note)))[:200]
    text = _("It is not valid YAML in line {line}: {error}.").format(
        line=mark.line + 1 if mark else 1, error=reason
    )
    hints = [_(hint) for part, hint in _SYNTAX_HINTS if part in str(error)]
    return f"{text} {hints[0]}" if hints else text

"""Reads YAML that users write."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import yaml
from django.utils.translation import gettext as _

from portal.errors import InvalidRequest

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 50_000
MAX_NUMBER_LENGTH = 40
_COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_TEXT_TAG = "tag:yaml.org,2002:str"


class _RefusedError(Exception):
    """Valid YAML that is not accepted."""


class _Loader(yaml.SafeLoader):
    """Safe loader without aliases: a small text cannot stand for a huge one. Times stay text, as in JSON."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in each if tag != "tag:yaml.org,2002:timestamp"]
        for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node. Nothing behind a refused one is parsed."""
        if self.check_event(yaml.events.AliasEvent):
            raise _RefusedError(_("Aliases (*name) are not supported; write the value out."))
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
            raise _RefusedError(_not_json(node.tag))
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
            raise _RefusedError(_not_json(f"{node.tag} {node.value}"))
        if node.tag in _NUMBER_TAGS and len(node.value) > MAX_NUMBER_LENGTH:
            raise _RefusedError(
                _("The number {value} has more than {max_length} characters.").format(
                    value=f"{node.value[:20]}…", max_length=MAX_NUMBER_LENGTH
                )
            )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse keys that occur twice, of which PyYAML uses the last."""
        seen = set()
        for key, __ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _RefusedError(
                    _("A key is not text, in line {line}; put it into quotes.").format(line=_line(key))
                )
            if key.value in seen:
                raise _RefusedError(
                    _("{value} occurs twice, again in line {line}.").format(
                        value=str(key.value)[:60], line=_line(key)
                    )
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _not_json(value: str) -> str:
    return _("{value} is no text, number, list or mapping.").format(
        value=value.replace("tag:yaml.org,2002:", "!!")[:60]
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
        return _as_json(loader.construct_document(node)), dict(_lines(node, ""))
    except yaml.YAMLError as error:
        problem = _("It is not valid YAML: {error}").format(error=str(error)[:300])
    except _RefusedError as refusal:
        problem = str(refusal)
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


def _as_json(value: Any) -> Any:
    """Return the value with numbers as keys as text. Refuse what JSON does not have."""
    match value:
        case dict():
            return {_json_key(key): _as_json(each) for key, each in value.items()}
        case list():
            return [_as_json(each) for each in value]
        case bool() | int() | str() | None:
            return value
        case float():
            if math.isfinite(value):
                return value
            raise _RefusedError(_("{value} is too large, or not a number.").format(value=value))
    raise _RefusedError(_not_json(str(value)))


def _json_key(key: Any) -> str:
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return str(key)
    raise _RefusedError(_("The key {key} is not text; put it into quotes.").format(key=str(key)[:60]))

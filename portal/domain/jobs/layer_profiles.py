"""Decodes the text of a layer profile: JSON, or a graph of PipeDream's profiler. Pure.

The format of the graph is that of ``graph.txt`` in https://github.com/msr-fiddle/pipedream (``graph/graph.py``): a
line for each node, ``ID -- DESCRIPTION -- forward_compute_time=MS, backward_compute_time=MS, activation_size=BYTES,
parameter_size=BYTES``, optionally with `` -- stage_id=N``, and a line for each edge, ``ID -- ID`` after a tab. The
activation size of a node with several outputs is a list, ``[BYTES; BYTES]``.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_PROFILE_BYTES = 1024 * 1024
MAX_NUMBER_LENGTH = 40
_GRAPH_KEYS = {
    "forward_compute_time": "fwd_ms",
    "backward_compute_time": "bwd_ms",
    "activation_size": "activation_bytes",
    "parameter_size": "parameter_bytes",
}
_EDGE = re.compile(r"\s+(\S+) -- (\S+)\s*")
_NOT_STORABLE = re.compile(
    r"[\0\ud800-\udfff]|\\u(?:0000|[dD][89a-fA-F])"
)  # also escaped, as halves of characters
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class ProfileTextError(ValueError):
    """The text is no layer profile; the message is a sentence."""


def decode_profile(text: str) -> Any:
    """Return the profile of a text as JSON values. Raise ProfileTextError."""
    if not text.strip():
        raise ProfileTextError("The profile is empty.")
    if _NOT_STORABLE.search(text):
        raise ProfileTextError("The profile has a character that cannot be stored.")
    if " -- " in text.strip().partition("\n")[0] and not text.lstrip().startswith(("{", "[")):
        return read_graph_text(text)
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_int=_read_int,
            parse_float=_read_float,
            object_pairs_hook=_read_object,
        )
    except ProfileTextError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProfileTextError(f"The profile is not JSON: {str(error)[:200]}.") from None


def read_graph_text(text: str) -> dict[str, Any]:
    """Return nodes and edges of a ``graph.txt``. Raise ProfileTextError."""
    nodes: list[dict[str, Any]] = []
    edges: list[list[str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if edge := _EDGE.fullmatch(line):
            edges.append([edge[1], edge[2]])
        else:
            nodes.append(_read_node(line.strip(), number))
    return {"nodes": nodes, "edges": edges}


def _read_node(line: str, number: int) -> dict[str, Any]:
    words = line.split(" -- ")
    if len(words) > 3 and words[-1].startswith("stage_id="):  # a graph that the optimizer has divided
        words.pop()
    if len(words) < 3:
        raise ProfileTextError(
            f"Line {number} is neither a node, ID -- DESCRIPTION -- forward_compute_time=..., nor an edge."
        )
    amounts: dict[str, float] = {}
    for part in words[-1].split(", "):
        name, _, value = part.partition("=")
        if name not in _GRAPH_KEYS:
            raise ProfileTextError(f"Line {number} has the unknown value {name[:40]!r}.")
        if _GRAPH_KEYS[name] in amounts:
            raise ProfileTextError(f"Line {number} has {name} twice.")
        numbers = value[1:-1].split("; ") if value.startswith("[") and value.endswith("]") else [value]
        if not all(_NUMBER.fullmatch(each) for each in numbers):
            raise ProfileTextError(f"Line {number}: {name} is {value[:40]!r}, which is not a number.")
        amounts[_GRAPH_KEYS[name]] = sum(float(each) for each in numbers)
    if missing := [name for name, key in _GRAPH_KEYS.items() if key not in amounts]:
        raise ProfileTextError(f"Line {number} has no {missing[0]}.")
    return {"id": words[0], "op": " -- ".join(words[1:-1]), **amounts}


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ProfileTextError(f"The profile has the key {name[:60]!r} twice in one object.")
        found[name] = value
    return found


def _read_int(text: str) -> int:
    if len(text) > MAX_NUMBER_LENGTH:
        raise ProfileTextError(f"The profile has a number of {len(text.lstrip('-'))} digits.")
    return int(text)


def _read_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ProfileTextError(f"The profile has the number {text[:MAX_NUMBER_LENGTH]}, which is too large.")
    return number


def _refuse_constant(text: str) -> NoReturn:
    raise ProfileTextError(f"The profile has the value {text}; numbers must be finite.")

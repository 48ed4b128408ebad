"""Labels of nodes: which keys and values there may be. Written as Kubernetes writes them, so that both can agree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MOST_LABELS = 32
MOST_LEVELS = 8
LONGEST_LABEL = 63
LONGEST_PREFIX = 253

LONGEST_KEY = LONGEST_PREFIX + 1 + LONGEST_LABEL

_NAME_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_PREFIX_PATTERN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
KEY_PATTERN = rf"({_PREFIX_PATTERN}/)?{_NAME_PATTERN}"
_NAME = re.compile(_NAME_PATTERN)
_PREFIX = re.compile(_PREFIX_PATTERN)
_CHARACTERS = "letters, digits, dots, hyphens and underscores, beginning and ending with a letter or digit"


def fault_of_key(key: str) -> str | None:
    """What is wrong with a key such as ``rack`` or ``example.org/rack``, as a sentence; None if nothing is."""
    prefix, slash, name = key.rpartition("/")
    if slash and not (len(prefix) <= LONGEST_PREFIX and _PREFIX.fullmatch(prefix)):
        return f"“{_short(key)}”: what stands before the slash must be a domain name in lower case."
    if not _NAME.fullmatch(name):
        return f"“{_short(key)}” is no key: use at most {LONGEST_LABEL} {_CHARACTERS}."
    return None


def fault_of_labels(labels: Mapping[str, str]) -> str | None:
    """What is wrong with the labels of a node, as a sentence; None if nothing is."""
    if len(labels) > MOST_LABELS:
        return f"These are {len(labels)} labels; a node carries at most {MOST_LABELS}."
    for key, value in labels.items():
        if fault := fault_of_key(key):
            return fault
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            return f"The value of {_short(key)} must be 1 to {LONGEST_LABEL} {_CHARACTERS}."
    return None


def fault_of_levels(levels: Iterable[str]) -> str | None:
    """What is wrong with the levels of a topology, as a sentence; None if nothing is."""
    listed = list(levels)
    if not 1 <= len(listed) <= MOST_LEVELS:
        return f"Name 1 to {MOST_LEVELS} levels, the outermost first."
    for key in listed:
        if fault := fault_of_key(key):
            return fault
    if len(set(listed)) < len(listed):
        return "A level stands there twice."
    return None


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"

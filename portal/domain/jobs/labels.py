"""Node labels: valid keys and values, with the syntax of Kubernetes labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MAX_LABELS = 32
MAX_LEVELS = 8
MAX_LABEL_LENGTH = 63
MAX_PREFIX_LENGTH = 253

MAX_KEY_LENGTH = MAX_PREFIX_LENGTH + 1 + MAX_LABEL_LENGTH

_NAME_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_PREFIX_PATTERN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
KEY_PATTERN = rf"({_PREFIX_PATTERN}/)?{_NAME_PATTERN}"
_NAME = re.compile(_NAME_PATTERN)
_PREFIX = re.compile(_PREFIX_PATTERN)
_CHARACTERS = "letters, digits, dots, hyphens and underscores, beginning and ending with a letter or digit"


def label_key_error(key: str) -> str | None:
    """Return what is wrong with a key such as ``rack`` or ``example.org/rack``, or None."""
    prefix, slash, name = key.rpartition("/")
    if slash and not (len(prefix) <= MAX_PREFIX_LENGTH and _PREFIX.fullmatch(prefix)):
        return f"“{_shorten(key)}”: the part before the slash must be a domain name in lower case."
    if not _NAME.fullmatch(name):
        return f"“{_shorten(key)}” is not a key: use at most {MAX_LABEL_LENGTH} {_CHARACTERS}."
    return None


def labels_error(labels: Mapping[str, str]) -> str | None:
    """Return what is wrong with the labels of a node, or None."""
    if len(labels) > MAX_LABELS:
        return f"{len(labels)} labels are too many; a node has at most {MAX_LABELS}."
    for key, value in labels.items():
        if fault := label_key_error(key):
            return fault
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            return f"The value of {_shorten(key)} must be 1 to {MAX_LABEL_LENGTH} {_CHARACTERS}."
    return None


def levels_error(levels: Iterable[str]) -> str | None:
    """Return what is wrong with the levels of a topology, or None."""
    listed = list(levels)
    if not 1 <= len(listed) <= MAX_LEVELS:
        return f"Name 1 to {MAX_LEVELS} levels, the outermost first."
    for key in listed:
        if fault := label_key_error(key):
            return fault
    if len(set(listed)) < len(listed):
        return "A level is listed twice."
    return None


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"

"""The part "Data" of the launch form: lines that people type, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from portal.words.volumes import place_of


def volumes_in(text: str) -> list[dict[str, Any]]:
    """Lines NAME [PLACE] [ro] as the API writes them. Raises ValueError with what is wrong."""
    found = []
    for line in text.splitlines():
        words = line.split()
        read_only = len(words) > 1 and words[-1] == "ro"
        words = words[:-1] if read_only else words
        if not words:
            continue
        if len(words) > 2:
            raise ValueError(f"\u201c{line.strip()[:40]}\u201d is not a name, perhaps a place, perhaps ro.")
        target = words[1] if len(words) == 2 else None
        found.append({"volume": words[0], "target": target, "read_only": read_only})
    return found


def volume_lines(given: Iterable[Mapping[str, Any]]) -> str:
    """Volumes of a job, as they are typed."""
    return "\n".join(map(_volume_line, given))


def _volume_line(each: Mapping[str, Any]) -> str:
    name, target = str(each.get("volume", "")), each.get("target")
    words = [name, *([str(target)] if target and target != place_of(name) else [])]
    return " ".join([*words, *(["ro"] if each.get("read_only") else [])])

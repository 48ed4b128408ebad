"""Previews of files of users: text, notebooks as text, and pictures. Nothing of their content is rendered as HTML."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext as _

MAX_NOTEBOOK_BYTES = 2 * 1024 * 1024
MAX_IMAGE_BYTES = 8 * 1024 * 1024
MAX_CELLS, MAX_CELL_CHARACTERS = 200, 20_000
_BINARY_PROBE_BYTES = 8192
_IMAGE_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp")
"""Of formats that cannot contain scripts."""


@dataclass(frozen=True)
class NotebookCell:
    kind: str
    source: str
    outputs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Preview:
    """``text`` or ``cells``; ``problem`` says why there is neither, ``is_cut`` that there is more."""

    text: str = ""
    cells: list[NotebookCell] = field(default_factory=list)
    is_cut: bool = False
    problem: str = ""


def is_notebook(name: str, size_bytes: int) -> bool:
    return name.lower().endswith(".ipynb") and size_bytes <= MAX_NOTEBOOK_BYTES


def is_image(name: str, size_bytes: int) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and size_bytes <= MAX_IMAGE_BYTES


def image_type(data: bytes) -> str | None:
    """Return the media type that the content has; None if it is not a picture that can be shown."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for mark, kind in _IMAGE_SIGNATURES.items() if data.startswith(mark)), None)


def build_preview(name: str, size_bytes: int, data: bytes) -> Preview:
    """Return the preview of the beginning of a file."""
    if b"\0" in data[:_BINARY_PROBE_BYTES]:
        return Preview(problem=_("No preview: it is not text."))
    if is_notebook(name, size_bytes) and len(data) == size_bytes:
        try:
            return Preview(cells=_notebook_cells(json.loads(data)))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            pass  # shown as text
    return Preview(text=data.decode("utf-8", "replace"), is_cut=len(data) < size_bytes)


def _notebook_cells(notebook: Any) -> list[NotebookCell]:
    return [
        NotebookCell(
            str(cell["cell_type"])[:20],
            _joined(cell["source"]),
            [text for each in cell.get("outputs", []) if (text := _output_text(each))],
        )
        for cell in notebook["cells"][:MAX_CELLS]
    ]


def _output_text(output: Any) -> str:
    if "traceback" in output:
        return f"{output.get('ename')}: {output.get('evalue')}"[:MAX_CELL_CHARACTERS]
    return _joined(output.get("text") or output.get("data", {}).get("text/plain", ""))


def _joined(text: Any) -> str:
    return ("".join(map(str, text)) if isinstance(text, list) else str(text))[:MAX_CELL_CHARACTERS]

"""Catalogues of translated texts: compiled at start from the ``.po`` files, which are what is kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import polib
from django.conf import settings

STORED_CONTEXT = "stored"
"""Context of the templates of texts that rows keep in English."""

log = logging.getLogger(__name__)


def compile_catalogues(folder: Path) -> None:
    """Write a ``.mo`` file beside each ``.po`` file below the folder, where it is missing or older.

    Pages are in English where it cannot be written.
    """
    for source in folder.glob("*/LC_MESSAGES/*.po"):
        compiled = source.with_suffix(".mo")
        if compiled.exists() and compiled.stat().st_mtime_ns >= source.stat().st_mtime_ns:
            continue
        draft = compiled.with_suffix(f".{os.getpid()}")
        try:
            polib.pofile(str(source)).save_as_mofile(str(draft))
            draft.replace(compiled)
        except OSError as error:
            log.warning("%s cannot be written: %s", compiled, error)


def stored_translations(language: str) -> Iterator[tuple[str, str]]:
    """Return the templates of stored texts with their translations."""
    for folder in settings.LOCALE_PATHS:
        source = Path(folder) / language / "LC_MESSAGES" / "django.po"
        compiled = source.with_suffix(".mo")
        if source.exists():
            read = polib.mofile(str(compiled)) if compiled.exists() else polib.pofile(str(source))
            yield from ((each.msgid, each.msgstr) for each in read if each.msgctxt == STORED_CONTEXT)

"""Texts that rows keep in English and pages translate when they show them."""

from __future__ import annotations


def stored_text(text: str) -> str:
    """Mark a text that is stored in English, and return it unchanged.

    ``manage.py update_translations`` makes a template of its argument in the source: an f-string's values become
    placeholders, and each alternative of a conditional expression becomes a template of its own. Pages recognize the
    text by that template (``portal/stored_texts.py``).

    The names of variables count: values of ``...name``, ``...names``, ``...title`` and ``...reason`` are never
    translated, single words only as ``...label`` or ``...text``, and ``count`` is a number.
    """
    return text

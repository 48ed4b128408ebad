"""What to say about a field that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from django.utils.translation import gettext as _


def unknown_field_message(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return _("Unknown field.") + (_(" Did you mean {near}?").format(near=near[0]) if near else "")

"""Public ids: short, random, DNS-safe names for URLs, host names and labels."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.utils.deconstruct import deconstructible

ID_FIRST_CHARACTERS = "abcdefghjkmnpqrstuvwxyz"
ID_CHARACTERS = ID_FIRST_CHARACTERS + "23456789"
ID_LENGTH = 10
MAX_ID_LENGTH = 16
"""Length of the column; generated ids are shorter."""
MAX_NAME_LENGTH = 63
"""Maximum length of a host name label (RFC 1035)."""


def new_public_id() -> str:
    """Return ten random characters, the first a letter: 49 bits, so that ids cannot be guessed."""
    return secrets.choice(ID_FIRST_CHARACTERS) + "".join(
        secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH - 1)
    )


if TYPE_CHECKING:
    _CharField = models.CharField[str, str]
else:
    _CharField = models.CharField


class PublicIdField(_CharField):
    """A unique public id, created with the row and never changed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.update(max_length=MAX_ID_LENGTH, unique=True, editable=False, default=new_public_id)
        super().__init__(*args, **kwargs)


@deconstructible(path="django.core.validators.RegexValidator")
class _NameValidator(RegexValidator):
    """RegexValidator with a separate message for names that are too long."""

    def __call__(self, value: object) -> None:
        length = len(str(value))
        if length > MAX_NAME_LENGTH:
            raise ValidationError(
                f"At most {MAX_NAME_LENGTH} characters; this has {length}.", code="too_long"
            )
        super().__call__(value)
        # the pattern alone accepts a trailing newline
        if not re.fullmatch(self.regex, str(value)):
            raise ValidationError(self.message, code=self.code)


NAME_PATTERN = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
slug_validator = _NameValidator(
    rf"^{NAME_PATTERN}$",
    "Use lower-case letters, digits and hyphens; begin with a letter and end with a letter or digit.",
)


def name_error(name: str) -> str | None:
    """Return why a text is not a valid name, or None."""
    try:
        slug_validator(name)
    except ValidationError as error:
        return str(error.messages[0])
    return None

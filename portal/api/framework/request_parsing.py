"""Strict parsing of requests: size limits, exact types, no unknown fields or parameters."""

from __future__ import annotations

import datetime as dt
import io
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from django.core.validators import RegexValidator
from django.http import QueryDict
from rest_framework import exceptions, serializers
from rest_framework.parsers import BaseParser
from rest_framework.request import Request

from portal.domain.jobs.job_spec import time_error
from portal.errors import InvalidRequest
from portal.models.public_id import MAX_NAME_LENGTH, NAME_PATTERN, slug_validator
from portal.services.unknown_names import unknown_field_message

MAX_BODY_BYTES = 256 * 1024
MAX_DEPTH = 16
FORBIDDEN_CHARACTERS = re.compile("[\x00\ud800-\udfff]")
"""Characters that PostgreSQL cannot store in text: the null character and unpaired surrogates."""
STORABLE_PATTERN = r"[^\u0000]*"
"""The same rule as an OpenAPI pattern for strings without a narrower one; UTF-8 has no surrogates."""
MAX_EXACT_INTEGER = 2**53
"""Beyond this, floats do not represent every integer."""


class PayloadTooLarge(exceptions.APIException):
    """The body exceeds its size limit: 413."""

    status_code = 413
    default_code = "too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The body is larger than {limit // 1024} KiB.")


class StrictJson(BaseParser):
    """JSON (RFC 8259) limited in bytes and depth; no NaN, duplicate names or text that cannot be stored."""

    media_type = "application/json"

    def parse(
        self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the parsed body. Raise ParseError with a message, or PayloadTooLarge."""
        return parse_json(_read_limited(stream, parser_context))


class YamlParser(BaseParser):
    """YAML with the content of JSON; ``lines_of_body`` of the view gets the line of each key."""

    media_type = "application/yaml"

    def read(self, text: str) -> tuple[Any, Mapping[str, int], Mapping[str, str]]:
        """Return content, lines of keys, and what is wrong with fields. Raise InvalidRequest."""
        raise NotImplementedError

    def parse(
        self, stream: Any, media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the parsed body. Raise ParseError, ValidationError by field, or PayloadTooLarge."""
        raw = _read_limited(stream, parser_context)
        try:
            value, lines, wrong = self.read(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise exceptions.ParseError("The body is not UTF-8.") from error
        except InvalidRequest as error:
            raise exceptions.ParseError(error.message) from error
        _check_storable(value)
        if parser_context:
            parser_context["view"].lines_of_body = lines
        if wrong:
            raise exceptions.ValidationError(dict(wrong))
        return value


def _read_limited(stream: Any, parser_context: Mapping[str, Any] | None) -> bytes:
    """Read a body of at most ``max_body_bytes`` of its view. Raise PayloadTooLarge."""
    limit: int = parser_context["view"].max_body_bytes if parser_context else MAX_BODY_BYTES
    raw: bytes = stream.read(limit + 1)
    if len(raw) > limit:
        raise PayloadTooLarge(limit)
    return raw


def refuse_empty_yaml(request: Request) -> None:
    """Raise as the parser of YAML does, if that is the media type of an empty body, which no parser gets."""
    if not request.data and request.content_type.partition(";")[0].strip() == YamlParser.media_type:
        for parser in request.parsers or ():
            if isinstance(parser, YamlParser):
                parser.parse(io.BytesIO())


def parse_json(raw: bytes) -> Any:
    """Parse JSON bytes. Raise ParseError."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise exceptions.ParseError("The body is not UTF-8.") from error
    if _nesting_depth(text) > MAX_DEPTH:
        raise exceptions.ParseError(f"The body is nested deeper than {MAX_DEPTH} levels.")
    try:
        value = json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_reject_duplicate_names)
    except ValueError as error:
        raise exceptions.ParseError("The body is not valid JSON.") from error
    _check_storable(value)
    return value


class StrictSerializer(serializers.Serializer[Any]):
    """A serializer for input that refuses unknown fields."""

    def to_internal_value(self, data: Any) -> Any:
        """Return validated values; each unknown name is an error of its own, beside those of the values."""
        unknown = [str(name) for name in data if name not in self.fields] if isinstance(data, Mapping) else []
        wrong: dict[str, Any] = {
            name: exceptions.ErrorDetail(unknown_field_message(name, self.fields), code="unknown")
            for name in unknown[:20]
        }
        try:
            values = super().to_internal_value(data)
        except exceptions.ValidationError as error:
            if not isinstance(error.detail, dict):
                raise
            wrong = {**error.detail, **wrong}
        if wrong:
            raise exceptions.ValidationError(wrong)
        return values


class StrictCharField(serializers.CharField):
    """A JSON string; numbers are refused and surrounding spaces are kept.

    ``pattern`` is a regular expression for the whole text, ``message`` the error for text that does not
    match. Blank text is accepted where it is the default: clients may send a default that the document states.
    """

    def __init__(self, *, pattern: str = "", message: str = "", **options: Any) -> None:
        options.setdefault("trim_whitespace", False)
        options.setdefault("allow_blank", options.get("default") == "")
        super().__init__(**options)
        if pattern:
            self.validators.append(RegexValidator(rf"^({pattern})\Z", message, code="invalid"))
        self.pattern = f"^({pattern or STORABLE_PATTERN})$"

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class NameField(StrictCharField):
    """The name of a new object: unique and part of URLs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            pattern=NAME_PATTERN, message=str(slug_validator.message), max_length=MAX_NAME_LENGTH, **options
        )


class NonBlankCharField(StrictCharField):
    """Text that is required: surrounding spaces are stripped, and the rest is not empty."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            pattern=rf"{STORABLE_PATTERN}\S{STORABLE_PATTERN}", message="Must not be blank.", **options
        )


class StrictIntegerField(serializers.IntegerField):
    """A JSON integer; "5" and true are refused."""

    default_error_messages = {
        "invalid": "Must be a whole number.",
        "min_value": "Must be at least {min_value}.",
        "max_value": "Must be at most {max_value}.",
    }

    def to_internal_value(self, data: Any) -> int:
        """Return the number; 2.0 counts as an integer, as in JSON Schema."""
        if isinstance(data, float) and data.is_integer() and abs(data) <= MAX_EXACT_INTEGER:
            data = int(data)
        if isinstance(data, bool) or not isinstance(data, int):
            self.fail("invalid")
        return super().to_internal_value(data)


class StrictFloatField(serializers.FloatField):
    """A JSON number; "5" and true are refused."""

    def to_internal_value(self, data: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, int | float):
            self.fail("invalid")
        return super().to_internal_value(data)


class StrictBooleanField(serializers.BooleanField):
    """A JSON true or false, in no other notation."""

    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return data


class StrictDateTimeField(serializers.DateTimeField):
    """A time in RFC 3339: a JSON string with its offset from UTC."""

    def to_internal_value(self, data: Any) -> dt.datetime:
        """Return the time in UTC, without fractions of a second."""
        if error := time_error(data):
            raise exceptions.ValidationError(error, code="invalid")
        return dt.datetime.fromisoformat(data).astimezone(dt.UTC).replace(microsecond=0)


class QueryBooleanField(serializers.BooleanField):
    """A query parameter that is ``true`` or ``false``, in no other notation."""

    TRUE_VALUES = {"true"}
    FALSE_VALUES = {"false"}
    NULL_VALUES: set[str | None] = set()


class ReasonBody(StrictSerializer):
    """A reason, for the audit trail."""

    reason = StrictCharField(required=False, default="", allow_blank=True, max_length=500)


class EmptyBody(StrictSerializer):
    """An empty body or {}."""


def read_query(query: QueryDict, allowed: type[StrictSerializer] | None) -> dict[str, Any]:
    """Return validated query parameters. A repeated parameter is refused unless it is a list."""
    form = allowed() if allowed else StrictSerializer()
    values: dict[str, Any] = {}
    for name, given in query.lists():
        if isinstance(form.fields.get(name), serializers.ListField):
            values[name] = given
        elif len(given) > 1:
            raise exceptions.ValidationError({name: "Must be given only once."})
        else:
            values[name] = given[0]
    return _validate(type(form), values)


def read_body(data: Any, allowed: type[StrictSerializer], *, partial: bool = False) -> dict[str, Any]:
    """Return the validated fields of a JSON object."""
    if not isinstance(data, Mapping):
        raise exceptions.ParseError("The body must be a JSON object.")
    return _validate(allowed, data, partial=partial)


def _validate(
    allowed: type[StrictSerializer], values: Mapping[str, Any], *, partial: bool = False
) -> dict[str, Any]:
    form = allowed(data=values, partial=partial)
    form.is_valid(raise_exception=True)
    return dict(form.validated_data)


_STRUCTURE_TOKENS = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


def _nesting_depth(text: str) -> int:
    """Return the deepest nesting in one pass; a regular expression could backtrack on malformed input."""
    deepest = depth = 0
    inside = False
    for mark in _STRUCTURE_TOKENS.findall(text):
        if mark == '"':
            inside = not inside
        elif inside:
            continue
        elif mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in "]}":
            depth -= 1
    return deepest


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _reject_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _check_storable(value: Any) -> None:
    match value:
        case str():
            if FORBIDDEN_CHARACTERS.search(value):
                raise exceptions.ParseError("A string contains a null character or an unpaired surrogate.")
        case float():
            if not math.isfinite(value):
                raise exceptions.ParseError("A number is too large: numbers end at about 1.8e308.")
        case dict():
            for name, inner in value.items():
                _check_storable(name)
                _check_storable(inner)
        case list():
            for inner in value:
                _check_storable(inner)

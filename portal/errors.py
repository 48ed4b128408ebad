"""Errors for users: each has a stable code, a message and, if possible, the nearest acceptable request.

Services raise them; pages show the message, and REST answers problem+json with the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FairwayError(Exception):
    """An error with a message for the user. ``status`` is the HTTP status."""

    status = 500
    code = "error"
    retry_after_s: int | None = None
    """Value of the Retry-After header, seconds."""

    def __init__(
        self, message: str, *, code: str | None = None, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.details: dict[str, Any] = dict(details or {})


class InvalidRequest(FairwayError):
    """Invalid input: 400 on pages, 422 in REST, with a message for each field."""

    status = 400
    code = "invalid"

    def __init__(self, message: str = "", *, fields: Mapping[str, str] | None = None, **more: Any) -> None:
        self.fields: dict[str, str] = dict(fields or {})
        super().__init__(message or " ".join(self.fields.values()) or "The request is not valid.", **more)


class MalformedRequest(InvalidRequest):
    """A request that does not match the schema: 400, in REST too."""


class Unauthenticated(FairwayError):
    """No user is signed in: 401."""

    status = 401
    code = "unauthenticated"


class Forbidden(FairwayError):
    """The user lacks the permission: 403."""

    status = 403
    code = "forbidden"


class NotFound(FairwayError):
    """The object does not exist, or the user may not see it: 404."""

    status = 404
    code = "not_found"

    def __init__(self, message: str = "There is nothing at this address.", **more: Any) -> None:
        super().__init__(message, **more)


class Conflict(FairwayError):
    """The object's state does not permit the operation: 409."""

    status = 409
    code = "conflict"


class PreconditionFailed(FairwayError):
    """The object was changed since it was read: 412. ``details['current']`` holds its present version."""

    status = 412
    code = "precondition_failed"


class TooLarge(FairwayError):
    """What is sent or requested exceeds a limit: 413."""

    status = 413
    code = "too_large"


class Unsatisfiable(FairwayError):
    """A request that this cluster can never satisfy: 422, with the nearest one that it can."""

    status = 422
    code = "unsatisfiable"


class PreconditionRequired(FairwayError):
    """The change must name the version that it is based on: 428."""

    status = 428
    code = "precondition_required"


class TooManyRequests(FairwayError):
    """A rate or concurrency limit is reached: 429; retry after ``retry_after_s``."""

    status = 429
    code = "too_many_requests"
    retry_after_s = 1


class ServiceUnavailable(FairwayError):
    """A required service does not answer: 503; retry after ``retry_after_s``."""

    status = 503
    code = "unavailable"
    retry_after_s = 5

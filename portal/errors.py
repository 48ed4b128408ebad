"""Refusals: each with a stable code, a message for people and, where it helps, the nearest thing that works.

Services raise these; pages show the message, the API answers problem+json with the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FairwayError(Exception):
    """A refusal that a person should read. ``status`` is its HTTP answer."""

    status = 500
    code = "error"
    retry_after_s: int | None = None
    """Sent as Retry-After."""

    def __init__(
        self, message: str, *, code: str | None = None, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.details: dict[str, Any] = dict(details or {})


class InvalidRequest(FairwayError):
    """Input that cannot be carried out: 400 on pages, 422 in REST, with a message for each field."""

    status = 400
    code = "invalid"

    def __init__(self, message: str = "", *, fields: Mapping[str, str] | None = None, **more: Any) -> None:
        self.fields: dict[str, str] = dict(fields or {})
        super().__init__(message or " ".join(self.fields.values()) or "The request is not valid.", **more)


class MalformedRequest(InvalidRequest):
    """A request that does not have the described shape: 400, also in REST, which answers 422 to the others."""


class Unauthenticated(FairwayError):
    """Nobody is signed in: 401."""

    status = 401
    code = "unauthenticated"


class Forbidden(FairwayError):
    """Known, but not permitted: 403."""

    status = 403
    code = "forbidden"


class NotFound(FairwayError):
    """Not there, or not for this person to know of: 404."""

    status = 404
    code = "not_found"

    def __init__(self, message: str = "There is nothing here under that name.", **more: Any) -> None:
        super().__init__(message, **more)


class Conflict(FairwayError):
    """The object is in a state in which this cannot be done: 409."""

    status = 409
    code = "conflict"


class PreconditionFailed(FairwayError):
    """Somebody changed it since it was read: 412. ``facts['current']`` holds what stands now."""

    status = 412
    code = "precondition_failed"


class Unsatisfiable(FairwayError):
    """A request that this cluster could never serve: 422, with the nearest one that it could."""

    status = 422
    code = "unsatisfiable"


class PreconditionRequired(FairwayError):
    """A change that must name the version it is based on: 428."""

    status = 428
    code = "precondition_required"


class TooManyRequests(FairwayError):
    """As much of this is under way as may be at once: 429, to be tried again after ``retry_after_s``."""

    status = 429
    code = "too_many_requests"
    retry_after_s = 1


class ServiceUnavailable(FairwayError):
    """Something that is needed does not answer: 503, to be tried again after ``retry_after_s``."""

    status = 503
    code = "unavailable"
    retry_after_s = 5

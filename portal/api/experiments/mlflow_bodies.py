"""Bodies of MLflow's REST API: parsed, checked, and serialized again.

The tracking server then reads exactly what was checked, whatever the encoding of the request.
"""

from __future__ import annotations

import json
import re
from typing import Any

from portal.domain.experiments.tracking import (
    ATTEMPT_TAG,
    FIRST_NAME_TAG,
    JOB_TAG,
    RESERVED_TAG_PREFIX,
    RUN_NAME_TAG,
    USER_TAG,
)
from portal.errors import Forbidden, InvalidRequest
from portal.models import Attempt, User

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def checked_body(body: bytes, endpoint: str, user: User, attempt: Attempt | None) -> dict[str, Any]:
    """Return the body for the tracking server, for ``write_body``.

    A new run or model gets the user, a new run also the attempt of the job that creates it, whose name it has if it
    has none. Raise Forbidden for other requests that name a reserved tag, InvalidRequest for a body that cannot be
    read.
    """
    content = _read(body)
    if endpoint == "runs/create":
        _set_author(content, user)
        content.pop("userId", None)
        content["user_id"] = user.username
        if attempt is not None:
            if not any(tag.get("key") == RUN_NAME_TAG for tag in content["tags"]):
                content["run_name"] = (
                    content.get("run_name") or content.pop("runName", "") or attempt.job.name
                )
            content["tags"] += [
                {"key": JOB_TAG, "value": attempt.job.public_id},
                {"key": ATTEMPT_TAG, "value": str(attempt.number)},
                {"key": FIRST_NAME_TAG, "value": run_name(content)},
            ]
    elif endpoint == "logged-models":
        _set_author(content, user)
    else:
        _refuse_reserved(content, endpoint)
    return content


def run_name(content: dict[str, Any]) -> str:
    """Return the name of a run in the checked body that creates it."""
    named = next((tag.get("value") for tag in content["tags"] if tag.get("key") == RUN_NAME_TAG), "")
    return str(content.get("run_name") or content.get("runName") or named or "")


def _read(body: bytes) -> dict[str, Any]:
    """Return the object in a body of UTF-8, UTF-16 or UTF-32, as MLflow reads it: none is an empty one."""
    try:
        content = json.loads(body) if body else {}
        if isinstance(content, str):  # old clients encode twice
            content = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("The body is not JSON.") from error
    if not isinstance(content, dict):
        raise InvalidRequest("The body is not a JSON object.")
    return content


def write_body(content: dict[str, Any]) -> bytes:
    """Return the body as UTF-8 without repeated keys. Raise InvalidRequest for texts that cannot be stored."""
    try:
        written = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("A text in the body has half of a surrogate pair.") from error
    if _NUL.search(written):
        raise InvalidRequest("A text in the body has a NUL character.")
    return written


def _set_author(content: dict[str, Any], user: User) -> None:
    """Replace the reserved tags, which MLflow's client sets from the environment of the program."""
    tags = [tag for tag in _tags(content) if not is_reserved_tag(tag.get("key"))]
    content["tags"] = [*tags, {"key": USER_TAG, "value": user.username}]


def _refuse_reserved(content: dict[str, Any], endpoint: str) -> None:
    names = [tag.get("key") for tag in _tags(content)]
    if endpoint.endswith("-tag"):
        names.append(content.get("key"))
    if "/tags/" in endpoint:
        names.append(endpoint.rpartition("/tags/")[2])
    if any(is_reserved_tag(name) for name in names):
        raise Forbidden(
            f"{USER_TAG} and names that start with {RESERVED_TAG_PREFIX} are set by Fairway.",
            code="reserved_tag",
        )


def _tags(content: dict[str, Any]) -> list[dict[str, Any]]:
    listed = content.get("tags") or []
    if not isinstance(listed, list) or not all(isinstance(tag, dict) for tag in listed):
        shown = json.dumps(listed)[:200]
        raise InvalidRequest(
            f"Invalid value {shown} for parameter 'tags' supplied: it is not a list of objects with key and value."
        )
    return listed


def is_reserved_tag(name: Any) -> bool:
    return isinstance(name, str) and (name == USER_TAG or name.startswith(RESERVED_TAG_PREFIX))

"""Bodies of MLflow's REST API: parsed, checked, and serialized again.

The tracking server then reads exactly what was checked, whatever the encoding of the request.
"""

from __future__ import annotations

import json
import re
from typing import Any

from portal.domain.tracking import JOB_TAG, RESERVED_TAG_PREFIX, RUN_NAME_TAG, USER_TAG
from portal.errors import Forbidden, InvalidRequest
from portal.models import Job, User

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def checked_body(body: bytes, endpoint: str, user: User, job: Job | None) -> bytes:
    """Return the body for the tracking server, as UTF-8 without repeated keys.

    A new run or model gets the user, a new run also the job that creates it, whose name it has if it has none. Raise
    Forbidden for other requests that name a reserved tag, InvalidRequest for a body that cannot be read.
    """
    content = _read(body)
    if endpoint == "runs/create":
        _set_author(content, user)
        content.pop("userId", None)
        content["user_id"] = user.username
        if job is not None:
            content["tags"].append({"key": JOB_TAG, "value": job.public_id})
            if not any(tag.get("key") == RUN_NAME_TAG for tag in content["tags"]):
                content["run_name"] = content.get("run_name") or content.pop("runName", "") or job.name
    elif endpoint == "logged-models":
        _set_author(content, user)
    else:
        _refuse_reserved(content, endpoint)
    return _write(content)


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


def _write(content: dict[str, Any]) -> bytes:
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
        raise InvalidRequest("The field tags is not a list of objects with key and value.")
    return listed


def is_reserved_tag(name: Any) -> bool:
    return isinstance(name, str) and (name == USER_TAG or name.startswith(RESERVED_TAG_PREFIX))

"""The REST API as Python objects. Every call has a time limit; a lost answer never submits a job twice."""

from __future__ import annotations

import base64
import codecs
import json
import os
import random
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from .packing import pack

ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"})
MAX_TRIES = 6
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
REPEATED_STATUSES = frozenset({429, 502, 503, 504})
POLL_S = 2.0
BULK_POLL_S = 1.0
MAX_EMPTY_ANSWERS = 10
"""An ended job's log that is not complete is read this often more; the rest of it may still be copied."""


class FairwayError(Exception):
    """Base of the errors of this package."""


class Unreachable(FairwayError):
    """The server did not answer in time, after all attempts."""


class TimedOut(FairwayError):
    """What was waited for did not happen in time."""


class Refused(FairwayError):
    """The server refused a request. ``code`` is stable; ``errors`` has one entry for each invalid field."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        self.status = status
        self.code = str(problem.get("code", "error"))
        self.errors: list[dict[str, str]] = problem.get("errors") or []
        self.details: dict[str, Any] = problem.get("details") or {}
        lines = [f"  {each.get('field')}: {each.get('message')}" for each in self.errors]
        super().__init__("\n".join([str(problem.get("detail") or f"HTTP status {status}"), *lines]))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: it could carry the token to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Fairway:
    """A server and the token of a user.

    Without arguments they are FAIRWAY_URL and FAIRWAY_TOKEN, or those that ``fairway login`` stored.
    """

    def __init__(self, url: str | None = None, token: str | None = None, *, timeout_s: float = 30.0) -> None:
        """``timeout_s`` limits each request. Raise FairwayError without a URL or a token."""
        stored = {} if url and token else _read_config()
        self.url = (url or os.environ.get("FAIRWAY_URL") or stored.get("url") or "").rstrip("/")
        self.timeout_s = timeout_s
        token = token or os.environ.get("FAIRWAY_TOKEN") or stored.get("token") or ""
        if not self.url.startswith(("http://", "https://")):
            raise FairwayError("Set FAIRWAY_URL to the address of the portal, or run: fairway login")
        if not token:
            raise FairwayError("Set FAIRWAY_TOKEN to a token of your account, or run: fairway login")
        self.authorization = f"Bearer {token}"
        self._opener = urllib.request.build_opener(_NoRedirects)

    # -- jobs ------------------------------------------------------------------------------------------

    def submit(self, *, idempotency_key: str | None = None, **fields: Any) -> Job:
        """Submit a job with these fields (``POST jobs/``), once even if an answer is lost.

        A key that was used in the last 7 days returns its job. Raise Refused if it is invalid or could never run.
        """
        return Job(self, self.call("POST", "jobs/", json.dumps(fields), once=idempotency_key or True))

    def submit_yaml(self, text: str) -> Job:
        """Submit a job in YAML, as ``submit``."""
        return Job(self, self.call("POST", "jobs/", text, media_type="application/yaml", once=True))

    def upload_code(self, project: str, folder: Path) -> str:
        """Pack and upload a folder as the code of jobs of a project; return the value of ``code_archive``."""
        found = self.call(
            "POST",
            f"projects/{_quote(project)}/code/",
            pack(folder),
            media_type="application/gzip",
            repeatable=True,
        )
        return str(found["sha256"])

    def job(self, public_id: str) -> Job:
        return Job(self, self.get(f"jobs/{_quote(public_id)}/"))

    def jobs(self, **filters: Any) -> Iterator[Job]:
        """Yield the visible jobs, newest first; filters are those of ``GET jobs/``, such as ``state``."""
        return (Job(self, each) for each in self.list("jobs/", **filters))

    def change_jobs(self, action: str, jobs: Sequence[str], **value: Any) -> dict[str, Any]:
        """Change jobs by their ids; return the result of each (``POST jobs/bulk/``) when all are processed.

        ``action`` is stop, requeue, hold, release, priority (``priority=``) or move (``project=``).
        """
        body = json.dumps({"action": action, "jobs": list(jobs), **value})
        found: dict[str, Any] = self.call("POST", "jobs/bulk/", body, once=True)
        while found["finished_at"] is None:
            time.sleep(BULK_POLL_S)
            found = self.get(f"bulk-operations/{_quote(found['id'])}/")
        return found

    # -- requests --------------------------------------------------------------------------------------

    def get(self, path: str, **query: Any) -> Any:
        return self.call("GET", _with_query(path, query))

    def list(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield the items of all pages of a list."""
        following: str | None = _with_query(path, query)
        while following:
            page = self.call("GET", following)
            yield from page["items"]
            following = page["next"]

    def call(
        self,
        method: str,
        path: str,
        body: str | bytes | None = None,
        *,
        media_type: str = "application/json",
        once: bool | str = False,
        repeatable: bool = False,
    ) -> Any:
        """Return the JSON of an answer, or its text for another type; ``path`` is relative to /api/v1/.

        Bytes of a text that are not valid UTF-8 are kept as surrogates (``surrogateescape``).

        Without an answer, a GET is repeated, and so is a request that is ``repeatable`` or sent ``once`` (with this
        Idempotency-Key, or a new one). Raise Refused or Unreachable.
        """
        address = self.url + path if path.startswith("/") else f"{self.url}/api/v1/{path}"
        headers = {"Authorization": self.authorization, "Accept": "application/json"}
        headers |= {"Content-Type": media_type} if body is not None else {}
        headers |= {"Idempotency-Key": str(uuid.uuid4()) if once is True else once} if once else {}
        data = body.encode() if isinstance(body, str) else body
        tries = MAX_TRIES if method == "GET" or once or repeatable else 1
        for number in range(1, tries + 1):
            request = urllib.request.Request(address, data=data, headers=headers, method=method)  # noqa: S310
            pause_s = min(FIRST_PAUSE_S * 2 ** (number - 1), MAX_PAUSE_S) * random.uniform(0.5, 1.0)  # noqa: S311
            try:
                with self._opener.open(request, timeout=self.timeout_s) as answer:
                    content = answer.read()
                    answer_type = answer.headers.get_content_type()
                if answer_type == "text/html":
                    raise FairwayError(f"{address} is a web page, not the REST API of a Fairway portal.")
                is_json = answer_type == "application/json"
                return _json(content, address) if is_json else content.decode("utf-8", "surrogateescape")
            except urllib.error.HTTPError as error:
                refusal = _refusal(error)
                again = error.code in REPEATED_STATUSES or refusal.code == "idempotency_in_flight"
                if number == tries or not again:
                    raise refusal from None
                pause_s = max(pause_s, min(float(error.headers.get("Retry-After") or 0), MAX_PAUSE_S))
            except (OSError, HTTPException) as problem:
                if number == tries:
                    reason = getattr(problem, "reason", None) or problem
                    raise Unreachable(f"{self.url} does not answer: {reason}") from problem
            time.sleep(pause_s)
        raise AssertionError("unreachable")


class Job:
    """A job as last read; ``data`` is its REST representation."""

    def __init__(self, server: Fairway, data: dict[str, Any]) -> None:
        self._server = server
        self.data = data

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name!r} {self.state}>"

    @property
    def id(self) -> str:
        return str(self.data["id"])

    @property
    def name(self) -> str:
        return str(self.data["name"])

    @property
    def state(self) -> str:
        """PENDING, RUNNING, SUSPENDED, COMPLETED, FAILED, CANCELLED or TIMEOUT."""
        return str(self.data["state"])

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def url(self) -> str:
        """The page of the job."""
        return f"{self._server.url}/jobs/{self.id}/"

    def refresh(self) -> Job:
        self.data = self._server.get(f"jobs/{self.id}/")
        return self

    def wait(self, timeout_s: float | None = None, *, until: frozenset[str] = ENDED) -> Job:
        """Wait until its state is one of ``until`` or it has ended. Raise TimedOut."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.refresh().state not in until | ENDED:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimedOut(f"{self.id} is {self.state} after {timeout_s:g} s.")
            time.sleep(POLL_S if deadline_s is None else max(0.0, min(POLL_S, deadline_s - time.monotonic())))
        return self

    def logs(self, *, follow: bool = False, rank: int = 0, tail: int | None = None) -> Iterator[str]:
        """Yield the log of a rank in pieces. ``follow`` goes on until the job ends, also in later attempts.

        Bytes that are not valid UTF-8 are replaced by U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for piece in self.log_bytes(follow=follow, rank=rank, tail=tail):
            if text := decoder.decode(piece):
                yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    def log_bytes(self, *, follow: bool = False, rank: int = 0, tail: int | None = None) -> Iterator[bytes]:
        """Yield the log of a rank in pieces as ``logs``, but the bytes that the program wrote."""
        attempt, offset, empty = 0, 0, 0
        while True:
            place: dict[str, Any] = {"tail": tail} if tail and not offset else {"offset": offset}
            place |= {"attempt": attempt} if attempt else {}
            place |= {"bytes": "true"}
            self.refresh()  # before the log: what an ended job wrote is then complete
            try:
                page = self._server.get(f"jobs/{self.id}/logs/", rank=rank, **place)
            except Refused as refusal:
                if refusal.status != 404 or not follow or self.has_ended:
                    raise
                time.sleep(POLL_S)
                continue
            data = base64.b64decode(page["data"])
            if data:
                yield data
            is_new = page["attempt"] != attempt or page["next_offset"] > offset
            attempt, offset = page["attempt"], page["next_offset"]
            empty = 0 if data or not self.has_ended else empty + 1
            at_end = page["complete"] or empty > MAX_EMPTY_ANSWERS  # a node may not answer any more
            if at_end and self.data["attempt_count"] > attempt and follow:
                attempt, offset, tail = attempt + 1, 0, None
            elif (at_end and self.has_ended) or (
                not follow and (at_end or offset >= page["size"] or not is_new)
            ):
                return  # not new: the last character of the log is incomplete
            if not data:
                time.sleep(POLL_S)

    def stop(self) -> Job:
        """Stop or cancel the job; one that has ended stays as it is."""
        self.data = self._server.call("POST", f"jobs/{self.id}/cancel/", "{}", repeatable=True)
        return self

    def spec(self) -> str:
        """Return its request as YAML."""
        return str(self._server.get(f"jobs/{self.id}/spec.yaml"))

    def kubernetes(self, *, trainjob: bool = False) -> str:
        """Return it as YAML for kubectl, in the kind for its launcher or as a TrainJob of Kubeflow Trainer v2.

        Raise Refused if it has no counterpart in Kubernetes.
        """
        query = {"kind": "trainjob"} if trainjob else {}
        return str(self._server.get(f"jobs/{self.id}/kubernetes.yaml", **query))


def config_path() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fairway" / "config.json"


def write_config(url: str, token: str) -> Path:
    """Store address and token in a file of mode 600."""
    path = config_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump({"url": url, "token": token}, file)
    new.replace(path)
    return path


def _read_config() -> dict[str, str]:
    path = config_path()
    try:
        mode = path.stat().st_mode
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise FairwayError(f"{path} cannot be read: {problem}") from problem
    if stat.S_IMODE(mode) & 0o077:
        raise FairwayError(f"{path} is readable by others. Run: chmod 600 {path}")
    return found if isinstance(found, dict) else {}


def _refusal(error: urllib.error.HTTPError) -> Refused:
    try:
        problem = json.loads(error.read())
    except (OSError, ValueError, HTTPException):
        problem = None
    return Refused(error.code, problem if isinstance(problem, dict) else {})


def _json(content: bytes, address: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as problem:
        raise FairwayError(f"The answer of {address} is not JSON: {problem}") from problem


def _with_query(path: str, query: dict[str, Any]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, [], "")}
    return f"{path}?{urllib.parse.urlencode(given, doseq=True)}" if given else path


def _quote(key: str) -> str:
    return urllib.parse.quote(key, safe="")

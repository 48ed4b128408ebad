"""The REST API as Python objects. Every call has a time limit; a lost answer never submits a job twice."""

from __future__ import annotations

import base64
import codecs
import itertools
import json
import os
import random
import re
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from .packing import pack

ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"})
MAX_TRIES = 6
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
MAX_PATIENT_PAUSE_S = 5.0
PATIENCE_S = 120.0
"""A log that is followed and an end that is waited for outlast an outage of this length, such as a restart."""
UNAVAILABLE_STATUSES = frozenset({502, 503, 504})
REPEATED_STATUSES = UNAVAILABLE_STATUSES | {429}
POLL_S = 2.0
BULK_POLL_S = 1.0
_SAFE_IN_ADDRESS = "%/:?#[]@!$&'()*+,;=~"
_OTHER_SERVER = "Check that its address is that of a Fairway portal, of the version of this client."
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
        errors, details = problem.get("errors"), problem.get("details")
        self.errors: list[dict[str, str]] = [
            each for each in (errors if isinstance(errors, list) else ()) if isinstance(each, dict)
        ]
        self.details: dict[str, Any] = details if isinstance(details, dict) else {}
        lines = [f"  {each.get('field')}: {each.get('message')}" for each in self.errors]
        super().__init__("\n".join([str(problem.get("detail") or f"HTTP status {status}"), *lines]))


class Unavailable(Refused, Unreachable):
    """The server, or what is in front of it, answered that it cannot work now (502, 503, 504), after all attempts."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: it could carry the token to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Fairway:
    """A server and the token of a user.

    Without arguments they are FAIRWAY_URL and FAIRWAY_TOKEN, or those that ``fairway login`` stored.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        patience_s: float = PATIENCE_S,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        """``timeout_s`` limits each request. Raise FairwayError without a URL or a token.

        ``Job.wait`` and ``Job.logs(follow=True)`` go on for ``patience_s`` without an answer. ``on_wait`` is called
        with a sentence when a request that failed is about to be repeated for the first time.
        """
        stored = {} if url and token else _read_config()
        self.url = (url or os.environ.get("FAIRWAY_URL") or stored.get("url") or "").rstrip("/")
        self.timeout_s, self.patience_s, self.on_wait = timeout_s, patience_s, on_wait
        token = token or os.environ.get("FAIRWAY_TOKEN") or stored.get("token") or ""
        if not self.url.startswith(("http://", "https://")):
            raise FairwayError("Set FAIRWAY_URL to the address of the portal, or run: fairway login")
        if not token:
            raise FairwayError("Set FAIRWAY_TOKEN to a token of your account, or run: fairway login")
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            raise FairwayError("The token has characters that no token has; copy it again.")
        try:
            urllib.parse.urlsplit(self.url).port  # noqa: B018 - raises
        except ValueError as error:
            raise FairwayError(f"{self.url} is not the address of a portal: {error}") from error
        self.authorization = f"Bearer {token}"
        self._opener = urllib.request.build_opener(_NoRedirects)

    # -- jobs ------------------------------------------------------------------------------------------

    def submit(self, *, idempotency_key: str | None = None, **fields: Any) -> Job:
        """Submit a job with these fields (``POST jobs/``), once even if an answer is lost.

        A key that was used in the last 7 days returns its job. Raise Refused if it is invalid or could never run.
        """
        return self.submit_fields(fields, idempotency_key)

    def submit_fields(self, fields: dict[str, Any], idempotency_key: str | None = None) -> Job:
        """Submit a job, as ``submit``."""
        return Job(self, self.call("POST", "jobs/", json.dumps(fields), once=idempotency_key or True))

    def submit_yaml(self, text: str, *, idempotency_key: str | None = None) -> Job:
        """Submit a job in YAML, as ``submit``."""
        once = idempotency_key or True
        return Job(self, self.call("POST", "jobs/", text, media_type="application/yaml", once=once))

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
            found = self.await_answer(f"bulk-operations/{_quote(found['id'])}/")
        return found

    # -- requests --------------------------------------------------------------------------------------

    def get(self, path: str, **query: Any) -> Any:
        return self.call("GET", _with_query(path, query))

    def await_answer(self, path: str, *, within_s: float | None = None, **query: Any) -> Any:
        """Return an answer as ``get``, if need be after an outage of at most ``patience_s`` and ``within_s``."""
        patience_s = self.patience_s if within_s is None else max(0.0, min(self.patience_s, within_s))
        return self.call("GET", _with_query(path, query), patience_s=patience_s)

    def list(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield the items of all pages of a list."""
        following: str | None = _with_query(path, query)
        while following:
            page = self.call("GET", following)
            if not isinstance(page["items"], list):
                raise FairwayError(f"The answer of {following} is not a list. {_OTHER_SERVER}")
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
        patience_s: float = 0.0,
    ) -> Any:
        """Return the JSON of an answer, or its text for another type; ``path`` is relative to /api/v1/.

        Bytes of a text that are not valid UTF-8 are kept as surrogates (``surrogateescape``).

        Without an answer, a GET is repeated, and so is a request that is ``repeatable`` or sent ``once`` (with this
        Idempotency-Key, or a new one): ``MAX_TRIES`` times, and for at least ``patience_s``. Raise Refused or
        Unreachable, or Unavailable, which is both.
        """
        address = self.url + path if path.startswith("/") else f"{self.url}/api/v1/{path}"
        address = urllib.parse.quote(address, safe=_SAFE_IN_ADDRESS)
        headers = {"Authorization": self.authorization, "Accept": "application/json"}
        headers |= {"Content-Type": media_type} if body is not None else {}
        key = (str(uuid.uuid4()) if once is True else once) or ""
        if key and not re.fullmatch(r"[\x21-\x7e]{1,255}", key):
            raise FairwayError("An Idempotency-Key is 1 to 255 printable ASCII characters without spaces.")
        headers |= {"Idempotency-Key": key} if key else {}
        data = body.encode() if isinstance(body, str) else body
        tries = MAX_TRIES if method == "GET" or once or repeatable else 1
        patient_until_s = time.monotonic() + patience_s
        for number in itertools.count(1):
            is_last = number >= tries and (tries == 1 or time.monotonic() >= patient_until_s)
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
                refusal = _refusal(error, key)
                again = error.code in REPEATED_STATUSES or refusal.code == "idempotency_in_flight"
                if is_last or not again:
                    raise refusal from None
                pause_s = max(pause_s, min(_retry_after_s(error), MAX_PAUSE_S))
                reason = f"{self.url}: {_first_sentences(error, refusal)}"
            except (OSError, HTTPException) as error:
                reason = f"{self.url} does not answer: {getattr(error, 'reason', None) or error}"
                if is_last:
                    raise Unreachable(f"{reason}{_repeat_hint(key)}.") from error
            if number == 1 and self.on_wait is not None:
                self.on_wait(f"{reason.rstrip('.')}. Waiting for it.")
            time.sleep(min(pause_s, MAX_PATIENT_PAUSE_S) if patience_s else pause_s)
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

    def _await_refresh(self, deadline_s: float | None) -> Job:
        within_s = None if deadline_s is None else deadline_s - time.monotonic()
        self.data = self._server.await_answer(f"jobs/{self.id}/", within_s=within_s)
        return self

    def wait(self, timeout_s: float | None = None, *, until: frozenset[str] = ENDED) -> Job:
        """Wait until its state is one of ``until`` or it has ended. Raise TimedOut."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._await_refresh(deadline_s).state not in until | ENDED:
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
        read = self._server.await_answer if follow else self._server.get
        while True:
            place: dict[str, Any] = {"tail": tail} if tail and not offset else {"offset": offset}
            place |= {"attempt": attempt} if attempt else {}
            place |= {"bytes": "true"}
            self.data = read(f"jobs/{self.id}/")  # before the log: what an ended job wrote is then complete
            try:
                page = read(f"jobs/{self.id}/logs/", rank=rank, **place)
            except Refused as error:
                if error.status != 404 or not follow or self.has_ended:
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
    except (OSError, ValueError) as error:
        raise FairwayError(f"{path} cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise FairwayError(f"{path} is readable by others. Run: chmod 600 {path}")
    return found if isinstance(found, dict) else {}


def _repeat_hint(key: str) -> str:
    """Return what to do about a request that was sent with a key and may have been carried out."""
    if not key:
        return ""
    return f". It may have been carried out; sent again with the Idempotency-Key {key}, it is done only once"


def _first_sentences(error: urllib.error.HTTPError, refusal: Refused) -> str:
    text = str(refusal).splitlines()[0].partition(" It may have been carried out;")[0]
    return text if str(error.code) in text else f"{text} (HTTP status {error.code})"


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    try:
        return max(0.0, float(error.headers.get("Retry-After") or 0))
    except ValueError:  # a date
        return 0.0


def _refusal(error: urllib.error.HTTPError, key: str = "") -> Refused:
    try:
        problem = json.loads(error.read())
    except (OSError, ValueError, RecursionError, HTTPException):
        problem = None
    found: dict[str, Any] = problem if isinstance(problem, dict) else {}
    if error.code not in UNAVAILABLE_STATUSES:
        return Refused(error.code, found)
    detail = str(found.get("detail") or f"The server cannot work now: HTTP status {error.code}").rstrip(".")
    return Unavailable(error.code, {**found, "detail": f"{detail}{_repeat_hint(key)}."})


class _Object(dict[str, Any]):
    """An object of an answer. A field that it lacks is an error of the server or its address, not of the caller."""

    def __missing__(self, name: str) -> Any:
        raise FairwayError(f"The answer of the server has no {name!r}. {_OTHER_SERVER}")


def _json(content: bytes, address: str) -> Any:
    try:
        found = json.loads(content, object_hook=_Object)
    except (ValueError, RecursionError) as error:
        raise FairwayError(f"The answer of {address} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise FairwayError(f"The answer of {address} is not a JSON object. {_OTHER_SERVER}")
    return found


def _with_query(path: str, query: dict[str, Any]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, [], "")}
    return f"{path}?{urllib.parse.urlencode(given, doseq=True)}" if given else path


def _quote(key: str) -> str:
    return urllib.parse.quote(key, safe="")

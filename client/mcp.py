"""Server of the Model Context Protocol over standard input and output, for assistants that use the portal.

See https://modelcontextprotocol.io/specification/2025-06-18: JSON-RPC 2.0, a message a line.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from . import __version__
from .api import Fairway, FairwayError, Refused

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
MAX_JOBS = 50
MAX_LOG_LINES = 500
METHOD_NOT_FOUND, INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR = -32601, -32602, -32600, -32700

_JOB = {"job": {"type": "string", "minLength": 1, "description": "Id of a job."}}
_FIELDS = {
    "fields": {
        "type": "object",
        "description": "Fields of a job as in POST /api/v1/jobs/: name, project, environment, command (list of "
        "strings), gpus_per_task, tasks, memory_mib, time_limit_s and others.",
    }
}
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """A tool: what it does, the properties of its arguments, and whether it changes something."""

    act: Callable[[Fairway, Arguments], Any]
    text: str
    properties: dict[str, Any]
    required: tuple[str, ...] = ()
    changes: bool = False

    def describe(self, name: str) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": self.properties,
            "required": list(self.required),
            "additionalProperties": False,
        }
        hints = {"readOnlyHint": not self.changes, "destructiveHint": name == "cancel_job"}
        return {"name": name, "description": self.text, "inputSchema": schema, "annotations": hints}

    def problems(self, given: Arguments) -> list[str]:
        """Return a sentence for each argument that is missing, unknown or not of its schema."""
        known = ", ".join(self.properties)
        found = [f"{_shown(name)} is not an argument of this tool; it takes {known}." for name in given
                 if name not in self.properties]  # fmt: skip
        missing = [name for name in self.required if name not in given]
        found += [f"Missing: {', '.join(missing)}."] if missing else []
        checked = {name: schema for name, schema in self.properties.items() if name in given}
        return found + [
            f"{name} must be {problem}."
            for name, schema in checked.items()
            if (problem := _schema_problem(schema, given[name]))
        ]


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]


def _schema_problem(schema: dict[str, Any], value: Any) -> str | None:
    """Return what the value must be, or None if it is."""
    kind = schema["type"]
    if kind == "object":
        return None if isinstance(value, dict) else f"an object, not {_shown(value)}"
    if kind == "string":
        if not isinstance(value, str):
            return f"text, not {_shown(value)}"
        if len(value) < schema.get("minLength", 0):
            return "text that is not empty"
        return None if value.isascii() or value.encode("utf-8", "replace").decode() == value else "valid text"
    low, high = schema["minimum"], schema.get("maximum")
    right = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if right and (high is None or value <= high):
        return None
    return f"a whole number {f'from {low}' if high is None else f'from {low} to {high}'}, not {_shown(value)}"


def list_jobs(server: Fairway, given: Arguments) -> Any:
    filters = {name: given.get(name) for name in ("state", "project", "owner")}
    names = ("id", "name", "kind", "state", "submitted_at", "message")
    rows = itertools.islice(server.jobs(**filters, limit=MAX_JOBS), MAX_JOBS)
    return [{name: job.data[name] for name in names} for job in rows]


def why_waiting(server: Fairway, given: Arguments) -> Any:
    data = server.job(given["job"]).data
    return {name: data[name] for name in ("state", "message", "verdict", "interval", "interval_missing")}


def read_logs(server: Fairway, given: Arguments) -> Any:
    return "".join(server.job(given["job"]).logs(rank=given.get("rank", 0), tail=given.get("lines", 100)))


def preview_start(server: Fairway, given: Arguments) -> Any:
    return server.call("POST", "jobs/preview/", json.dumps(given["fields"]), repeatable=True)


def submit_job(server: Fairway, given: Arguments) -> Any:
    return server.submit_fields(given["fields"], given.get("idempotency_key")).data


TOOLS = {
    "list_jobs": Tool(
        list_jobs, f"List jobs, newest first, at most {MAX_JOBS}.",
        {
            "state": {"type": "string", "description": "Such as PENDING or RUNNING."},
            "project": {"type": "string"}, "owner": {"type": "string", "description": "User name."},
        },
    ),
    "show_job": Tool(lambda server, given: server.job(given["job"]).data, "Show a job.", _JOB, ("job",)),
    "why_waiting": Tool(
        why_waiting, "Say why a job is pending, what would start it, and when it is expected to start.",
        _JOB, ("job",),
    ),
    "read_logs": Tool(
        read_logs, "Read the end of the log of a rank.",
        {
            **_JOB, "rank": {"type": "integer", "minimum": 0},
            "lines": {"type": "integer", "minimum": 1, "maximum": MAX_LOG_LINES, "description": "100 by default."},
        },
        ("job",),
    ),
    "preview_start": Tool(
        preview_start, "Say when a job would start and whom it would preempt, without submitting it.",
        _FIELDS, ("fields",),
    ),
    "submit_job": Tool(
        submit_job, "Submit a job.",
        {**_FIELDS, "idempotency_key": {
            "type": "string", "minLength": 1, "description": "A repeated key submits no second job."}},
        ("fields",), changes=True,
    ),
    "cancel_job": Tool(
        lambda server, given: server.job(given["job"]).stop().data, "Stop or cancel a job.",
        _JOB, ("job",), changes=True,
    ),
}  # fmt: skip


class McpServer:
    """Answers requests with the tools; ``read_only`` leaves out those that change something.

    ``simulate``: such tools change nothing; a submission is previewed, and a cancellation shows the job.
    """

    def __init__(self, server: Fairway, *, read_only: bool = False, simulate: bool = False) -> None:
        self._server, self._simulate = server, simulate
        self._tools = {name: tool for name, tool in TOOLS.items() if not (read_only and tool.changes)}

    def serve(self, source: TextIO, target: TextIO) -> None:
        """Answer each line of ``source`` until its end."""
        while True:
            try:
                if not (line := source.readline()):
                    return
                message = json.loads(line)
            except (ValueError, RecursionError):
                answer: dict[str, Any] | None = _error(None, PARSE_ERROR, "The line is not JSON in UTF-8.")
            else:
                answer = (
                    self.answer(message)
                    if isinstance(message, dict)
                    else _error(None, INVALID_REQUEST, "A message must be a JSON object.")
                )
            if answer is not None:
                target.write(json.dumps(answer) + "\n")
                target.flush()

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return the response to a request; None for a notification."""
        method, number, given = message.get("method"), message.get("id"), message.get("params")
        if number is None:
            return None
        if not isinstance(number, (str, int)) or isinstance(number, bool):
            return _error(None, INVALID_REQUEST, "The id of a message must be text or a whole number.")
        given = {} if given is None else given
        if not isinstance(given, dict):
            return _error(number, INVALID_PARAMS, "The parameters must be an object.")
        if method == "initialize":
            wanted = given.get("protocolVersion")
            result: dict[str, Any] = {
                "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "fairway", "version": __version__},
            }
            if self._simulate:
                result["instructions"] = "Simulation: no job is submitted or cancelled."
        elif method == "ping":
            result = {}
        elif method == "tools/list":
            result = {"tools": [tool.describe(name) for name, tool in self._tools.items()]}
        elif method == "tools/call":
            name, arguments = given.get("name"), given.get("arguments")
            arguments = {} if arguments is None else arguments
            if not isinstance(name, str) or name not in self._tools:
                known = ", ".join(self._tools)
                return _error(number, INVALID_PARAMS, f"There is no tool {_shown(name)}; there are {known}.")
            if not isinstance(arguments, dict):
                return _error(number, INVALID_PARAMS, "The arguments of a tool must be an object.")
            result = self._call(name, arguments)
        else:
            return _error(number, METHOD_NOT_FOUND, f"There is no method {_shown(method)}.")
        return {"jsonrpc": "2.0", "id": number, "result": result}

    def _call(self, name: str, given: Arguments) -> dict[str, Any]:
        tool = self._tools[name]
        if problems := tool.problems(given):
            return _content(" ".join(problems), is_error=True)
        if self._simulate and tool.changes:
            tool = TOOLS["preview_start" if name == "submit_job" else "show_job"]
        try:
            found = tool.act(self._server, given)
        except Refused as error:
            nearest = error.details.get("nearest")
            return _content(
                f"{error}{f' Nearest possible request: {json.dumps(nearest)}' if nearest else ''}",
                is_error=True,
            )
        except FairwayError as error:
            return _content(str(error), is_error=True)
        text = found if isinstance(found, str) else json.dumps(found, indent=1)
        return _content(
            f"Simulated: nothing was changed.\n{text}" if self._simulate and TOOLS[name].changes else text
        )


def _content(text: str, *, is_error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


def _error(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}

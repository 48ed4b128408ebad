"""The endpoints of MLflow's REST API that the portal offers, and whether each one writes. Pure.

Any other endpoint of the server is refused; ``NOT_OFFERED`` says what they are.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

ARTIFACT_TIMEOUT_S = 60.0
"""Longest time from the end of an upload to the answer; the file is copied to the artifacts meanwhile."""

MAX_ARTIFACT_NAME_BYTES = 255
MAX_ARTIFACT_PATH_BYTES = 2000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_DECODED_AGAIN = re.compile(r"%[0-9A-Fa-f]{2}|#")


class EndpointAccess(StrEnum):
    READ = "read"
    WRITE = "write"


class Endpoint(NamedTuple):
    name: str
    access: EndpointAccess
    is_artifact: bool = False
    """The body of the request or the answer is a file."""


_READS = """
GET  experiments/(get|get-by-name|search)
POST experiments/search
GET  runs/get
POST runs/search
GET  metrics/(get-history|get-history-bulk-interval)
GET  artifacts/list
GET  registered-models/(get|search|get-latest-versions|alias)
POST registered-models/get-latest-versions
GET  model-versions/(get|search|get-download-uri)
POST logged-models/search
GET  logged-models/[\\w-]+(/artifacts/directories)?
GET  server-info
"""
_WRITES = """
POST experiments/(create|update|delete|restore|set-experiment-tag|delete-experiment-tag)
POST runs/(create|update|delete|restore|set-tag|delete-tag|outputs)
POST runs/log-(metric|batch|parameter|inputs|model)
POST registered-models/(create|rename|set-tag|alias)
PATCH registered-models/update
DELETE registered-models/(delete|delete-tag|alias)
POST model-versions/(create|set-tag|transition-stage)
PATCH model-versions/update
DELETE model-versions/(delete|delete-tag)
POST logged-models(/[\\w-]+/params)?
PATCH logged-models/[\\w-]+(/tags)?
DELETE logged-models/[\\w-]+(/tags/[^/]+)?
"""


class NotOffered(NamedTuple):
    """A part of MLflow that the portal does not offer: its name and the patterns of its paths."""

    name: str
    pattern: re.Pattern[str]
    instead: str

    def covers(self, path: str) -> bool:
        """Return whether a path such as ``/api/2.0/mlflow/traces`` belongs to this part."""
        return self.pattern.match(re.sub(r"^/?(api/[23]\.0/?)?", "", path)) is not None


NOT_OFFERED = tuple(
    NotOffered(name, re.compile(pattern), instead)
    for name, pattern, instead in (
        ("Traces and assessments", r"mlflow/(traces|get-online-trace-details|unified-traces)", ""),
        (
            "Evaluation data sets",
            r"mlflow/(datasets|experiments/search-datasets)",
            "Inputs of a run are logged.",
        ),
        (
            "Evaluation of language models",
            r"mlflow/(issues|label-schemas|review-queues|scorers|prompt-optimization)",
            "",
        ),
        ("AI gateway", r"mlflow/gateway|gateway/", "Deploy a service of a model."),
        ("Webhooks", r"mlflow/webhooks", "See Notices."),
        ("Workspaces", r"mlflow/workspaces", "Each project is one."),
        (
            "Uploads in parts and presigned URLs",
            r"mlflow-artifacts/(mpu|presigned)|mlflow/artifacts/presigned",
            "Files are sent in one request.",
        ),
        ("Web interface and GraphQL", r"graphql|ajax-api", "See the pages of Fairway."),
    )
)
"""Compared with docs/experiments.md and with the endpoints of the installed MLflow by a test."""


def reason_not_offered(path: str) -> str:
    """Return a sentence about the part of MLflow to which a path belongs; "" if it is of none."""
    part = next((each for each in NOT_OFFERED if each.covers(path)), None)
    return f"{part.name}: not offered. {part.instead}".strip() if part else ""


_ARTIFACTS = {"GET": EndpointAccess.READ, "PUT": EndpointAccess.WRITE, "DELETE": EndpointAccess.WRITE}


def _compile(table: str) -> list[tuple[str, re.Pattern[str]]]:
    rows = (line.split(None, 1) for line in table.strip().splitlines())
    return [(method, re.compile(pattern)) for method, pattern in rows]


_TABLES = ((EndpointAccess.READ, _compile(_READS)), (EndpointAccess.WRITE, _compile(_WRITES)))


def find_endpoint(method: str, path: str) -> Endpoint | None:
    """Return the endpoint of a path below ``api/``, such as ``2.0/mlflow/runs/get``; None if not offered."""
    version, _, rest = path.partition("/")
    service, _, name = rest.partition("/")
    if version not in ("2.0", "3.0"):
        return None
    if service == "mlflow-artifacts":
        if name == "artifacts":
            return Endpoint(name, EndpointAccess.READ) if method == "GET" else None
        access = _ARTIFACTS.get(method)
        return Endpoint(name, access, is_artifact=True) if access and name.startswith("artifacts/") else None
    if service != "mlflow":
        return None
    for access, table in _TABLES:
        if any(method == each and pattern.fullmatch(name) for each, pattern in table):
            return Endpoint(name, access)
    return None


def is_artifact_path(path: str) -> bool:
    """Return whether a path of the portal is that of a file of a run, which has limits of its own."""
    return path.startswith("/api/mlflow/") and "/mlflow-artifacts/artifacts/" in path


def without_dots(path: str) -> str:
    """Return the path of a folder without names that are `.`: ``a/./b/.`` is ``a/b``."""
    return "/".join(name for name in path.split("/") if name != ".")


def artifact_path_problem(path: str, *, of_file: bool) -> str:
    """Return why the store cannot keep a file or folder under exactly this path; blank if it can.

    MLflow decodes percent signs again, drops what follows `#`, replaces control characters, and reads `file:` as a
    URL.
    """
    names = path.split("/")
    if names[-1] == "" and not of_file and len(names) > 1:
        names.pop()
    if names[-1] == "":
        return "a path that ends with / is that of a folder"
    if "" in names:
        return "no part of it may be empty"
    if any(name in (".", "..") for name in names):
        return "no part of it may be . or .."
    if _CONTROL.search(path):
        return "it has a control character"
    if "\ufffd" in path:
        return "it is not UTF-8"
    if _DECODED_AGAIN.search(path):
        return "it has # or a percent sign before two hexadecimal digits, which MLflow reads otherwise"
    if any(name.lower().startswith("file:") for name in names):
        return "a name that starts with file: is a URL to MLflow"
    if max(len(name.encode(errors="replace")) for name in names) > MAX_ARTIFACT_NAME_BYTES:
        return f"a name may have at most {MAX_ARTIFACT_NAME_BYTES} bytes"
    if len(path.encode(errors="replace")) > MAX_ARTIFACT_PATH_BYTES:
        return f"a path may have at most {MAX_ARTIFACT_PATH_BYTES} bytes"
    return ""

"""Asks a port of a running task whether its server answers: one HTTP request from the node itself."""

from __future__ import annotations

from typing import Any, Dict, Optional

from agents.node import refusals
from agents.node.ledger import RUNNING
from agents.node.refusals import Refusal, bad_spec
from agents.node.spec import container_name, public_id, whole_number
from agents.node.tasks import Tasks

ANSWER_WITHIN_S = 3.0


def probe(tasks: Tasks, fields: Dict[str, Any]) -> Dict[str, Any]:
    """The HTTP status of ``path`` on a port of a task; None while nobody answers there."""
    job, attempt = public_id(fields, "job"), whole_number(fields, "attempt")
    task, port = whole_number(dict(fields, task=fields.get("task", 0)), "task"), whole_number(fields, "port")
    path = fields.get("path", "/")
    if not isinstance(path, str) or not path.startswith("/") or any(ord(each) <= 32 for each in path):
        raise bad_spec("path is not an absolute path.")
    name = container_name(tasks.settings.cluster, job, attempt, task)
    record = tasks.ledger.tasks().get(name)
    if record is None or record["phase"] != RUNNING or str(port) not in record["ports"]:
        raise Refusal(refusals.NO_SUCH_CONTAINER, f"{name} does not run here with a port {port}.")
    return {"status": _status(tasks.settings.loopback, int(record["ports"][str(port)]), path)}


def _status(host: str, port: int, path: str) -> Optional[int]:
    import http.client  # 3 MB with all that it needs, and a watch session never asks

    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_WITHIN_S)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()

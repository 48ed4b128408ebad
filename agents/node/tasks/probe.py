"""Readiness probe: one HTTP request from the node to a port of a running task."""

from __future__ import annotations

from typing import Any, Dict, Optional

from agents.node import errors
from agents.node.errors import AgentError, invalid_spec
from agents.node.ledger.ledger import RUNNING
from agents.node.spec.task_spec import parse_integer
from agents.node.tasks.task_manager import TaskManager

REPLY_TIMEOUT_S = 3.0


def probe_port(tasks: TaskManager, request: Dict[str, Any]) -> Dict[str, Any]:
    """Return the HTTP status of ``path`` on a port of a task; None while nothing answers."""
    name, port = tasks.task_name(request), parse_integer(request, "port")
    path = request.get("path", "/")
    if not isinstance(path, str) or not path.startswith("/") or any(ord(each) <= 32 for each in path):
        raise invalid_spec("path is not an absolute path.")
    record = tasks.ledger.tasks().get(name)
    if record is None or record["phase"] != RUNNING or str(port) not in record["ports"]:
        raise AgentError(errors.NO_SUCH_CONTAINER, f"{name} is not running here with port {port}.")
    return {"status": _http_status(tasks.settings.loopback, int(record["ports"][str(port)]), path)}


def _http_status(host: str, port: int, path: str) -> Optional[int]:
    import http.client  # imported here: it takes 3 MB, and watch sessions never need it

    connection = http.client.HTTPConnection(host, port, timeout=REPLY_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()

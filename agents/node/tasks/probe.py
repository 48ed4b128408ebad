"""Readiness probes of a running task: one HTTP request to a port, and whether it listens on ports."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from agents.node import errors
from agents.node.errors import AgentError, invalid_spec
from agents.node.host.procfs import read_text
from agents.node.ledger.ledger import RUNNING
from agents.node.spec.task_spec import parse_integer
from agents.node.tasks.task_manager import TaskManager

REPLY_TIMEOUT_S = 3.0
_LISTEN = "0A"


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


def listens_on(tasks: TaskManager, request: Dict[str, Any]) -> Dict[str, Any]:
    """Return whether each of the TCP ports has a listener in the network of a running task."""
    name, ports = tasks.task_name(request), request.get("ports")
    if not isinstance(ports, list) or not all(isinstance(port, int) for port in ports):
        raise invalid_spec("ports is not a list of ports.")
    record = tasks.ledger.tasks().get(name)
    if record is None or record["phase"] != RUNNING or record["pid"] is None:
        raise AgentError(errors.NO_SUCH_CONTAINER, f"{name} is not running here.")
    found = {port for table in ("tcp", "tcp6") for port in _listening_ports(record["pid"], table)}
    return {"listening": found.issuperset(ports)}


def _listening_ports(pid: int, table: str) -> List[int]:
    """Return the local ports of the listening sockets in a table of ``/proc/PID/net`` (proc_net_tcp(5))."""
    rows = [line.split() for line in (read_text(f"/proc/{pid}/net/{table}") or "").splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == _LISTEN]


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

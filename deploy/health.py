"""Health checks of the containers: `http PLACE PATH`, `process WORD` or `worker NAME`.

They load nothing of Fairway: `celery inspect` of its application takes 2.7 s of processor time, and this 0.5 s.
"""

from __future__ import annotations

import http.client
import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

LIMIT_S = 4
WORKER_LIMIT_S = 15
"""A worker that works on one message at a time answers after it; a scheduling cycle may take seconds."""


class _OverSocket(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect(self._path)


def answers(place: str, path: str) -> bool:
    """Return whether a GET answers 200; `place` is `host:port` or the path of a unix socket."""
    connection = (
        _OverSocket(place) if place.startswith("/") else http.client.HTTPConnection(place, timeout=LIMIT_S)
    )
    host = urlsplit(os.environ.get("FAIRWAY_PORTAL_URL", "http://localhost")).netloc
    try:
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def runs(word: str) -> bool:
    """Return whether the container's first process has `word` in its command line and runs."""
    command = Path("/proc/1/cmdline").read_bytes().decode(errors="replace")
    state = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[0]
    return word in command and state not in "TtZX"


def replies(worker: str) -> bool:
    """Return whether a Celery worker answers a ping through the message store."""
    from celery import Celery

    app = Celery(broker=os.environ["REDIS_URL"])
    app.conf.update(accept_content=["json"], broker_transport_options={"socket_timeout": 5, "max_retries": 1})
    return bool(app.control.ping(destination=[worker], timeout=WORKER_LIMIT_S))


CHECKS = {"http": answers, "process": runs, "worker": replies}

if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    sys.exit(0 if CHECKS[kind](*arguments) else 1)

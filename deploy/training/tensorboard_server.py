"""TensorBoard for a workspace: answers only requests with the secret of the attempt, which the gateway adds.

TENSORBOARD_RUNS is a JSON object of names and folders, by default the checkpoint folder of the home. PORT,
FAIRWAY_ADDRESS and FAIRWAY_SECRETS come from Fairway.
"""

import hmac
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from tensorboard import default, program  # type: ignore[import-not-found]

GRACE_S = 5.0
"""How long the replaced secret is accepted: the gateway learns of the new one a moment later."""


class SecretFile:
    """The secret of the attempt, read again when its file changes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._current = self._replaced = b""
        self._replaced_until_s = 0.0

    def matches(self, given: bytes) -> bool:
        self._read()
        accepted = [self._current]
        if time.time() < self._replaced_until_s:
            accepted.append(self._replaced)
        return any(secret and hmac.compare_digest(given, b"Bearer " + secret) for secret in accepted)

    def _read(self) -> None:
        status = os.stat(self._path)
        version = (status.st_ino, status.st_mtime_ns)
        if version == self._version:
            return
        with open(self._path, "rb") as stream:
            secret = stream.read().strip()
        if self._version is not None:
            self._replaced, self._replaced_until_s = self._current, status.st_mtime + GRACE_S
        self._version, self._current = version, secret


def require_login(app: Callable[..., Iterable[bytes]], secret: SecretFile) -> Callable[..., Iterable[bytes]]:
    """Return the application behind a check of the header Authorization."""

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if secret.matches(environ.pop("HTTP_AUTHORIZATION", "").encode("latin-1")):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"Open TensorBoard through Fairway.\n"]

    return checked


def main() -> None:
    secret = SecretFile(os.path.join(os.environ["FAIRWAY_SECRETS"], "token"))
    runs = json.loads(os.environ.get("TENSORBOARD_RUNS") or '{"home": "~/checkpoints"}')
    spec = ",".join(f"{name}:{os.path.expanduser(folder)}" for name, folder in runs.items())

    class Server(program.WerkzeugServer):  # type: ignore[misc]
        def __init__(self, app: Callable[..., Iterable[bytes]], flags: Any) -> None:
            super().__init__(require_login(app, secret), flags)

    board = program.TensorBoard(plugins=default.get_plugins(), server_class=Server)
    options = [
        f"--logdir_spec={spec}",
        f"--host={os.environ['FAIRWAY_ADDRESS']}",
        f"--port={os.environ['PORT']}",
    ]
    board.configure([sys.argv[0], *options, "--load_fast=false", "--reload_interval=10"])
    sys.exit(board.main())


if __name__ == "__main__":
    main()

"""TensorBoard for a workspace: answers only requests with the secret of the attempt, which the gateway adds.

TENSORBOARD_RUNS is a JSON object of names and folders, by default the checkpoint folder of the home. PORT,
FAIRWAY_ADDRESS and FAIRWAY_SECRETS come from Fairway.
"""

import hmac
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tensorboard import default, program  # type: ignore[import-not-found]


def require_login(app: Callable[..., Iterable[bytes]], secret: str) -> Callable[..., Iterable[bytes]]:
    """Return the application behind a check of the header Authorization."""
    expected = f"Bearer {secret}".encode()

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        given = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if hmac.compare_digest(given, expected):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"Open TensorBoard through Fairway.\n"]

    return checked


def main() -> None:
    with open(os.path.join(os.environ["FAIRWAY_SECRETS"], "token")) as stream:
        secret = stream.read().strip()
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

"""Serves the gateway on the public port: ``python -m portal.gateway --bind 127.0.0.1 --port 8000``."""

from __future__ import annotations

import argparse
import os
import resource
from pathlib import Path

import django
import uvicorn

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.config.settings")
django.setup()

from portal.database.schema_version import check_service_start  # noqa: E402
from portal.gateway.app import Gateway  # noqa: E402
from portal.gateway.certificates import report_no_certificate, watch_certificate  # noqa: E402
from portal.gateway.protocol.http_protocol import GatewayHttpProtocol  # noqa: E402
from portal.gateway.proxy.websocket_protocol import RawWebSocketProtocol  # noqa: E402


def main() -> None:
    """Run until a signal; open sockets get a few seconds to close."""
    options = argparse.ArgumentParser(prog="python -m portal.gateway", description=__doc__)
    options.add_argument("--bind", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8000)
    options.add_argument("--fd", type=int, help="Serve on this inherited socket.")
    options.add_argument("--tls-cert")
    options.add_argument("--tls-key")
    chosen = options.parse_args()
    check_service_start()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # a browser's socket to an SSH node takes four descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    config = uvicorn.Config(
        Gateway(),
        host=chosen.bind,
        port=chosen.port,
        fd=chosen.fd,
        ssl_certfile=chosen.tls_cert,
        ssl_keyfile=chosen.tls_key,
        loop="uvloop",
        http=GatewayHttpProtocol,
        ws=RawWebSocketProtocol,
        lifespan="on",
        # forwarded headers of clients are dropped; see portal_app.py for trusted proxies
        proxy_headers=False,
        server_header=False,
        date_header=False,
        access_log=False,
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=3,
    )
    config.load()
    if config.ssl is not None:
        key = chosen.tls_key or chosen.tls_cert
        watch_certificate(config.ssl, Path(chosen.tls_cert), Path(key), config.ssl_ciphers)
    else:
        report_no_certificate()
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main()

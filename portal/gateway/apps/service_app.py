"""A service's origin: sessions and API tokens, balancing over ready replicas, and the start on the first request."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from collections import Counter
from functools import partial

from django.conf import settings
from django.db import Error as DatabaseError
from django.utils.translation import gettext_noop as _

from portal.access import AccessPolicy, access_policy
from portal.gateway.access.authorization import (
    AccessRefusal,
    Authorizer,
    ServiceRoute,
    decide_service_access,
)
from portal.gateway.access.authorization_monitor import ActiveGrant, AuthorizationMonitor
from portal.gateway.addresses import public_scheme, service_origin
from portal.gateway.apps.origin_app import (
    GATEWAY_PATH_PREFIX,
    OriginApp,
    is_cross_site,
    portal_link,
    redirect_error,
    workspace_cookie,
)
from portal.gateway.asgi_types import Receive, Scope, Send
from portal.gateway.protocol import cookies
from portal.gateway.protocol import headers as rules
from portal.gateway.protocol.error_responses import GatewayError
from portal.gateway.proxy.balancer import Balancer, ReplicaPool
from portal.gateway.proxy.http_client import NoResponseError
from portal.gateway.proxy.http_proxy import PermissionEndedError, ProxiedRequest, proxy_http
from portal.gateway.proxy.upstreams import Upstreams
from portal.gateway.proxy.websocket_proxy import HandshakeRejectedError, proxy_websocket
from portal.services.accounts.tokens import TOKEN_PATTERN
from portal.services.serving.model_servers import record_requests, wake_service

log = logging.getLogger(__name__)

PAGE_WAIT_S = 3.0
"""How long a browser waits for a replica before it gets a page that says the service is starting."""
PROGRAM_WAIT_S = 50.0
"""How long another request waits; below the usual limit of 60 s of clients and proxies."""
POLL_S = 0.5
RETRY_AFTER_S = 5
RECORD_INTERVAL_S = 5.0


@access_policy(AccessPolicy.SERVICE)
class ServiceApp(OriginApp):
    """Answer every request to a name ``svc-...`` below the apps domain."""

    def __init__(self, upstreams: Upstreams) -> None:
        authorizer = Authorizer(decide_service_access)
        super().__init__(authorizer, AuthorizationMonitor(authorizer), upstreams)
        self._balancer = Balancer(upstreams)
        self._counts: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._monitor.close()
        await self._record()
        self._authorizer.close()

    async def __call__(self, service: str, scope: Scope, receive: Receive, send: Send) -> None:
        websocket = scope["type"] == "websocket"
        if not websocket and scope["raw_path"].startswith(GATEWAY_PATH_PREFIX):
            await self._serve_gateway_path(service, scope, receive, send)
            return
        token = _bearer_token(scope)
        credential = token or cookies.read_cookie(scope["headers"], workspace_cookie())
        route = self._permitted(service, await self._decide(service, credential), token)
        # a token is never sent by a browser on its own, so only sessions need the check
        if not token and is_cross_site(scope, scope["headers"], service_origin(service)):
            message = _("The request came from a page of another site.")
            raise GatewayError(403, "foreign_origin", _("Refused"), message)
        self._counts[service] += 1
        if not route.targets:
            route = await self._wait_for_replica(scope, service, token, credential, route)
        pool = ReplicaPool(self._balancer, route.targets)
        proxied = self._proxied_request(scope, service, credential, route, pool)
        try:
            if websocket:
                await proxy_websocket(proxied, scope)
            else:
                await proxy_http(proxied, scope, receive, send)
        except rules.RedirectDroppedError as error:
            raise redirect_error(error.address) from error
        except HandshakeRejectedError as error:
            message = _("The service refused this connection.")
            raise GatewayError(error.status, "refused_by_tool", _("Refused"), message) from error
        except PermissionEndedError as error:
            if isinstance(error.decision, AccessRefusal):
                self._permitted(service, error.decision, token)  # raises what says why
            raise _unreachable_error() from error
        except NoResponseError as error:
            log.info("no response from service %s: %s", service, error)
            self._authorizer.invalidate(service)
            raise _unreachable_error() from error
        finally:
            pool.finish()

    # -- internal ----------------------------------------------------------------------------------

    def _permitted(self, service: str, decision: object, token: str) -> ServiceRoute:
        if isinstance(decision, ServiceRoute):
            return decision
        if decision is AccessRefusal.STOPPED:
            link = portal_link(f"/services/{service}/")
            raise GatewayError(
                410, "service_stopped", _("This service is stopped"), _("Start it on its page."), link=link
            )
        if token:
            message = (
                "The token is not valid, lacks the scope services, or its owner may not use this service."
            )
            raise GatewayError(401, "invalid_token", "Not permitted", message)
        message = _(
            "Open the service from its page in the portal, or send a token: Authorization: Bearer fw_..."
        )
        raise GatewayError(
            403, "no_session", _("Open this service from the portal"), message, link=portal_link()
        )

    async def _wait_for_replica(
        self, scope: Scope, service: str, token: str, credential: str, route: ServiceRoute
    ) -> ServiceRoute:
        """Start the service if it scaled to zero, and wait for a replica. Raise GatewayError at the limit."""
        accept = rules.single_header(scope["headers"], b"accept") or b""
        is_page = scope.get("method") == "GET" and b"text/html" in accept
        loop = asyncio.get_running_loop()
        end_s = loop.time() + (PAGE_WAIT_S if is_page else PROGRAM_WAIT_S)
        while not route.targets and loop.time() < end_s:
            if route.asleep:
                with contextlib.suppress(DatabaseError):  # the next turn tries again
                    await self._authorizer.run_in_thread(wake_service, service)
            await asyncio.sleep(POLL_S)
            decision = await self._decide(service, credential, max_age_s=POLL_S / 2)
            route = self._permitted(service, decision, token)
        if route.targets:
            return route
        message = _("No replica is ready yet. Its page in the portal shows the progress and why it waits.")
        raise GatewayError(
            503,
            "service_starting",
            _("This service is starting"),
            message,
            retry_after_s=RETRY_AFTER_S,
            refresh_s=RETRY_AFTER_S if is_page else None,
        )

    def _proxied_request(
        self, scope: Scope, service: str, credential: str, route: ServiceRoute, pool: ReplicaPool
    ) -> ProxiedRequest:
        # Fairway's token is for the gateway, however it is written; any other value is for the service itself
        sent = rules.single_header(scope["headers"], b"authorization") or b""
        drop = (b"authorization",) if _contains_token(sent) else ()
        passed = cookies.tool_headers(rules.upstream_request_headers(scope["headers"], drop=drop))
        host = rules.single_header(scope["headers"], b"host") or b""
        passed += rules.forwarded_headers(None, public_scheme(), host)
        passed += rules.identity_headers(route.username, route.user)
        return ProxiedRequest(
            pool=pool,
            headers=passed,
            response_headers=partial(
                rules.tool_response_headers,
                secure=settings.HTTPS_ENABLED,
                sent=scope["headers"],
                ports={port for each in route.targets for port in (each.port, each.tool_port)},
            ),
            retries=len(route.targets),
            watch=partial(self._monitor.watch, ActiveGrant(service, credential, route)),
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(RECORD_INTERVAL_S)
            await self._record()

    async def _record(self) -> None:
        """Store the requests since the last time; open connections count as activity."""
        counts = {**dict.fromkeys(self._monitor.active_names, 0), **self._counts}
        self._counts = Counter()
        if not counts:
            return
        try:
            await self._authorizer.run_in_thread(record_requests, counts)
        except (DatabaseError, OSError) as error:
            self._counts.update(counts)
            log.warning("the requests of services could not be stored: %s", error)


def _unreachable_error() -> GatewayError:
    return GatewayError(
        502,
        "service_unreachable",
        _("The service does not respond"),
        _("None of its replicas answered. Try again in a moment."),
        retry_after_s=RETRY_AFTER_S,
    )


def _contains_token(authorization: bytes) -> bool:
    """Return whether the value contains a token of Fairway under any scheme, also as a password (RFC 7617)."""
    texts = [authorization]
    with contextlib.suppress(ValueError):
        texts.append(base64.b64decode(authorization.partition(b" ")[2]))
    return any(TOKEN_PATTERN.search(text.decode("latin-1")) for text in texts)


def _bearer_token(scope: Scope) -> str:
    """Return the API token of the request; "" for none, and for a value that is not a token of Fairway."""
    value = rules.single_header(scope["headers"], b"authorization") or b""
    kind, _, text = value.decode("latin-1").partition(" ")
    text = text.strip()
    return text if kind.lower() == "bearer" and TOKEN_PATTERN.fullmatch(text) else ""

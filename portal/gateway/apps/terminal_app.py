"""Terminals on the portal's origin: authorization, and the connection to the terminal's process on its node.

The WebSocket connects the browser's page and that process; the gateway inspects only whether there is input.
With a token the WebSocket carries an SSH connection instead (``SshGateway``).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from django.conf import settings
from django.db import Error as DatabaseError

from portal.access import AccessPolicy, Permission, access_policy, can
from portal.domain.states import AttemptState, DesiredState
from portal.errors import Unauthenticated
from portal.gateway.access.authorization import (
    AccessDecision,
    AccessRefusal,
    AuthorizationUnavailableError,
    Authorizer,
    Target,
    tunnel_target,
)
from portal.gateway.access.authorization_monitor import ActiveGrant, AuthorizationMonitor
from portal.gateway.activity import ActivityTracker
from portal.gateway.addresses import portal_origin
from portal.gateway.apps.origin_app import is_cross_site
from portal.gateway.apps.ssh_gateway import SshGateway, bearer_token
from portal.gateway.asgi_types import Receive, Scope, Send
from portal.gateway.protocol import cookies
from portal.gateway.protocol import headers as rules
from portal.gateway.protocol.error_responses import GatewayError
from portal.gateway.proxy.http_client import NoResponseError
from portal.gateway.proxy.http_proxy import ProxiedRequest
from portal.gateway.proxy.upstreams import Upstreams
from portal.gateway.proxy.websocket_protocol import WEBSOCKET_EXTENSION, FrameTracker, RawWebSocketProtocol
from portal.gateway.proxy.websocket_proxy import HandshakeRejectedError, proxy_websocket
from portal.models import Terminal, User
from portal.services.accounts.sessions import (
    RENEW_INTERVAL_S,
    renew_workspace_session,
    session_id,
    session_user,
)
from portal.services.accounts.tokens import TOKEN_PATTERN, get_token, has_scope
from portal.services.accounts.tokens import Scope as TokenScope
from portal.services.encryption import DecryptionError
from portal.services.workspaces.terminals import (
    close_orphaned_terminals,
    do_close_terminal,
    do_mark_connected,
    terminal_secret,
)

log = logging.getLogger(__name__)

PATH = re.compile(rb"/terminals/([a-z0-9]{1,16})/")
BINARY_OPCODE = 0x2
"""The frame type (RFC 6455: binary) in which a page sends input."""


def decide_terminal_access(public_id: str, credential: str) -> AccessDecision:
    """Return from the database whether a session or API token may use this terminal now, and its target."""
    user, owned_by = _terminal_owner(credential)
    row = (
        Terminal.objects.select_related("user", "task__node", "task__attempt__job__project")
        .filter(public_id=public_id, closed_at__isnull=True, error="", **owned_by)
        .first()
    )
    if row is None or user != row.user:
        return AccessRefusal.DENIED
    task, attempt = row.task, row.task.attempt
    if not can(row.user, Permission.ENTER, attempt.job):
        return AccessRefusal.DENIED
    if (
        attempt.job.desired_state != DesiredState.RUN.value
        or attempt.stop_requested_at is not None
        or task.eviction_requested_at is not None
        or attempt.state != AttemptState.RUNNING.value
        or task.state != AttemptState.RUNNING.value
    ):
        return AccessRefusal.STOPPED
    if row.port is None:
        return AccessRefusal.NOT_READY
    try:
        secret = terminal_secret(row)
    except DecryptionError as error:
        log.error("the secret of the terminal %s cannot be decrypted: %s", public_id, error)
        return AccessRefusal.DENIED
    return Target(
        job=attempt.job.public_id,
        attempt=attempt.number,
        node=task.node.public_id,
        address=tunnel_target(task.node),
        port=row.port,
        authorization=f"Bearer {secret}",
        attempt_pk=attempt.pk,
    )


def _terminal_owner(credential: str) -> tuple[User | None, dict[str, Any]]:
    """Return the user of a session or token, and the columns of its terminals."""
    if not TOKEN_PATTERN.fullmatch(credential):
        return session_user(credential), {"session_key": credential, "token": None}
    try:
        token = get_token(credential)
    except Unauthenticated:
        return None, {"token": None}
    return token.owner if has_scope(token, TokenScope.SSH) else None, {"token": token}


def find_open_failure(public_id: str, credential: str) -> str:
    """Return why the node did not open it, "" if it did."""
    user, owned_by = _terminal_owner(credential)
    row = Terminal.objects.filter(public_id=public_id, user=user, **owned_by).only("error").first()
    return row.error if row is not None else ""


def close_stale_terminals() -> None:
    """Mark terminals as closed that were open in an earlier gateway process."""
    close_orphaned_terminals("The gateway was restarted.")


@access_policy(AccessPolicy.SIGNED_IN)
class TerminalApp:
    """Answer every request below ``/terminals/``."""

    def __init__(self, upstreams: Upstreams, activity: ActivityTracker) -> None:
        self._upstreams, self._activity = upstreams, activity
        # input extends the session, see _on_input
        self._authorizer = Authorizer(decide_terminal_access, on_use=None, threads=2)
        self._monitor = AuthorizationMonitor(self._authorizer)
        self._ssh = SshGateway(upstreams, self._authorizer, self._monitor)

    async def start(self) -> None:
        """Close stale terminals; start also when the database does not answer."""
        try:
            await self._authorizer.run_in_thread(close_stale_terminals)
        except (DatabaseError, OSError) as error:
            log.warning("stale terminals could not be closed in the database: %s", error)

    def close(self) -> None:
        self._ssh.close()
        self._monitor.close()
        self._authorizer.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = PATH.fullmatch(scope["raw_path"])
        headers = scope["headers"]
        if scope["type"] != "websocket" or path is None:
            raise GatewayError(404, "not_found", "Not found", "There is nothing at this address.")
        name = path.group(1).decode("ascii")
        token = bearer_token(headers)
        if token is None and is_cross_site(scope, headers, portal_origin()):
            message = "The request came from a page of another site."
            raise GatewayError(403, "foreign_origin", "Refused", message)
        session_key = session_id(cookies.read_cookie(headers, settings.SESSION_COOKIE_NAME.encode()))
        try:
            if token is None:
                target = await self._authorizer.decide(name, session_key, max_age_s=0.0)
            else:
                target = await self._ssh.wait_until_open(name, token)
            if not isinstance(target, Target) or not await self._authorizer.run_in_thread(
                do_mark_connected, name
            ):
                message = "You have no access to this terminal, or no longer."
                if token is not None and target is AccessRefusal.DENIED:
                    message = await self._authorizer.run_in_thread(find_open_failure, name, token) or message
                raise GatewayError(403, "terminal_refused", "Refused", message)
        except (AuthorizationUnavailableError, DatabaseError, OSError) as error:
            log.warning("access to the terminal %s could not be checked: %s", name, error)
            message = "Fairway's database does not respond. Try again in a moment."
            raise GatewayError(503, "unavailable", "Not now", message, retry_after_s=5) from error
        if token is None:
            await self._proxy(scope, name, session_key, target)
            return
        why = "The gateway stopped."
        try:
            on_input = partial(self._activity.record_terminal_input, target.attempt_pk)
            why = await self._ssh.serve(scope, ActiveGrant(name, token, target), target, on_input)
        finally:
            await asyncio.shield(self._record_close(name, why))

    async def _proxy(self, scope: Scope, name: str, session_key: str, target: Target) -> None:
        why = "The shell ended, or its page was closed."
        try:
            browser: RawWebSocketProtocol = scope["extensions"][WEBSOCKET_EXTENSION]
            browser.on_data = InputDetector(partial(self._on_input, target.attempt_pk, session_key)).feed
            proxied = ProxiedRequest(
                pool=self._upstreams.port(target.address, target.port),
                headers=[(b"host", b"terminal"), (b"authorization", target.authorization.encode("ascii"))],
                response_headers=rules.client_response_headers,
                watch=partial(self._monitor.watch, ActiveGrant(name, session_key, target)),
            )
            if await proxy_websocket(proxied, scope):
                why = "Access to it was revoked."
        except (HandshakeRejectedError, NoResponseError) as error:
            why = "Its node did not respond."
            log.info("cannot connect to the terminal %s on %s: %s", name, target.node, error)
            message = "Its node is not reachable at the moment."
            raise GatewayError(502, "terminal_unreachable", "Not now", message) from error
        finally:
            await asyncio.shield(self._record_close(name, why))

    async def _record_close(self, name: str, why: str) -> None:
        try:
            await self._authorizer.run_in_thread(do_close_terminal, name, why)
        except (DatabaseError, OSError) as error:
            log.warning("the end of the terminal %s could not be stored: %s", name, error)

    def _on_input(self, attempt_row: int, session_key: str, *, extends_session: bool) -> None:
        self._activity.record_terminal_input(attempt_row)
        if extends_session:
            asyncio.get_running_loop().create_task(self._extend_session(session_key))

    async def _extend_session(self, session_key: str) -> None:
        try:
            await self._authorizer.run_in_thread(renew_workspace_session, session_key)
        except (DatabaseError, OSError) as error:
            log.warning("a workspace session could not be renewed: %s", error)


class InputDetector:
    """Detect input by the frame type of messages; their content is not inspected."""

    def __init__(self, on_input: Callable[..., None]) -> None:
        self._on_input = on_input
        self._frames = FrameTracker(self._on_frame)
        self._session_extended_at = -RENEW_INTERVAL_S * 2.0

    def feed(self, data: bytes) -> None:
        self._frames.feed(data)

    def _on_frame(self, kind: int) -> None:
        if kind == BINARY_OPCODE:
            extends_session = monotonic() - self._session_extended_at >= RENEW_INTERVAL_S
            if extends_session:
                self._session_extended_at = monotonic()
            self._on_input(extends_session=extends_session)

"""A workspace's origin: authorization and the proxy to its server."""

from __future__ import annotations

import logging
from functools import partial

from django.conf import settings
from django.utils.translation import gettext_noop as _

from portal.access import AccessPolicy, access_policy
from portal.config import variables
from portal.gateway.access.authorization import AccessRefusal, Authorizer, Target
from portal.gateway.access.authorization_monitor import ActiveGrant, AuthorizationMonitor
from portal.gateway.activity import ActivityTracker
from portal.gateway.addresses import public_scheme, workspace_origin
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
from portal.gateway.protocol.redaction import base64_forms
from portal.gateway.proxy.http_client import NoResponseError
from portal.gateway.proxy.http_proxy import PermissionEndedError, ProxiedRequest, proxy_http
from portal.gateway.proxy.upstreams import Upstreams
from portal.gateway.proxy.websocket_proxy import HandshakeRejectedError, proxy_websocket

log = logging.getLogger(__name__)


@access_policy(AccessPolicy.WORKSPACE)
class WorkspaceApp(OriginApp):
    """Answer every request to a name ``ws-...`` below the apps domain."""

    def __init__(
        self,
        authorizer: Authorizer,
        monitor: AuthorizationMonitor,
        upstreams: Upstreams,
        activity: ActivityTracker,
    ) -> None:
        super().__init__(authorizer, monitor, upstreams)
        self._activity = activity
        # the largest body; None: no limit besides the tool's
        self._max_upload_bytes = variables.WORKSPACE_UPLOAD_MIB.read() * 1024**2 or None

    async def __call__(self, job: str, scope: Scope, receive: Receive, send: Send) -> None:
        websocket = scope["type"] == "websocket"
        if not websocket and scope["raw_path"].startswith(GATEWAY_PATH_PREFIX):
            await self._serve_gateway_path(job, scope, receive, send)
            return
        cookie = cookies.read_cookie(scope["headers"], workspace_cookie())
        decision = await self._decide(job, cookie)
        if isinstance(decision, AccessRefusal):
            raise _refusal_error(decision, job)
        assert isinstance(decision, Target)  # noqa: S101
        if is_cross_site(scope, scope["headers"], workspace_origin(job)):
            message = _("The request came from a page of another site.")
            raise GatewayError(403, "foreign_origin", _("Refused"), message)
        if decision.read_only and (websocket or scope["method"] not in ("GET", "HEAD")):
            message = _(
                "This workspace is shared with you for viewing: files can be read, and nothing can be changed."
            )
            raise GatewayError(403, "view_only", _("For viewing only"), message)
        self._activity.record_request(decision, scope)
        proxied = self._proxied_request(scope, job, cookie, decision)
        try:
            if websocket:
                await proxy_websocket(proxied, scope)
            else:
                await proxy_http(proxied, scope, receive, send)
        except rules.EncodedResponseError as error:
            message = _("The tool compressed its response although it may not when it is shared.")
            raise GatewayError(
                502, "response_unreadable", _("This response is not shown"), message
            ) from error
        except rules.RedirectDroppedError as error:
            raise redirect_error(error.address) from error
        except HandshakeRejectedError as error:
            message = _("The workspace refused this connection.")
            raise GatewayError(error.status, "refused_by_tool", _("Refused"), message) from error
        except PermissionEndedError as error:
            if isinstance(error.decision, AccessRefusal):
                raise _refusal_error(error.decision, job) from error
            raise _unreachable_error() from error
        except NoResponseError as error:
            log.info("no response from workspace %s on %s: %s", job, decision.node, error)
            self._authorizer.invalidate(job)
            raise _unreachable_error() from error

    # -- internal ----------------------------------------------------------------------------------

    def _proxied_request(self, scope: Scope, job: str, cookie: str, target: Target) -> ProxiedRequest:
        drop = [b"authorization", *(rules.METHOD_OVERRIDES if target.read_only else ())]
        if target.is_shared:  # a compressed or partial response could contain the secret unseen
            drop += [b"accept-encoding", b"range", b"if-range"]
        kept = rules.upstream_request_headers(scope["headers"], drop=drop)
        if target.is_shared:
            kept.append((b"accept-encoding", b"identity"))
        host = rules.single_header(scope["headers"], b"host") or b""
        passed = cookies.tool_headers(kept)
        passed += rules.forwarded_headers(None, public_scheme(), host)
        passed.append((target.authorization_header.encode(), target.authorization.encode("ascii")))
        return ProxiedRequest(
            pool=self._upstreams.port(target.address, target.port),
            headers=passed,
            response_headers=partial(
                rules.tool_response_headers,
                secure=settings.HTTPS_ENABLED,
                sent=scope["headers"],
                ports={target.port, target.tool_port},
                readable=target.is_shared,
            ),
            max_body_bytes=self._max_upload_bytes,
            secrets=_unsent(target),
            retries=1,  # a tunnel may end during a request, and a page does not request its files again
            watch=partial(self._monitor.watch, ActiveGrant(job, cookie, target)),
        )


_REFUSALS = {
    AccessRefusal.DENIED: (
        403,
        "no_session",
        _("Open this workspace from the portal"),
        _("You are not signed in here. Open the workspace from its page in the portal."),
    ),
    AccessRefusal.STOPPED: (
        410,
        "workspace_stopped",
        _("This workspace has stopped"),
        _("Its files are kept. Its page in the portal shows why it ended, and starts it again."),
    ),
    AccessRefusal.NOT_READY: (
        503,
        "workspace_not_ready",
        _("This workspace is starting"),
        _("Its server does not respond yet. The portal shows its progress."),
    ),
}


def _unsent(target: Target) -> list[bytes]:
    """Return what no response may contain. Jupyter returns any file in base64, so a visitor gets that neither."""
    found = list(target.secrets)
    if target.is_shared:
        found += [form for secret in target.secrets for form in base64_forms(secret)]
    return found


def _unreachable_error() -> GatewayError:
    return GatewayError(
        502,
        "workspace_unreachable",
        _("The workspace does not respond"),
        _("Its node cannot be reached, or its server is starting or stopping. Try again in a moment."),
        link=portal_link(),
        retry_after_s=5,
    )


def _refusal_error(refusal: AccessRefusal, job: str) -> GatewayError:
    link = portal_link("/" if refusal is AccessRefusal.DENIED else f"/jobs/{job}/")
    retry_after_s = 2 if refusal is AccessRefusal.NOT_READY else None
    return GatewayError(*_REFUSALS[refusal], link=link, retry_after_s=retry_after_s)

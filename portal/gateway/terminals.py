"""Terminals on the portal's own origin: who may enter which, and the way to the process that holds it on its node.

The socket is a WebSocket between the browser's page and that process; nothing of it is read here but whether
somebody types.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from functools import partial
from time import monotonic

from django.conf import settings
from django.db import Error as DatabaseError

from portal.access import Policy, Verb, can, policy
from portal.gateway import cookies
from portal.gateway import headers as rules
from portal.gateway.activity import Lookout
from portal.gateway.client import NoAnswer
from portal.gateway.door import Places, foreign
from portal.gateway.forward import Journey
from portal.gateway.guard import Guard, Hold
from portal.gateway.pages import say
from portal.gateway.pipe import PIPE, FrameEdges, PipeProtocol
from portal.gateway.rights import STRANGER, Answer, Decision, NodeAddress, Rights, Target, Unknown
from portal.gateway.sockets import HandshakeRefused, forward_socket
from portal.gateway.upstream import Upstreams
from portal.gateway.wire import Receive, Scope, Send
from portal.models import Terminal
from portal.services.sealing import CannotOpen
from portal.services.session_store import session_id
from portal.services.sessions import KEPT_EVERY_S, keep_session_of_workspace, session_user
from portal.services.terminals import close_left_open, do_close_terminal, do_enter_terminal, terminal_secret
from portal.words.states import AttemptState, Desired

log = logging.getLogger(__name__)

PATH = re.compile(rb"/terminals/([a-z0-9]{1,16})/")
TYPED = 0x2
"""The kind of message (RFC 6455: binary) in which a page sends what is typed."""


def decide_terminal(public_id: str, session_key: str) -> Decision:
    """Whether the holder of this portal session may use this terminal now, and where it is; by the record alone."""
    row = (
        Terminal.objects.select_related("user", "task__node", "task__attempt__job__project")
        .filter(public_id=public_id, session_key=session_key, closed_at__isnull=True, refusal="")
        .first()
    )
    if row is None or session_user(session_key) != row.user:
        return STRANGER
    task, attempt = row.task, row.task.attempt
    if not can(row.user, Verb.ENTER, attempt.job):
        return STRANGER
    if (
        attempt.job.desired != Desired.RUN.value
        or attempt.stop_wanted_at is not None
        or task.leave_wanted_at is not None
        or attempt.state != AttemptState.RUNNING.value
        or task.state != AttemptState.RUNNING.value
    ):
        return Decision(Answer.STOPPED)
    if row.port is None:
        return Decision(Answer.NOT_READY)
    try:
        secret = terminal_secret(row)
    except CannotOpen as problem:
        log.error("the secret of the terminal %s does not open: %s", public_id, problem)
        return STRANGER
    node = NodeAddress.of(task.node)
    target = Target(attempt.job.public_id, attempt.number, node, row.port, f"Bearer {secret}", row=attempt.pk)
    return Decision(Answer.OPEN, target)


def begin_anew() -> None:
    """What an earlier gateway left open has ended with it."""
    close_left_open("The gateway was started anew.")


@policy(Policy.SIGNED_IN)
class TerminalDoor:
    """Answers every request below ``/terminals/``."""

    def __init__(self, places: Places, rights: Rights, upstreams: Upstreams, lookout: Lookout) -> None:
        self._places, self._rights, self._upstreams, self._lookout = places, rights, upstreams, lookout
        self._guard = Guard(rights)
        self._say = partial(say, secure=places.secure)

    async def start(self) -> None:
        """Begins; a record that does not answer is no reason not to."""
        try:
            await self._rights.in_thread(begin_anew)
        except (DatabaseError, OSError) as problem:
            log.warning("terminals that were left open are not closed in the record: %s", problem)

    def close(self) -> None:
        """Ends with the gateway."""
        self._guard.close()
        self._rights.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = PATH.fullmatch(scope["raw_path"])
        headers = scope["headers"]
        if scope["type"] != "websocket" or path is None:
            await self._say(
                send, scope, 404, "not_found", "Not found", "There is nothing here under that name."
            )
            return
        if foreign(scope, headers, self._places.portal_origin):
            sentence = "The request came from a page of another site."
            await self._say(send, scope, 403, "foreign_origin", "Refused", sentence)
            return
        name = path.group(1).decode("ascii")
        session_key = session_id(cookies.read_cookie(headers, settings.SESSION_COOKIE_NAME.encode()))
        try:
            decision = await self._rights.decide(name, session_key, fresh_s=0.0)
            target = decision.target
            if target is None or not await self._rights.in_thread(do_enter_terminal, name):
                sentence = "This terminal is not open to you, or not any more."
                await self._say(send, scope, 403, "terminal_refused", "Refused", sentence)
                return
        except (Unknown, DatabaseError, OSError) as problem:
            log.warning("the record could not be asked about the terminal %s: %s", name, problem)
            sentence = "Fairway's database does not answer. Try again in a moment."
            await self._say(send, scope, 503, "unavailable", "Not now", sentence, retry_after_s=5)
            return
        await self._enter(scope, send, name, session_key, target)

    async def _enter(self, scope: Scope, send: Send, name: str, session_key: str, target: Target) -> None:
        why = "It ended, or its page was left."
        try:
            near: PipeProtocol = scope["extensions"][PIPE]
            near.heard = Typing(partial(self._typed, target.row, session_key)).heard
            journey = Journey(
                way=self._upstreams.port(target.node, target.port),
                headers=[(b"host", b"terminal"), (b"authorization", target.authorization.encode("ascii"))],
                answer_headers=rules.from_upstream,
                hold=Hold(name, session_key, target),
                guard=self._guard,
            )
            if await forward_socket(journey, scope):
                why = "The right to it ended."
        except (HandshakeRefused, NoAnswer) as problem:
            why = "Its node did not answer."
            log.info("no way to the terminal %s on %s: %s", name, target.node.public_id, problem)
            sentence = "Its node does not answer at the moment."
            await self._say(send, scope, 502, "terminal_unreachable", "Not now", sentence)
        finally:
            await asyncio.shield(self._closed(name, why))

    async def _closed(self, name: str, why: str) -> None:
        try:
            await self._rights.in_thread(do_close_terminal, name, why)
        except (DatabaseError, OSError) as problem:
            log.warning("the end of the terminal %s is not in the record: %s", name, problem)

    def _typed(self, attempt_row: int, session_key: str, *, keeps: bool) -> None:
        self._lookout.typed(attempt_row)
        if keeps:
            asyncio.get_running_loop().create_task(self._keep(session_key))

    async def _keep(self, session_key: str) -> None:
        try:
            await self._rights.in_thread(keep_session_of_workspace, session_key)
        except (DatabaseError, OSError) as problem:
            log.warning("the session of somebody who types was not kept: %s", problem)


class Typing:
    """Hears by the kind of the messages that pass whether somebody types; their contents are not looked at."""

    def __init__(self, typed: Callable[..., None]) -> None:
        self._typed = typed
        self._edges = FrameEdges(self._began)
        self._kept_at = -KEPT_EVERY_S * 2.0

    def heard(self, data: bytes) -> None:
        """These bytes came from the browser."""
        self._edges.passed(data)

    def _began(self, kind: int) -> None:
        if kind == TYPED:
            keeps = monotonic() - self._kept_at >= KEPT_EVERY_S
            if keeps:
                self._kept_at = monotonic()
            self._typed(keeps=keeps)

"""API tokens: ``fw_<id>_<256 bit>_<crc>``, stored as SHA-256, with scopes, expiry and last use."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import re
import secrets
import zlib
from collections.abc import Collection

from django.db import transaction
from django.db.models import Q, QuerySet, TextChoices
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import require_user
from portal.errors import Conflict, Forbidden, InvalidRequest, Unauthenticated
from portal.live_events import publish_on_commit
from portal.models import ApiToken, User
from portal.models.public_id import new_public_id
from portal.selectors.lookup import get_first
from portal.services.audit import record_action

DEFAULT_DAYS = 90
MAX_DAYS = 365
MAX_LIVE_TOKENS = 50
LAST_USE_INTERVAL_S = 60
"""Minimum time between writes of ``last_used_at``, so that most reads cause no write."""

TOKEN_PATTERN = re.compile(r"fw_([a-z][a-z0-9]{9})_([0-9a-f]{64})_([0-9a-f]{8})")
"""The format of a token, also for secret scanners."""

INVALID_TOKEN_MESSAGE = "This token is not valid. Create a new one under your account's tokens."  # noqa: S105


class Scope(TextChoices):
    """What a token may do, always within its owner's present rights."""

    READ = "read", "Read everything that its owner may see, including logs."
    JOBS = "jobs", "Submit and control jobs, except workspaces."
    WORKSPACES = "workspaces", "Submit, open and control workspaces."
    SSH = "ssh", "Open shells, commands and connections in running jobs and workspaces over SSH."
    SERVICES = "services", "Send requests to services."
    PROJECTS = "projects", "Create and change projects and their members."
    QUOTAS = "quotas", "Change quotas and undo changes."
    REQUESTS = "requests", "Make, withdraw and answer requests for quota, time and access."
    EXPERIMENTS = "experiments", "Log runs and register models through the MLflow API."
    METRICS = "metrics", "Read /metrics for Prometheus; the owner must be an administrator."
    TOKENS = "tokens", "Create and revoke tokens with a subset of its scopes."
    ADMIN = "admin", "Everything its owner may do."


def has_scope(token: ApiToken, scope: Scope) -> bool:
    """Return True if the token has this scope; ``admin`` includes all."""
    return scope.value in token.scopes or Scope.ADMIN.value in token.scopes


def do_create_token(
    owner: User,
    *,
    name: str,
    scopes: Collection[Scope],
    days: int = DEFAULT_DAYS,
    by: ApiToken | None = None,
) -> tuple[ApiToken, str]:
    """Create a token; return its row and its text, which is shown once and not stored.

    ``by`` is the token of the request: the new token cannot exceed its scopes or its expiry.
    """
    require_user(owner)
    _validate(name, scopes, days)
    expires_at = timezone.now() + dt.timedelta(days=days)
    if by is not None:
        _require_within(by, scopes, "make")
        expires_at = min(expires_at, by.expires_at)
    secret = secrets.token_hex(32)
    with transaction.atomic():
        User.objects.select_for_update().get(pk=owner.pk)
        if live_tokens(owner).count() >= MAX_LIVE_TOKENS:
            message = _("You already have {max_live_tokens} tokens; revoke one first.").format(
                max_live_tokens=MAX_LIVE_TOKENS
            )
            raise Conflict(message, code="too_many_tokens")
        token = ApiToken.objects.create(
            public_id=new_public_id(),
            owner=owner,
            name=name,
            secret_sha256=_hash(secret),
            scopes=sorted({scope.value for scope in scopes}),
            expires_at=expires_at,
        )
        after = {"name": name, "scopes": token.scopes, "expires_at": expires_at.isoformat()}
        record_action(owner, "token.create", token, after=after)
    return token, token_text(token.public_id, secret)


def do_revoke_token(actor: User, public_id: str, *, by: ApiToken | None = None) -> None:
    """Revoke one of the user's own tokens. Repeatable.

    ``by`` is the token of the request: it cannot revoke a token with a scope that it lacks.
    """
    with transaction.atomic():
        rows = ApiToken.objects.select_for_update().filter(owner=actor, public_id=public_id)
        token = get_first(rows, _("There is no such token."))
        if by is not None:
            _require_within(by, [Scope(word) for word in token.scopes], "revoke")
        if token.revoked_at is None:
            token.revoked_at = timezone.now()
            token.save(update_fields=["revoked_at"])
            record_action(actor, "token.revoke", token, before={"name": token.name, "scopes": token.scopes})
            publish_on_commit(f"user.{actor.public_id}", {"kind": "rights"})


def visible_tokens(owner: User, by: ApiToken | None) -> QuerySet[ApiToken]:
    """Return the user's tokens, including revoked ones; for a request by token, those within its scopes."""
    rows = ApiToken.objects.filter(owner=owner)
    return rows if by is None or has_scope(by, Scope.ADMIN) else rows.filter(scopes__contained_by=by.scopes)


def live_tokens(owner: User) -> QuerySet[ApiToken]:
    return ApiToken.objects.filter(owner=owner, revoked_at__isnull=True, expires_at__gt=timezone.now())


def get_token(text: str) -> ApiToken:
    """Return the live token with its owner, in one query. Raise Unauthenticated."""
    token = _find_token(text)
    if token.revoked_at is not None:
        raise Unauthenticated("This token has been revoked.", code="token_revoked")
    if token.expires_at <= timezone.now():
        raise Unauthenticated("This token has expired. Create a new one.", code="token_expired")
    if not token.owner.is_active:
        raise Unauthenticated("The account of this token is deactivated.", code="account_deactivated")
    _record_use(token)
    return token


def token_text(public_id: str, secret: str) -> str:
    """Return the token's text; the checksum detects typing errors without a database query."""
    head = f"fw_{public_id}_{secret}"
    return f"{head}_{zlib.crc32(head.encode()):08x}"


def _find_token(text: str) -> ApiToken:
    shaped = TOKEN_PATTERN.fullmatch(text)
    if shaped is None or token_text(shaped[1], shaped[2]) != text:
        raise Unauthenticated(INVALID_TOKEN_MESSAGE, code="invalid_token")
    token = ApiToken.objects.select_related("owner").filter(public_id=shaped[1]).first()
    known = token.secret_sha256 if token else "0" * 64
    if not hmac.compare_digest(known, _hash(shaped[2])) or token is None:
        raise Unauthenticated(INVALID_TOKEN_MESSAGE, code="invalid_token")
    return token


def _require_within(by: ApiToken, scopes: Collection[Scope], action: str) -> None:
    missing = sorted(scope.value for scope in scopes if not has_scope(by, scope))
    if missing:
        message = _("A token cannot {action} a token with scopes it lacks: {missing}.").format(
            action=action, missing=", ".join(missing)
        )
        raise Forbidden(message, code="scope_not_permitted", details={"scopes": missing})


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _record_use(token: ApiToken) -> None:
    now = timezone.now()
    before = now - dt.timedelta(seconds=LAST_USE_INTERVAL_S)
    if token.last_used_at is None or token.last_used_at <= before:
        unused = Q(last_used_at__isnull=True) | Q(last_used_at__lte=before)
        ApiToken.objects.filter(unused, pk=token.pk).update(last_used_at=now)


def _validate(name: str, scopes: Collection[Scope], days: int) -> None:
    wrong: dict[str, str] = {}
    if not name.strip() or len(name) > 100:
        wrong["name"] = _("Enter a name of up to 100 characters.")
    if not scopes:
        wrong["scopes"] = _("Select at least one scope.")
    if not 1 <= days <= MAX_DAYS:
        wrong["days"] = _("Must be between 1 and {max_days} days.").format(max_days=MAX_DAYS)
    if wrong:
        raise InvalidRequest(fields=wrong)

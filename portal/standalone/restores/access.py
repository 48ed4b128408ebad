"""What a restore changes for those who use the portal: tokens, sessions, links and secrets are as of the backup."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Model, Q
from django.utils import timezone

from portal.models import (
    ApiToken,
    BrowserSession,
    Invitation,
    MagicLink,
    NoticeWebhook,
    RegistryLogin,
    Secret,
)
from portal.services.accounts.tokens import Scope
from portal.services.encryption import readable_prefixes

_ENCRYPTED: tuple[tuple[type[Model], str], ...] = (
    (Secret, "encrypted_value"),
    (RegistryLogin, "encrypted_password"),
    (NoticeWebhook, "encrypted_url"),
)


def describe_access(made_at: str) -> list[str]:
    """Return sentences about what works after a restore of a backup of that time, and what does not."""
    now = timezone.now()
    tokens = ApiToken.objects.filter(revoked_at__isnull=True, expires_at__gt=now)
    metrics = tokens.filter(scopes__contains=[Scope.METRICS.value]).count()
    sessions = BrowserSession.objects.filter(expire_date__gt=now).count()
    links = sum(
        model.objects.filter(used_at__isnull=True, expires_at__gt=now).count()
        for model in (MagicLink, Invitation)
    )
    return [
        f"API tokens: {tokens.count()} of the backup work, {metrics} of them for /metrics, also those that were "
        f"revoked after {made_at}: revoke them again. Tokens created since then do not work.",
        f"Sessions: {sessions} of the backup continue, also those that users ended since then. Sessions begun since "
        "then have ended.",
        f"Links: {links} sign-in links and invitations were unused then and work once, even if they were used since.",
        "Passwords, roles, members and deactivated accounts are those of the backup: repeat what was changed since.",
        "Workspaces started since then cannot be opened. Secrets saved since then are lost.",
        *_unreadable_secrets(),
    ]


def _unreadable_secrets() -> Iterable[str]:
    readable = Q()
    count = total = 0
    for model, field in _ENCRYPTED:
        readable = Q()
        for prefix in readable_prefixes():
            readable |= Q(**{f"{field}__startswith": prefix})
        rows = model._default_manager.exclude(**{field: ""})
        total += rows.count()
        count += rows.exclude(readable).count()
    if count:
        yield (
            f"Secrets: {count} of {total} stored secrets cannot be read with this secret key. Set the "
            "FAIRWAY_SECRET_KEY of the installation that was backed up, or save them again."
        )

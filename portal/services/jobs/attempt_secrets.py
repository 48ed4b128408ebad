"""The secret of an attempt, which its tool and the gateway share."""

from __future__ import annotations

import secrets

from portal.models import Attempt, Job
from portal.services.encryption import EncryptionContext, decrypt, encrypt


def _encryption_context(job: Job, number: int) -> EncryptionContext:
    return EncryptionContext("portal_attempt", f"{job.public_id}/{number}", "secret")


REPLACEABLE_PREFIX = "r-"
"""Marks the secret of an attempt that starts with the files with which its tool reads the secret again."""


def create_attempt_secret(job: Job) -> str:
    """Return an encrypted random secret for the next attempt (``Attempt.secret``)."""
    secret = REPLACEABLE_PREFIX + secrets.token_urlsafe(32)
    return encrypt_attempt_secret(job, job.attempt_count + 1, secret)


def encrypt_attempt_secret(job: Job, number: int, secret: str) -> str:
    return encrypt(secret, _encryption_context(job, number))


def decrypt_attempt_secret(attempt: Attempt) -> str:
    """Return the attempt's secret, only for its node's secret file and for the gateway."""
    return decrypt(attempt.secret, _encryption_context(attempt.job, attempt.number))

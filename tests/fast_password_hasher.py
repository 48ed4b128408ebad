"""The portal's password hash at the least cost it takes."""

from __future__ import annotations

from django.contrib.auth.hashers import Argon2PasswordHasher


class FastArgon2Hasher(Argon2PasswordHasher):
    """For tests that only need a person who can sign in; processes of their own hash at the full cost."""

    time_cost, memory_cost, parallelism = 1, 8, 1

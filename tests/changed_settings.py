"""The settings that differ in the process of the tests; docs/reliability.md lists them with the other differences.

Processes that tests start have the settings of an installation.
"""

from __future__ import annotations

import os

from django.conf import settings

CHANGED = frozenset({"CHANNEL_LAYERS", "DATABASES", "PASSWORD_HASHERS", "WHITENOISE_AUTOREFRESH"})
CHANGED_BY_DJANGO = frozenset({"ALLOWED_HOSTS", "EMAIL_BACKEND"})
"""By ``django.test.utils.setup_test_environment``."""


def change_settings() -> None:
    """Change the settings of this process."""
    # Tests are transactions; on a busy machine one may wait longer for a processor than a service is allowed to.
    settings.DATABASES["default"]["OPTIONS"]["options"] += " -c idle_in_transaction_session_timeout=0"
    # Each test client builds the middleware anew; with this it does not search all static files each time.
    settings.WHITENOISE_AUTOREFRESH = True
    settings.PASSWORD_HASHERS = ["tests.fast_password_hasher.FastArgon2Hasher", *settings.PASSWORD_HASHERS]
    # Test processes beside this one use the same Valkey; each has groups of its own.
    settings.CHANNEL_LAYERS["default"]["CONFIG"]["prefix"] = f"fairway-{os.getpid()}"

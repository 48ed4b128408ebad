"""Jupyter Server answers only requests with the secret of the attempt, which Fairway's gateway adds.

With ``IdentityProvider.token`` Jupyter prints the secret into its pages and gives browsers a login cookie that is
valid without the gateway. Here it is compared with a file, and nothing derived from it leaves the server. The file
is read again when it changes, so that the secret can be replaced while the server runs.
"""

import hmac
import os
import time
from pathlib import Path

from jupyter_server.auth import IdentityProvider, User
from traitlets import Unicode

GRACE_S = 5.0
"""How long the replaced secret is accepted: the gateway learns of the new one a moment later."""


class GatewayIdentityProvider(IdentityProvider):
    """One user, the owner of the workspace; no login page, no cookies and no token in URLs."""

    token = Unicode("")  # pages, files and logs contain this one
    auth_enabled = True
    login_available = False
    logout_available = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        folder = Path(os.environ.get("FAIRWAY_SECRETS", "/run/fairway"))
        self._path = Path(os.environ.get("JUPYTER_TOKEN_FILE", folder / "token"))
        self._version = None
        self._secret = self._replaced = b""
        self._replaced_until_s = 0.0
        self._user = User(os.environ.get("USER") or "owner")
        self.updatable_fields = []

    def get_user(self, handler):
        return self._user if self.is_token_authenticated(handler) else None

    def is_token_authenticated(self, handler):
        kind, _, given = handler.request.headers.get("Authorization", "").partition(" ")
        return kind.lower() in ("token", "bearer") and self._is_secret(given.strip().encode())

    def get_user_cookie(self, handler):
        return None

    def set_login_cookie(self, handler, user):
        pass

    def _is_secret(self, given):
        self._read()
        accepted = [self._secret, self._replaced if time.time() < self._replaced_until_s else b""]
        return any(each and hmac.compare_digest(given, each) for each in accepted)

    def _read(self):
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns)
            if version == self._version:
                return
            secret = self._path.read_bytes().strip()
        except OSError:
            return  # without the file nobody can use the server
        if self._version is not None:
            self._replaced, self._replaced_until_s = self._secret, status.st_mtime + GRACE_S
        self._version, self._secret = version, secret


c = get_config()  # noqa: F821
c.ServerApp.identity_provider_class = GatewayIdentityProvider

"""A client of the portal behind its reverse proxy: TLS, cookies and forms, with the standard library only."""

from __future__ import annotations

import html
import http.client
import http.cookies
import json
import re
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

LIMIT_S = 30


@dataclass
class Response:
    status: int
    text: str
    location: str
    headers: dict[str, str]


class _FrontConnection(http.client.HTTPSConnection):
    """TLS to a port of this machine under the name that the reverse proxy serves."""

    def __init__(self, name: str, port: int, certificate: Path) -> None:
        self._tls = ssl.create_default_context(cafile=str(certificate))
        super().__init__(name, timeout=LIMIT_S, context=self._tls)
        self._at = port

    def connect(self) -> None:
        plain = socket.create_connection(("127.0.0.1", self._at), timeout=LIMIT_S)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)


@dataclass
class PortalClient:
    """A browser of one user, as far as forms and cookies go."""

    name: str
    port: int
    certificate: Path
    cookies: dict[str, str] = field(default_factory=dict)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Response:
        """Send one request; redirects are not followed."""
        connection = _FrontConnection(self.name, self.port, self.certificate)
        sent = {"Referer": f"https://{self.name}/", **headers}
        if self.cookies:
            sent["Cookie"] = "; ".join(f"{key}={value}" for key, value in self.cookies.items())
        try:
            connection.request(method, path, body=body, headers=sent)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            for line in answer.headers.get_all("Set-Cookie", []):
                for key, morsel in http.cookies.SimpleCookie(line).items():
                    self.cookies[key] = morsel.value
            return Response(answer.status, text, answer.getheader("Location", ""), dict(answer.getheaders()))
        finally:
            connection.close()

    def get_page(self, path: str) -> str:
        """Return a page; raise if it does not exist."""
        answer = self.request("GET", path)
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{path}: {answer.status} {answer.location} {answer.text[:300]}")
        return answer.text

    def submit_form(self, path: str, form: dict[str, str], *, first: str = "") -> Response:
        """Send a form of the page ``first`` (or ``path``)."""
        body = urlencode({"csrfmiddlewaretoken": self._csrf_token(first or path), **form}).encode()
        return self.request("POST", path, body, **{"Content-Type": "application/x-www-form-urlencoded"})

    def rest(self, method: str, path: str, body: Any = None) -> Any:
        """Call REST with the session's cookies; raise for an error status."""
        headers = {"Content-Type": "application/json"}
        sent = None if body is None else json.dumps(body).encode()
        if method != "GET":
            headers["X-CSRFToken"] = self._csrf_token("/account/")
        answer = self.request(method, f"/api/v1/{path}", sent, **headers)
        if not http.HTTPStatus.OK <= answer.status < http.HTTPStatus.MULTIPLE_CHOICES:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.text[:500]}")
        return json.loads(answer.text) if answer.text else None

    def _csrf_token(self, path: str) -> str:
        """Return the CSRF token of a page's forms."""
        return form_field(self.get_page(path), "csrfmiddlewaretoken")


def form_field(text: str, name: str) -> str:
    """Return the value of a hidden field, or the text of a text area by its id."""
    found = re.search(rf'name="{name}" value="([^"]*)"', text) or re.search(
        rf'<textarea[^>]* id="{name}"[^>]*>(.*?)</textarea>', text, re.DOTALL
    )
    if found is None:
        raise RuntimeError(f"The page has no field {name}.")
    return html.unescape(found[1])

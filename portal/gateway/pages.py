"""The few small pages the gateway answers by itself, as HTML or, when asked, as problem+json."""

from __future__ import annotations

import json
from html import escape

from portal.gateway.headers import HSTS
from portal.gateway.wire import Headers, Send

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title} · Fairway</title><style>
:root{{color-scheme:light dark}}
body{{font:16px/1.5 system-ui,sans-serif;margin:18vh auto 0;max-width:34rem;padding:0 1.25rem}}
h1{{font-size:1.35rem;margin:0 0 .5rem}}p{{margin:.25rem 0 1.25rem}}
a{{color:#fff;background:#1d6b45;border-radius:6px;padding:.5rem .9rem;text-decoration:none}}
</style></head><body><main><h1>{title}</h1><p>{sentence}</p>{link}</main></body></html>
"""
_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)


def wants_json(headers: Headers) -> bool:
    """True when the client asks for JSON and not for a page."""
    accept = next((value.lower() for name, value in headers if name == b"accept"), b"")
    return b"json" in accept and b"text/html" not in accept


def page(
    status: int,
    code: str,
    title: str,
    sentence: str,
    *,
    json_wanted: bool = False,
    link: tuple[str, str] | None = None,
    retry_after_s: int | None = None,
    secure: bool = False,
) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an answer of the gateway's own. ``link`` is (address, words)."""
    if json_wanted:
        kind = b"application/problem+json"
        problem = {"type": "about:blank", "title": title, "status": status, "code": code, "detail": sentence}
        body = json.dumps(problem).encode()
    else:
        kind = b"text/html; charset=utf-8"
        button = f'<a href="{escape(link[0])}">{escape(link[1])}</a>' if link else ""
        body = _PAGE.format(title=escape(title), sentence=escape(sentence), link=button).encode()
    headers: Headers = [
        (b"content-type", kind),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"content-security-policy", _POLICY),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-frame-options", b"DENY"),
    ]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    if secure:
        headers.append(HSTS)
    return status, headers, body


async def answer(send: Send, reply: tuple[int, Headers, bytes], *, websocket: bool = False) -> None:
    """Sends an answer of the gateway's own; to a WebSocket it refuses the handshake with the same."""
    status, headers, body = reply
    kind = "websocket.http.response" if websocket else "http.response"
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})

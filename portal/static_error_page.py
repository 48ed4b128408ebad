"""An error page without database, template or style sheet, for when one of them is unavailable."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape

from django.http import HttpRequest
from django.utils.translation import get_language, get_language_from_request, override
from django.utils.translation import gettext as _

MEDIA_TYPE = "text/html; charset=utf-8"
PERMISSIONS_POLICY = ", ".join(
    f"{name}=()"
    for name in (
        "accelerometer",
        "camera",
        "display-capture",
        "geolocation",
        "gyroscope",
        "hid",
        "magnetometer",
        "microphone",
        "midi",
        "payment",
        "serial",
        "usb",
    )
)
"""Browser features that no page of the portal uses (Permissions-Policy)."""

_STYLE = """
:root{color-scheme:light dark;--paper:#f6f7f6;--surface:#fff;--line:#e1e5e2;--ink:#18211c;--ink-2:#4c5751;
--accent:#0b6645;--on:#fff;--edge:#8a5300}
@media(prefers-color-scheme:dark){:root{--paper:#0e1210;--surface:#151a17;--line:#28302c;--ink:#e6ebe8;
--ink-2:#a9b4ae;--accent:#3dbd87;--on:#06150e;--edge:#eeb04a}}
*{box-sizing:border-box;margin:0}
body{font:400 14px/20px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;color:var(--ink);
background:var(--paper);padding:24px 16px}
main{max-width:480px;margin:14vh auto 0}
.brand{display:flex;align-items:center;gap:10px;font-weight:600;font-size:16px;letter-spacing:-.015em}
.brand svg{width:22px;height:22px}
section{margin-top:16px;padding:20px;background:var(--surface);border:1px solid var(--line);border-radius:8px;
display:grid;grid-template-columns:20px minmax(0,1fr);gap:0 10px}
section>svg{width:16px;height:16px;margin-top:6px;color:var(--ink-2);fill:none;stroke:currentColor;stroke-width:1.5;
stroke-linecap:round;stroke-linejoin:round}
section.wait>svg{color:var(--edge)}
h1{font:600 20px/28px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;letter-spacing:-.012em}
section p{margin-top:6px;color:var(--ink-2)}
a{display:inline-block;margin-top:16px;padding:7px 14px;border-radius:5px;color:var(--on);background:var(--accent);
font-weight:500;text-decoration:none}
a:focus-visible{outline:2px solid var(--accent);outline-offset:2px}"""
_STYLE_HASH = f"'sha256-{b64encode(sha256(_STYLE.encode()).digest()).decode()}'"

CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_STYLE_HASH}; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The only style sheet is inline and allowed by its hash."""

_PAGE = """<!doctype html>
<html lang="{language}"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title} · Fairway</title><style>{style}</style></head>
<body><main><p class="brand">{mark}Fairway</p>
<section{wait}>{sign}<div><h1>{title}</h1><p>{message}</p>{link}</div></section></main></body></html>
"""
_LOGO_SVG = (
    '<svg viewBox="0 0 22 22" aria-hidden="true"><rect width="22" height="22" rx="5" fill="var(--accent)"/>'
    '<path d="M7.500 17.500V5l8 3.200-8 3.300" fill="none" stroke="var(--on)" stroke-width="1.900"/></svg>'
)
_WARNING_SVG = (
    '<svg viewBox="0 0 16 16" aria-hidden="true"><path d="M8 2.2 14.3 13.4H1.7z"/>'
    '<path d="M8 6.6v3M8 11.4v.1"/></svg>'
)


def static_error_page(
    title: str,
    message: str,
    *,
    link: tuple[str, str] | None = None,
    is_temporary: bool = False,
    accept_language: str | None = None,
    values: Mapping[str, str] | None = None,
) -> str:
    """Return the HTML. ``link`` is (address, label); an empty address reloads this page.

    ``is_temporary`` marks an error that is expected to pass. ``accept_language`` is the browser's header of that
    name; None: the texts are in the present language. ``values`` fill the placeholders of the message.
    """
    language = (get_language() or "en") if accept_language is None else _browser_language(accept_language)
    with override(language):
        return _PAGE.format(
            language=language,
            title=escape(_(title)),
            message=escape(_(message).format(**values) if values else _(message)),
            link=f'<a href="{escape(link[0])}">{escape(_(link[1]))}</a>' if link else "",
            wait=' class="wait"' if is_temporary else "",
            style=_STYLE,
            mark=_LOGO_SVG,
            sign=_WARNING_SVG,
        )


def _browser_language(accept_language: str) -> str:
    request = HttpRequest()
    request.META["HTTP_ACCEPT_LANGUAGE"] = accept_language
    return get_language_from_request(request)

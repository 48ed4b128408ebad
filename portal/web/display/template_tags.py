"""Template tags of the pages, builtin in every template: icons, states, GPU squares, times and amounts."""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from django import template
from django.conf import settings
from django.contrib.staticfiles import finders
from django.contrib.staticfiles.storage import staticfiles_storage
from django.forms import BoundField
from django.template import Context
from django.template.base import Parser, Token
from django.template.defaulttags import URLNode
from django.template.defaulttags import url as do_url
from django.templatetags.i18n import BlockTranslateNode, TranslateNode, do_block_translate, do_translate
from django.utils import timezone
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString
from django.utils.translation import get_language, pgettext
from django.utils.translation import gettext as _

from portal.domain.jobs.exit_codes import describe_exit
from portal.domain.nodes.node_breaker import INCIDENT_TITLES, IncidentKind
from portal.selectors.cluster.cluster_map import HolderSpan
from portal.selectors.cluster.cluster_overview import GpuSquare
from portal.stored_texts import translate_stored
from portal.version import VERSION
from portal.web.display import formatting
from portal.web.display.job_rows import state_label, verdict_label
from portal.web.display.time_elements import (
    clock_element,
    clock_span_element,
    start_span_element,
    time_element,
)
from portal.web.display.urls import short_url
from portal.web.form_renderer import render_field

register = template.Library()

for _name in (
    "duration",
    "memory",
    "byte_size",
    "energy",
    "money",
    "gpus",
    "gpu_amount",
    "gpu_hours_amount",
    "gpu_time",
    "gpu_hours",
    "gpu_hours_amount",
    "in_unit",
    "signed_percent",
    "short_gpu_model",
    "cores",
    "spaced",
    "step_time",
    "plural",
    "topology_constraint_text",
    "amount",
    "rate",
    "layout_text",
    "gb",
    "milliseconds",
    "shell_words",
    "short_digest",
    "metric_value",
):
    register.filter(_name, getattr(formatting, _name))


register.filter("translated", translate_stored)


@register.filter
def translated_as(text: str, context: str) -> str:
    """Return a code, such as an option of a setting, as a label in the language of the page."""
    return pgettext(context, text) if text else ""


class LiteralTranslateNode(TranslateNode):
    """A translated text without variables: looked up once for each language, since tables repeat it in each row."""

    def __init__(self, node: TranslateNode) -> None:
        super().__init__(node.filter_expression, node.noop)
        self._texts: dict[str | None, str] = {}

    def render(self, context: Context) -> str:
        language = get_language()
        if language not in self._texts:
            self._texts[language] = super().render(context)
        return self._texts[language]


@register.tag("translate")
def translate(parser: Parser, token: Token) -> TranslateNode:
    """Compile Django's tag of this name."""
    node: TranslateNode = do_translate(parser, token)
    expression = node.filter_expression
    is_literal = isinstance(getattr(expression.var, "literal", None), str) and not expression.filters
    if is_literal and not (node.noop or node.asvar or node.message_context):
        return LiteralTranslateNode(node)
    return node


class ParsedBlockTranslateNode(BlockTranslateNode):
    """A translated text with variables: put together once, since tables repeat it in each row."""

    def __init__(self, node: BlockTranslateNode) -> None:
        self.__dict__.update(node.__dict__)
        self._parsed: dict[int, tuple[str, list[str]]] = {}

    def render_token_list(self, tokens: list[Token]) -> tuple[str, list[str]]:
        if id(tokens) not in self._parsed:
            self._parsed[id(tokens)] = super().render_token_list(tokens)
        text, names = self._parsed[id(tokens)]
        return text, list(names)  # Django adds the variables of the plural


@register.tag("blocktranslate")
def blocktranslate(parser: Parser, token: Token) -> ParsedBlockTranslateNode:
    """Compile Django's tag of this name."""
    return ParsedBlockTranslateNode(do_block_translate(parser, token))


class ShortUrlNode(URLNode):
    """The URL of a view with a public id: tables repeat it in each row, and Django resolves each anew."""

    def __init__(self, node: URLNode) -> None:
        super().__init__(node.view_name, node.args, node.kwargs, node.asvar)

    def render(self, context: Context) -> str:
        argument = self.args[0].resolve(context)
        if isinstance(argument, str) and argument.isascii() and argument.isalnum():
            return short_url(self.view_name.resolve(context), argument)
        return super().render(context)


@register.tag("url")
def url(parser: Parser, token: Token) -> URLNode:
    """Compile Django's tag of this name."""
    node = do_url(parser, token)
    is_short = len(node.args) == 1 and not (node.kwargs or node.asvar)
    return ShortUrlNode(node) if is_short else node


@lru_cache(maxsize=64)
def _asset_url(name: str) -> str:
    found = finders.find(name)
    version = hashlib.sha256(Path(str(found)).read_bytes()).hexdigest()[:10] if found else "0"
    return f"{staticfiles_storage.url(name)}?v={version}"


@register.simple_tag
def asset(name: str) -> str:
    """Return the URL of a built file, with its content hash in the query so that browsers may cache it."""
    if settings.DEBUG:
        _asset_url.cache_clear()
    return _asset_url(name)


@register.simple_tag
def version() -> str:
    return VERSION


@register.simple_tag
def icon(name: str) -> SafeString:
    """Render an icon of the sprite; it is decorative, the text beside it has the meaning."""
    return _icon(asset("icons.svg"), name)


@lru_cache(maxsize=256)
def _icon(sprite: str, name: str) -> SafeString:
    return format_html('<svg class="fw-icon" aria-hidden="true"><use href="{}#{}"/></svg>', sprite, name)


@register.simple_tag
def state(symbol: str, word: str, pill: bool = False) -> SafeString:
    """Render a state as colour, icon and label, always all three."""
    return _state(icon(f"s-{symbol}"), symbol, _(word), pill)


@lru_cache(maxsize=1024)
def _state(shape: SafeString, symbol: str, word: str, pill: bool) -> SafeString:
    return format_html(
        '<span class="fw-state{}" data-s="{}">{}{}</span>',
        " fw-state--pill" if pill else "",
        symbol,
        shape,
        word,
    )


@register.simple_tag
def form_field(field: BoundField, plain: bool = False) -> SafeString:
    """Render a field of a form with label, hint and error; ``plain`` leaves out that it is optional."""
    return render_field(field, plain=plain)


@register.simple_tag
def squares(gpus: Iterable[GpuSquare]) -> SafeString:
    """Render GPUs side by side as equal squares, in one string: a page may have thousands."""
    return SafeString("".join(map(_square, gpus)))


def _square(gpu: GpuSquare) -> str:
    formatting = [
        f'data-g="{gpu.shape}"' if gpu.utilisation_level is None else f'data-u="{gpu.utilisation_level}"'
    ]
    if gpu.uuid:
        formatting.append(f'data-gpu="{escape(gpu.uuid)}"')
    if gpu.grid_index is not None:
        formatting.append(f'data-at="{gpu.grid_index}"')
    if gpu.overlay:
        formatting.append(f'data-x="{gpu.overlay}"')
    if gpu.title:
        formatting.append(f'title="{escape(gpu.title)}"')
    return f'<i class="fw-gpu" {" ".join(formatting)}></i>'


@register.simple_tag
def gpu_owners(runs: Iterable[HolderSpan]) -> SafeString:
    """Render the holders below the squares of a node, as wide as the GPUs that they hold."""
    return SafeString("".join(map(_gpu_owner, runs)))


def _gpu_owner(run: HolderSpan) -> str:
    inside: str = escape(run.name)
    if run.job:
        inside = f'<a href="{short_url("job", run.job)}">{inside}</a>'
    return f'<span data-css="n:{run.count}">{inside}</span>'


def user_time_zone(context: Context) -> dt.tzinfo:
    return formatting.time_zone(getattr(context.get("user"), "timezone", ""))


def _time(context: Context, at: dt.datetime, text: str, habit: str = "") -> SafeString:
    return time_element(at, user_time_zone(context), text, habit)


@register.simple_tag(takes_context=True)
def ago(context: Context, at: dt.datetime | None) -> SafeString:
    """Render 3 min ago, updated by the page, with the exact time on hover."""
    if at is None:
        return SafeString(_("never"))
    seconds = (timezone.now() - at).total_seconds()
    text = _("just now") if seconds < 5 else _("{duration} ago").format(duration=formatting.duration(seconds))
    return _time(context, at, text, "data-ago")


@register.simple_tag(takes_context=True)
def since(context: Context, at: dt.datetime | None) -> SafeString:
    """Render the time since then: 7 h 22 min, updated by the page."""
    if at is None:
        return SafeString("–")
    return _time(context, at, formatting.duration((timezone.now() - at).total_seconds()), "data-since")


@register.simple_tag(takes_context=True)
def left(context: Context, at: dt.datetime | None) -> SafeString:
    """Render the time until then: 5 h 08 min left."""
    if at is None:
        return SafeString(_("no limit"))
    seconds = (at - timezone.now()).total_seconds()
    text = (
        _("{duration} left").format(duration=formatting.duration(seconds)) if seconds > 0 else _("time is up")
    )
    return _time(context, at, text, "data-left")


@register.simple_tag(takes_context=True)
def until(context: Context, at: dt.datetime) -> SafeString:
    """Render a time ahead: in about 20 min."""
    seconds = (at - timezone.now()).total_seconds()
    text = _("within a minute")
    if seconds >= 60:
        text = _("in about {duration}").format(duration=formatting.duration(seconds))
    return _time(context, at, text)


@register.simple_tag(takes_context=True)
def clock(context: Context, at: dt.datetime | None) -> SafeString:
    """Render the time of day in the reader's zone, with the day when it is not today."""
    if at is None:
        return SafeString("–")
    return clock_element(at, user_time_zone(context), timezone.now())


@register.simple_tag(takes_context=True)
def clock_span(context: Context, low: dt.datetime, high: dt.datetime) -> SafeString:
    """Render two times of day; a common day appears once."""
    return clock_span_element(low, high, user_time_zone(context), timezone.now())


@register.simple_tag(takes_context=True)
def start_span(context: Context, low: dt.datetime, high: dt.datetime) -> SafeString:
    """Render when a job is expected to start; times that have passed are not shown."""
    return start_span_element(low, high, user_time_zone(context), timezone.now())


@register.simple_tag(takes_context=True)
def local_times(context: Context, message: str) -> SafeString:
    """Render a message of the scheduler with its times, which are in UTC, in the reader's zone."""
    parts = _UTC_TIME.split(translate_stored(message))
    times = [clock(context, dt.datetime.strptime(f"{text}Z", "%Y-%m-%d %H:%M%z")) for text in parts[1::2]]
    texts = [escape(text) for text in parts[::2]]
    return SafeString("".join(text + at for text, at in zip(texts, [*times, ""], strict=True)))


_UTC_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d) UTC")


@register.simple_tag(takes_context=True)
def today(context: Context) -> str:
    """Return the date and time as Tuesday 12 May 2026, 13:52."""
    here = timezone.now().astimezone(user_time_zone(context))
    return formatting.format_date(here, _("l j F Y, H:i"))


@register.filter
def incident_label(code: str) -> str:
    return _(INCIDENT_TITLES[IncidentKind(code)])


register.filter("exit_code", describe_exit)
register.filter(verdict_label)
register.filter(state_label)


@register.filter
def initials(user: Any) -> str:
    """Return two letters for the avatar of a user."""
    parts = (user.full_name or user.username).replace("-", " ").split()
    return "".join(part[0] for part in parts[:2]).upper() or "?"


@register.simple_tag(takes_context=True)
def query(context: Context, **changes: Any) -> str:
    """Return the page's query with some keys changed; an empty value removes its key. Pagination restarts."""
    params = context["request"].GET.copy()
    for key in ("after", "before"):
        params.pop(key, None)
    for key, value in changes.items():
        params.pop(key, None)
        if value not in ("", None):
            params[key] = value
    return f"?{params.urlencode()}" if params else "?"


@register.simple_tag(takes_context=True)
def page_query(context: Context, number: int, key: str = "") -> str:
    """Return the page's query for this page of a list; ``key`` tells lists of one page apart."""
    return query(context, **{key or "page": number})


@register.filter
def css(value: Any) -> str:
    """Format a number for ``data-css``: decimal point, no exponent."""
    return f"{float(value):.4f}".rstrip("0").rstrip(".")

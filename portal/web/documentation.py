"""Help: the pages of ``docs/`` in the portal, the section that explains each page, and a search over all sections."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.safestring import SafeString
from markdown_it import MarkdownIt
from markdown_it.token import Token

from portal.access import AccessPolicy
from portal.models import User
from portal.web.views import page

PAGES = (
    *(
        "jobs",
        "time",
        "notices",
        "checkpoints",
        "training",
        "pipeline-plans",
        "sweeps",
        "schedules",
        "experiments",
    ),
    *("services", "templates", "scheduling", "policy", "nodes", "operations", "reliability", "api", "cli"),
    "requests",
    "coming-from",
    "glossary",
)
"""Documents for users and administrators, in the order of the contents."""
MAX_RESULTS = 6
_HEADINGS = {"h1", "h2", "h3"}
_LINK = re.compile(r"^([a-z-]+)\.md(#.*)?$")
_NOT_IN_ANCHOR = re.compile(r"[^\w\- ]")


@dataclass(frozen=True)
class Section:
    """A heading of a document, the words below it up to the next heading, and its first paragraph."""

    document: str
    anchor: str
    title: str
    words: str
    summary: str

    @property
    def url(self) -> str:
        return f"{reverse('help-page', args=[self.document])}#{self.anchor}"


@dataclass(frozen=True)
class Document:
    name: str
    title: str
    html: SafeString
    sections: tuple[Section, ...]


@page(AccessPolicy.SIGNED_IN)
def help_contents(request: HttpRequest, user: User) -> HttpResponse:
    return render(request, "help/contents.html", {"documents": _documents().values()})


@page(AccessPolicy.SIGNED_IN)
def help_page(request: HttpRequest, user: User, name: str) -> HttpResponse:
    document = _documents().get(name)
    if document is None:
        raise Http404("There is no such help page.")
    return render(request, "help/page.html", {"document": document, "documents": _documents().values()})


@page(AccessPolicy.SIGNED_IN)
def help_section(request: HttpRequest, user: User, name: str) -> JsonResponse:
    """Return title, summary and address of a section, for the dialog of the key ``?``."""
    found = find_section(name, request.GET.get("section", ""))
    if found is None:
        raise Http404("There is no such section.")
    return JsonResponse({"title": found.title, "summary": found.summary, "url": found.url})


def find_section(name: str, anchor: str = "") -> Section | None:
    """Return a section by document and anchor, the first one without an anchor; None if there is none."""
    document = _documents().get(name)
    sections = document.sections if document else ()
    return next((each for each in sections if not anchor or each.anchor == anchor), None)


def search_help(text: str) -> list[Section]:
    """Return sections with words that begin with these, those with the words in their title first."""
    words = [f" {word}" for word in _words(text).split()]
    sections = [section for document in _documents().values() for section in document.sections]
    titled = [each for each in sections if all(word in _words(each.title) for word in words)]
    others = [each for each in sections if each not in titled and all(word in each.words for word in words)]
    return (titled + others)[:MAX_RESULTS]


def _words(text: str) -> str:
    """Return the words in lower case, each after a space."""
    return " " + " ".join(re.findall(r"\w+", text.lower()))


@cache
def _documents() -> dict[str, Document]:
    """Read and render all documents once in each process."""
    return {name: _read(name) for name in PAGES}


def _read(name: str) -> Document:
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(Path(settings.BASE_DIR, "docs", f"{name}.md").read_text())
    sections: list[Section] = []
    title = anchor = ""
    body: list[str] = []

    def finish() -> None:
        if title:
            summary = next((text for text in body if text), "")
            sections.append(Section(name, anchor, title, _words(" ".join((title, *body))), summary))

    for index, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag in _HEADINGS:
            finish()
            title, body = _plain(tokens[index + 1]), []
            anchor = _NOT_IN_ANCHOR.sub("", title.lower()).replace(" ", "-")
            token.attrSet("id", anchor)
        elif token.type == "inline" and (index == 0 or tokens[index - 1].type != "heading_open"):
            body.append(_plain(token))
        elif token.type in ("fence", "code_block"):
            body.append("")
        for child in token.children or ():
            if child.type == "link_open":
                child.attrSet("href", _address(str(child.attrGet("href"))))
    finish()
    html = markdown.renderer.render(tokens, markdown.options, {})  # HTML in it is text
    # Code may scroll sideways, so the keyboard must reach it; a corner without a word is no header.
    html = html.replace("<pre>", '<pre tabindex="0">').replace("<th></th>", "<td></td>")
    return Document(name, sections[0].title, SafeString(html), tuple(sections))


def _plain(token: Token) -> str:
    """Return the text of an inline token without its markup."""
    return "".join(
        " " if child.type in ("softbreak", "hardbreak") else child.content for child in token.children or ()
    )


def _address(link: str) -> str:
    """Return the address in the portal of a link between documents; other links stay."""
    found = _LINK.match(link)
    if found is None or found[1] not in PAGES:
        return link
    return f"{reverse('help-page', args=[found[1]])}{found[2] or ''}"

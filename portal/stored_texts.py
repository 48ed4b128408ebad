"""Translates texts that rows keep in English: a text is recognized by the template that it was written with."""

from __future__ import annotations

import datetime as dt
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from django.utils import dateformat
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from portal.catalogues import stored_translations

MAX_STEPS = 300
"""Parts of a text that are looked up at most; a verdict has about 20."""
MIN_WEIGHT = 12
"""Templates with more characters recognize a text although some of its values stay English."""
MAX_NAME_WORDS = 3
"""A name of more words counts as recognized only if no template has one of them."""
MAX_DEPTH = 10
"""Texts within texts; a verdict has 4."""
MAX_STATEMENTS = 12
"""Sentences of a text that are translated; the rest stays as it is. Texts have at most 1000 characters."""
_STATEMENT_END = re.compile(r"(?<=[.!?]) (?=\S)")
_LISTS = (" + ", "; ", ", ")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_VERBATIM = re.compile(r"(name|names|title|reason)\d*$")
_LABEL = re.compile(r"(label|text)\d*$")
_WORD = re.compile(r"[A-Za-z][\w-]+")
_DATE = re.compile(r"(\d\d [A-Z][a-z]{2} \d\d:\d\d)( UTC)?")
"""A date as notices have it; others are numbers."""


def translate_stored(text: str) -> str:
    """Return a stored text in the language of the page; what no template recognizes stays as it is."""
    language = get_language() or "en"
    return text if language.startswith("en") or not text else _translate(language, text)


class Rendering(NamedTuple):
    """A translation; ``complete`` unless words in it stayed English. ``weight`` is the text of its template."""

    text: str
    complete: bool
    weight: int = 0


class StoredTemplate(NamedTuple):
    """An English template in its parts: constants around each of its values."""

    constants: tuple[str, ...]
    names: tuple[str, ...]
    translation: str

    @property
    def weight(self) -> int:
        return sum(map(len, self.constants))

    def values(self, text: str) -> Sequence[str] | None:
        """Return the values with which the template gives the text, None if it does not.

        Values are never blank, and ``count`` is a number.
        """
        first, *inner = self.constants
        if not text.startswith(first):
            return None
        last = inner.pop()
        at, end, found = len(first), len(text) - len(last), []
        for constant in inner:
            stop = text.find(constant, at + 1, end)
            if stop < 0:
                return None
            found.append(text[at:stop])
            at = stop + len(constant)
        found.append(text[at:end])
        is_match = at < end and text.endswith(last)
        if is_match and "count" in self.names:
            is_match = found[self.names.index("count")].isdecimal()
        return found if is_match else None


class StoredTemplates:
    """The templates of a language, found by the first or the last word of a text."""

    def __init__(self, translations: Iterable[tuple[str, str]]) -> None:
        self._by_first_word: dict[str, list[StoredTemplate]] = defaultdict(list)
        self._by_last_word: dict[str, list[StoredTemplate]] = defaultdict(list)
        self._others: list[StoredTemplate] = []
        self._constants: dict[str, str] = {}
        self._english: set[str] = set()
        """Words of templates that no translation has: a value with one of them is not translated completely."""
        known: set[str] = set()
        for source, translation in sorted(translations, key=_weight, reverse=True):
            known.update(_WORD.findall(translation))
            self._english.update(_WORD.findall(_PLACEHOLDER.sub("", source)))
            parts = _PLACEHOLDER.split(source)
            if len(parts) == 1:
                self._constants[source] = translation
                continue
            template = StoredTemplate(tuple(parts[::2]), tuple(parts[1::2]), translation)
            first, last = template.constants[0], template.constants[-1]
            if " " in first:
                self._by_first_word[first.split(" ")[0]].append(template)
            elif " " in last:
                self._by_last_word[last.split(" ")[-1]].append(template)
            else:
                self._others.append(template)
        self._english -= known

    def constant(self, text: str) -> str | None:
        """Return the translation of a text without values, such as the title of a failure rule and a period."""
        for known in (text, text[:-1]) if text.endswith(".") else (text,):
            shown = self._constants.get(known) or _(known)
            if shown != known:
                return shown + text[len(known) :]
        return None

    def candidates(self, text: str) -> Iterator[StoredTemplate]:
        """Yield the templates that may give the text, those that begin as it does first, then by weight."""
        words = text.split(" ")
        for found in (self._by_first_word.get(words[0]), self._by_last_word.get(words[-1]), self._others):
            yield from found or ()

    def is_neutral(self, value: str) -> bool:
        """Return True for names, amounts and units, which are the same in each language."""
        return self._english.isdisjoint(_WORD.findall(value))


class StoredTranslation:
    """The translation of one text in at most ``MAX_STEPS`` steps: users choose names, and so the number of words."""

    def __init__(self, templates: StoredTemplates) -> None:
        self._templates = templates
        self._known: dict[str, Rendering | None] = {}
        """By text; of those that are being translated, None."""
        self._depth = 0

    def translate(self, text: str) -> Rendering:
        """Translate run by run: the longest run of sentences that some template gives completely, or the best."""
        *statements, rest = _STATEMENT_END.split(text, MAX_STATEMENTS)
        statements.append(rest)
        shown: list[Rendering] = []
        at = 0
        while at < len(statements):
            best, next_at = Rendering(statements[at], complete=False, weight=-1), at + 1
            for end in range(len(statements), at, -1):
                found = self._render(" ".join(statements[at:end]))
                if found is not None and (found.complete or found.weight > best.weight):
                    best, next_at = found, end
                    if found.complete:
                        break
            shown.append(best)
            at = next_at
        return Rendering(" ".join(each.text for each in shown), all(each.complete for each in shown))

    def _render(self, text: str) -> Rendering | None:
        """Return the first complete translation of a whole text, else the one by the heaviest template, else None."""
        if text not in self._known and len(self._known) < MAX_STEPS and self._depth < MAX_DEPTH:
            self._depth += 1
            self._known[text] = None
            self._known[text] = self._find(text)
            self._depth -= 1
        return self._known.get(text)

    def _find(self, text: str) -> Rendering | None:
        if constant := self._templates.constant(text):
            return Rendering(constant, complete=True)
        best: Rendering | None = None
        for template in self._templates.candidates(text):
            found = self._apply(template, text)
            if found and found.complete:
                return found
            if found and found.weight > (best.weight if best else MIN_WEIGHT):
                best = found
        return best or self._render_parts(text)

    def _apply(self, template: StoredTemplate, text: str) -> Rendering | None:
        values = template.values(text)
        if values is None:
            return None
        shown = list(map(self._render_value, template.names, values))
        named = {name: each.text for name, each in zip(template.names, shown, strict=True)}
        complete = all(each.complete for each in shown)
        return Rendering(template.translation.format_map(named), complete, template.weight)

    def _render_parts(self, text: str) -> Rendering | None:
        """Translate what follows a label and a colon, or what precedes the period of a title or a list."""
        label, colon, rest = text.partition(": ")
        if colon:
            before, found = self._render_value("label", label), self.translate(rest)
            if (before.text, found.text) != (label, rest):
                return Rendering(f"{before.text}: {found.text}", found.complete and before.complete)
        if text.endswith("."):
            found = self._render_value("label", text[:-1])
            return found._replace(text=f"{found.text}.") if found.text != text[:-1] else None
        return None

    def _render_value(self, name: str, value: str) -> Rendering:
        """Return a value, which may itself be a stored text or a list of some.

        ``name`` is its placeholder. Names, titles and reasons that users gave are shown as they are, and single
        words unless they are labels. ``label`` itself has a translation.
        """
        if _VERBATIM.search(name):
            return Rendering(value, value.count(" ") < MAX_NAME_WORDS or self._templates.is_neutral(value))
        if " " not in value and not _LABEL.search(name):
            return Rendering(value, complete=True)
        if date := _DATE.fullmatch(value):
            return Rendering(_format_date(date[1]) + (date[2] or ""), complete=True)
        found = self.translate(value)
        separator = next((each for each in _LISTS if each in value), "")
        if separator and not found.complete:
            parts = [self._render_value(name, each) for each in value.split(separator)]
            if found.text == value or all(each.complete for each in parts):
                joined = separator.join(each.text for each in parts)
                return Rendering(joined, all(each.complete for each in parts))
        complete = found.complete or (self._templates.is_neutral(value) and not name.startswith("label"))
        return found._replace(complete=complete)


def _format_date(text: str) -> str:
    """Return a date with the name of its month in the language of the page; what is none stays as it is."""
    try:
        at = dt.datetime.strptime(f"2000 {text}", "%Y %d %b %H:%M")  # dates have no year; 2000 has a 29 Feb
    except ValueError:
        return text
    return dateformat.format(at, _("j M H:i"))


@lru_cache(maxsize=10_000)
def _translate(language: str, text: str) -> str:
    return StoredTranslation(_templates(language)).translate(text).text


@cache
def _templates(language: str) -> StoredTemplates:
    return StoredTemplates(stored_translations(language))


def _weight(source_and_translation: tuple[str, str]) -> int:
    return len(_PLACEHOLDER.sub("", source_and_translation[0]))

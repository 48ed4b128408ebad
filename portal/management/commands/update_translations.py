"""`manage.py update_translations`: collects the texts of pages into the catalogue of each language."""

from __future__ import annotations

import ast
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import polib
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.template import Engine
from django.template.base import Template
from django.templatetags.i18n import BlockTranslateNode, TranslateNode

from portal.catalogues import STORED_CONTEXT
from portal.management.stored_templates import stored_templates
from portal.web.display.formatting import singular_and_plural
from portal.web.translations import labels_in_context, translated_labels

MARKERS = {
    "_": 1,
    "gettext": 1,
    "gettext_lazy": 1,
    "gettext_noop": 1,
    "ngettext": 2,
    "ngettext_lazy": 2,
    "pgettext": 2,
    "pgettext_lazy": 2,
}
"""Functions that translate, and how many of their arguments are texts."""
_IN_TAG = re.compile(r"""[\s=|:]_\((["'])(.*?)\1\)""")
_NOUN = re.compile(r'\|plural:"([^"]+)"')
_IN_SCRIPT = re.compile(r'\btranslated\(\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Message:
    """A text, its plural, and what tells it from an equal text with another meaning; both mostly blank."""

    text: str
    plural: str = ""
    context: str = ""


class Command(BaseCommand):
    help = "Collects the texts of pages into portal/locale; texts without translation stay English."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--check", action="store_true", help="Change nothing; fail if it would.")

    def handle(self, *args: Any, check: bool = False, **options: Any) -> None:
        messages = {
            "django": collect_messages(settings.BASE_DIR),
            "djangojs": set(script_messages(settings.BASE_DIR / "static" / "src")),
        }
        for folder in settings.LOCALE_PATHS:
            for source in sorted(Path(folder).glob("*/LC_MESSAGES/*.po")):
                changed = update_catalogue(source, messages[source.stem], write=not check)
                if check and changed:
                    raise CommandError(f"{source} is not up to date: run manage.py update_translations.")
                missing = len(polib.pofile(str(source)).untranslated_entries())
                count = len(messages[source.stem])
                self.stdout.write(f"{source.parts[-3]} {source.stem}: {count} texts, {missing} untranslated")


def update_catalogue(source: Path, messages: set[Message], *, write: bool) -> bool:
    """Make the entries of a catalogue those of the messages, in order; return whether it changed."""
    old = polib.pofile(str(source), wrapwidth=100)
    known = {(entry.msgid, entry.msgctxt or ""): entry for entry in old if not entry.obsolete}
    new = polib.POFile(wrapwidth=100)
    new.metadata = old.metadata
    for message in sorted(messages, key=lambda each: (each.text, each.plural, each.context)):
        entry = known.get((message.text, message.context))
        if entry is None or entry.msgid_plural != message.plural:
            translated: dict[str, Any] = {"msgctxt": message.context or None}
            translated |= {"msgstr_plural": {0: "", 1: ""}} if message.plural else {"msgstr": ""}
            entry = polib.POEntry(msgid=message.text, msgid_plural=message.plural, **translated)
        entry.flags = ["python-format"] if "%(" in message.text else []
        new.append(entry)
    changed = str(new) != str(old)
    if changed and write:
        new.save(str(source))
    return changed


def collect_messages(root: Path) -> set[Message]:
    """Return the texts of templates and Python modules, and the labels that are translated where shown."""
    pages = (root / "templates").rglob("*.html")
    modules = chain((root / "portal").rglob("*.py"), (root / "scheduler").rglob("*.py"))
    found = chain(
        chain.from_iterable(map(template_messages, pages)),
        chain.from_iterable(map(python_messages, modules)),
        map(Message, translated_labels()),
        (Message(text, context=context) for context, text in labels_in_context()),
    )
    return _without_singular_twins(found)


def script_messages(folder: Path) -> Iterator[Message]:
    """Return the literal arguments of ``translated("…")`` in scripts."""
    for path in folder.rglob("*.js"):
        for text in _IN_SCRIPT.findall(path.read_text()):
            yield Message(text.replace('\\"', '"'))


def _without_singular_twins(found: Iterator[Message]) -> set[Message]:
    """Drop texts that are also the singular of another message: a catalogue has each text once."""
    messages = {message for message in found if message.text}
    with_plural = {message.text for message in messages if message.plural}
    return {each for each in messages if each.plural or each.context or each.text not in with_plural}


def template_messages(path: Path) -> Iterator[Message]:
    """Return the texts of ``{% translate %}``, ``{% blocktranslate %}`` and ``_("…")``, as Django looks them up."""
    source = path.read_text()
    nodes: Any = Template(source, engine=Engine.get_default()).nodelist  # its nodes have no types
    for node in nodes.get_nodes_by_type(TranslateNode):
        text = node.filter_expression.var.literal
        if isinstance(text, str):
            context = node.message_context.var if node.message_context else ""
            yield Message(text.replace("%", "%%"), context=str(context))
    for node in nodes.get_nodes_by_type(BlockTranslateNode):
        plural = node.render_token_list(node.plural)[0] if node.plural else ""
        yield Message(node.render_token_list(node.singular)[0], plural)
    yield from map(_noun, _NOUN.findall(source))
    for _, text in _IN_TAG.findall(source):
        yield Message(text.replace("%", "%%"))


def _noun(names: str) -> Message:
    return Message(*singular_and_plural(names))


def python_messages(path: Path) -> Iterator[Message]:
    """Return the literal arguments of the functions that translate."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id == "plural" and isinstance(node.args[1], ast.Constant):
            yield _noun(str(node.args[1].value))
        if node.func.id == "stored_text":
            yield from (Message(each, context=STORED_CONTEXT) for each in stored_templates(node.args[0]))
        if node.func.id == "trigger_cycle" and isinstance(node.args[0], ast.Constant):
            yield Message(str(node.args[0].value), context="trigger")
        if node.func.id not in MARKERS:
            continue
        texts = [
            str(each.value) for each in node.args[: MARKERS[node.func.id]] if isinstance(each, ast.Constant)
        ]
        if len(texts) == MARKERS[node.func.id]:
            yield Message(texts[1], context=texts[0]) if "pgettext" in node.func.id else Message(*texts)

"""Reads the entrypoint of an experiment of Determined AI as a command and a launcher. Pure.

Its launchers and their arguments: https://docs.determined.ai/latest/model-dev-guide/dtrain/ ("Launching Distributed
Training Experiments").
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext as _

from portal.domain.jobs.parameters import PLACEHOLDER
from portal.errors import InvalidRequest

_TRIAL_CLASS = re.compile(r"[\w.]+:[A-Za-z_]\w*")
_LAUNCHER_LINE = re.compile(
    r"\s*(?P<before>(?:exec\s+|[A-Za-z_]\w*=[^\s$`\"'\\;&|]*\s+)*)"
    r"(?:\S*/)?python[\d.]*\s+-m\s+determined\.launch\.(?P<module>\w+)(?=\s|$)(?P<rest>.*)",
    re.DOTALL,
)
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_MODULE = re.compile(r"(?:^|\s)-m\s+(determined(?:\.\w+)*)")
_SHELL_CHARACTERS = re.compile(r"[$`|&;<>()*?\[\]~#!{}\"'\\\n]")
_SHELL_OPERATORS = re.compile(r"[|&;\n]")
_LAUNCHERS = {
    "torch_distributed": "torchrun",
    "deepspeed": "deepspeed",
    "horovod": "horovod",
    "tensorflow": "tensorflow",
}
_OPTIONS = {
    "torchrun": {
        "--nproc_per_node": "processes_per_task", "--nproc-per-node": "processes_per_task",
        "--max_restarts": "max_restarts", "--max-restarts": "max_restarts",
    },
}  # fmt: skip


@dataclass
class Entrypoint:
    """A command with the launcher that starts it, and what of the entrypoint is ignored or changed, by part."""

    command: list[str]
    launcher: str = "none"
    options: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)


def read_entrypoint(given: Any) -> Entrypoint:
    """Return the command of an entrypoint, a text for a shell or a list of words.

    Raise InvalidRequest with the field ``experiment``.
    """
    if isinstance(given, str) and given.strip():
        found = _read_line(given)
    elif isinstance(given, list) and given:
        found = _read_words(given)
    elif given is None or given in ("", []) or (isinstance(given, str) and not given.strip()):
        raise _wrong(_("It has no entrypoint; give a command or a list of words."))
    else:
        raise _wrong(_("entrypoint is neither a command nor a list of words."))
    if module := _MODULE.search(" ".join(found.command)):
        raise _wrong(
            _(
                "The entrypoint runs {module}, which belongs to Determined. Its launchers {launchers} are read where "
                "they begin the entrypoint, as in python3 -m determined.launch.torch_distributed python3 train.py."
            ).format(module=module[1], launchers=", ".join(sorted(_LAUNCHERS)))
        )
    # the words of a sweep's command are filled in; those of an entrypoint are not
    found.command = [PLACEHOLDER.sub(lambda match: f"{{{match[0]}}}", word) for word in found.command]
    return found


def _read_line(line: str) -> Entrypoint:
    line = line.replace("\\\n", " ").strip()
    _refuse_trial_class(line)
    match = _LAUNCHER_LINE.fullmatch(line)
    if match is None:
        return Entrypoint(["/bin/sh", "-c", line])
    rest = match["rest"].strip()
    overrides, separator, script = f" {rest} ".partition(" -- ")
    overrides, script = (overrides, script.strip()) if separator else ("", rest)
    try:
        words = shlex.split(overrides)
    except ValueError as error:
        raise _wrong(_("The quotation marks of the entrypoint do not match.")) from error
    before = match["before"]
    is_plain = not before and not _SHELL_CHARACTERS.search(script)
    command = script.split() if is_plain else ["/bin/sh", "-c", f"{before}{script}"] if script else []
    found = _launched(match["module"], words, command, is_trial=script.startswith("--trial"))
    if _SHELL_OPERATORS.search(script):
        found.changed["entrypoint"] = _("The whole line runs in each process of the launcher.")
    return found


def _read_words(words: list[Any]) -> Entrypoint:
    if not all(isinstance(word, str) for word in words):
        raise _wrong(_("entrypoint has a word that is not text; put it into quotes."))
    if len(words) == 1:
        _refuse_trial_class(words[0])
    is_launcher = len(words) > 2 and _PYTHON.fullmatch(words[0]) and words[1] == "-m"
    if not is_launcher or not words[2].startswith("determined.launch."):
        return Entrypoint(list(words))
    rest = words[3:]
    split = rest.index("--") if "--" in rest else -1
    script = rest[split + 1 :]
    is_trial = bool(script) and script[0].startswith("--trial")
    return _launched(
        words[2].removeprefix("determined.launch."), rest[: max(0, split)], script, is_trial=is_trial
    )


def _launched(module: str, overrides: list[str], command: list[str], *, is_trial: bool) -> Entrypoint:
    """Return the command below the counterpart of a launcher of Determined."""
    if is_trial:
        raise _wrong(
            _(
                "The entrypoint names a Trial class of Determined (--trial); give a script that trains instead."
            )
        )
    if module not in _LAUNCHERS:
        raise _wrong(
            _("The launcher {module} of Determined is not known; known are {known}.").format(
                module=module[:40], known=", ".join(sorted(_LAUNCHERS))
            )
        )
    if module == "tensorflow" and command[:1] == ["--port"]:  # its own option needs no "--"
        overrides, command = command[:2], command[2:]
    if not command or command[0].startswith("-"):
        raise _wrong(_("The entrypoint has no script for the launcher {module}.").format(module=module))
    found = Entrypoint(command, _LAUNCHERS[module])
    known = _OPTIONS.get(found.launcher, {})
    names = list(overrides)
    while names:
        name, sign, value = names.pop(0).partition("=")
        if not sign and names and not names[0].startswith("-"):
            value = names.pop(0)
        if name in known and re.fullmatch(r"[0-9]{1,3}", value):
            found.options[known[name]] = int(value)
        else:
            found.ignored[f"entrypoint {name}"[:80]] = _("The launcher {launcher} sets this itself.").format(
                launcher=found.launcher
            )
    return found


def _refuse_trial_class(entrypoint: str) -> None:
    if _TRIAL_CLASS.fullmatch(entrypoint):
        raise _wrong(
            _("The entrypoint {entrypoint} is a Trial class of Determined; give a command instead.").format(
                entrypoint=entrypoint
            )
        )


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(fields={"experiment": message})

"""Finds the Python exception with which a program ended in its log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LINES_AFTER = 20
"""Of other output after a traceback, such as what mpirun and Weights & Biases report at the end; after more, the
program caught the exception and continued."""
MAX_LINES_AFTER_WRAPPER = 80
"""The same where a launcher reports the end, which takes more lines."""
MAX_MESSAGE_LINES = 4
MAX_PREFIX_CHARACTERS = 80
_HEADING = "Traceback (most recent call last):"
_GROUP = "+ Exception Group "
_TYPE = r"[^\W\d]\w*(?:\.(?:\w+|<locals>))*"
_EXCEPTION = re.compile(rf"{_TYPE}(?::(?= |$).*)?$")
_NOTEBOOK = re.compile(rf"{_TYPE} {{2,}}Traceback \(most recent call last\)$")
"""The heading of IPython, after the type of the exception."""
_FILE = re.compile(r'  File "[^"]+", line \d+$')
_FRAME = re.compile(r'(.*?)  File "[^"]+", line \d+(?:, in .+)?$')
"""Before the source code of a frame, which is indented further."""
_WRAPPERS = re.compile(
    r"(\w+\.)*(ChildFailedError|CalledProcessError|ProcessExitedException|BrokenProcessPool|SignalException"
    r"|RayTaskError|TuneError|CellExecutionError|PapermillExecutionError)(:|$)"
    r"|.*\b[Ss]ee (the )?(root cause|error|stack ?trace|traceback|logs?|output)\b.* above"
)
"""Exceptions of launchers, which report that a process failed; its own exception is the cause."""
_LAUNCHER_REPORT = re.compile(
    r"Primary job +terminated|mpirun |prterun |srun: error|\[launch\.py:\d+:sigkill_handler\]"
)
"""What launchers that are not Python programs write after the exceptions of several processes."""
_CONSEQUENCES = re.compile(
    r"(\w+\.)*("
    r"Exception|BaseException|RuntimeError|SystemError|OSError|IOError|EOFError|ImportError|MemoryError"
    r"|InterruptedError|ChildProcessError|KeyboardInterrupt|BrokenPipeError|\w*Timeout\w*|\w*Connect\w*"
    r"|HTTPError|URLError|ProtocolError|RemoteDisconnected|Dist\w*Error|Rendezvous\w+|Horovod\w+|AcceleratorError"
    r"|(Xla|Jax)RuntimeError|(Internal|Unknown|Aborted|Cancelled|Unavailable|DeadlineExceeded)Error"
    r"|(Ray)?ActorDiedError|RayActorError|WorkerCrashedError|DeadKernelError|EngineDeadError"
    r")$"
)
"""Types whose exception is often the consequence of an error that a library, a child process or another rank wrote
before. Every other exception, such as a ValueError, is itself the error that ended the program."""
_HARDWARE = re.compile(r"gpu|cuda|dnn|nvml|nvidia|nccl|horovod", re.IGNORECASE)
"""In an exception that follows from what libraries of the GPUs or their network wrote before."""
_QUOTATION = re.compile(r"""(?<!\w)(["'`])\w[^"'`]* [^"'`]*\1(?!\w)""")
_CAUSE = "The above exception was the direct cause of the following exception:"
_HANDLING = "During handling of the above exception, another exception occurred:"
_REPORT = re.compile(r"Exception in (thread|callback) |(Task|Future) exception was never retrieved|future: <")
"""Before an exception that ended a thread or an asyncio task: the cause only if there is no other."""
_IGNORED = re.compile(r"Exception ignored |--- Logging error ---|Error in atexit\.")
"""Before an exception that ended nothing."""


@dataclass
class _Traceback:
    """A traceback from line ``start``, before which ``introduction`` is.

    ``text`` is its exception, which the line before ``end`` completes. ``lines`` counts lines that are not indented:
    other output before the exception, and further lines of its message.
    """

    prefix: str
    start: int
    introduction: str = ""
    text: str = ""
    end: int = 0
    lines: int = 0
    message: list[str] = field(default_factory=list)

    @property
    def process(self) -> str:
        """The prefix of the process that wrote it, "" without one."""
        return self.prefix.removesuffix("|").rstrip()

    @property
    def is_wrapper(self) -> bool:
        return bool(_WRAPPERS.match(self.text))

    @property
    def is_often_consequence(self) -> bool:
        return bool(_CONSEQUENCES.match(self.text.split(":", 1)[0]))


@dataclass(frozen=True)
class ProgramEnd:
    """The exception with which a program ended, and which lines of its log belong to it.

    ``text`` is the exception, see ``last_exception``. Line numbers are indexes of the log. ``error`` are the lines of
    the exception with its causes, empty if the log does not end with one that says what failed: then only a launcher
    or a thread reported one. ``others`` are the exceptions of other processes at the end, and ``caught`` tracebacks
    after which the program went on. ``source`` are lines of source code that tracebacks quote: they are no output.
    ``is_specific``: the exception is not a consequence of earlier lines;
    ``names_hardware``: it is of GPUs or their network. ``has_launcher``: a launcher reported the end, so there were
    several processes.
    """

    text: str = ""
    error: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    caught: frozenset[int] = frozenset()
    source: frozenset[int] = frozenset()
    is_specific: bool = False
    names_hardware: bool = False
    has_launcher: bool = False


def last_exception(lines: Sequence[str]) -> str:
    """Return type and message of the last exception that is not caught, "" if the log does not end with one.

    Of a chain, that is the one that ended the program. A prefix before each line, such as [rank0]:, is left out; of
    several processes with a prefix, the one that failed first counts. The exception of a launcher, a thread or an
    asyncio task counts only if there is no other; one that Python ignored, and that of torchrun, which names no
    cause, never count. Of a message of several lines, the first one and indented ones after it are returned.
    """
    return program_end(lines).text


def program_end(lines: Sequence[str]) -> ProgramEnd:
    """Return the exception of ``last_exception``, and the lines that belong to it."""
    fallback = ""
    last: dict[str, _Traceback] = {}
    others: list[_Traceback] = []
    reported: set[int] = set()
    end, allowed = len(lines), MAX_LINES_AFTER
    has_launcher = False
    covered: set[int] = set()
    tracebacks = _tracebacks(lines)
    for each in reversed(tracebacks):
        covered.update(range(each.start, each.end))
        after = sum(bool(lines[at].strip()) for at in range(each.end, end) if at not in covered)
        if each.is_wrapper and "" not in last:
            fallback = fallback or ("" if "ChildFailedError" in each.text else each.text)
            end, allowed, has_launcher = each.start, MAX_LINES_AFTER_WRAPPER, True
            reported.update(range(each.start, each.end))
        elif _IGNORED.match(each.introduction):
            continue
        elif after > allowed:
            break
        elif _REPORT.match(each.introduction):
            fallback = fallback or _quote(each)
            reported.update(range(each.start, each.end))
        elif not last or (each.process and not last.keys() & {"", each.process}):
            last[each.process] = each
        else:
            others.append(each)
    every = {at for each in tracebacks for at in range(each.start, each.end)}
    source = _source_lines(lines)
    if not last:
        caught = frozenset(every - reported)
        return ProgramEnd(fallback, caught=caught, source=source, has_launcher=has_launcher)
    first = min(last.values(), key=lambda each: each.start)
    error = _lines_with_causes(first, tracebacks, lines)
    other = {at for each in [*last.values(), *others] for at in _lines_of(each, tracebacks, lines)} - error
    names_hardware = bool(_HARDWARE.search(without_quotations(_quote(first))))
    return ProgramEnd(
        _quote(first),
        frozenset(error),
        frozenset(other),
        frozenset(every - reported - error - other),
        source,
        is_specific=not first.is_often_consequence and not names_hardware,
        names_hardware=names_hardware,
        has_launcher=has_launcher
        or any(_LAUNCHER_REPORT.search(lines[at]) for at in range(first.end, len(lines))),
    )


def without_quotations(message: str) -> str:
    """Leave out several words in quotation marks, which a message mentions: "expected 'CUDA out of memory'"."""
    return _QUOTATION.sub("", message)


def _lines_with_causes(error: _Traceback, tracebacks: Sequence[_Traceback], lines: Sequence[str]) -> set[int]:
    """Return the lines of an exception and of those before it that it names as its cause.

    The exception that was handled when it occurred counts only if its own type says nothing: a handler that tries
    something else may fail for another reason.
    """
    result = _lines_of(error, tracebacks, lines)
    for each in reversed([other for other in tracebacks if other.start < error.start]):
        if each.prefix != error.prefix:
            continue
        between = {lines[at].removeprefix(error.prefix).strip() for at in range(each.end, error.start)}
        if not (_CAUSE in between or (_HANDLING in between and error.is_often_consequence)):
            break
        result |= set(range(each.start, error.start))
        error = each
    return result


def _source_lines(lines: Sequence[str]) -> frozenset[int]:
    found: set[int] = set()
    indent = ""
    for at, line in enumerate(lines):
        if "  File " in line and (frame := _FRAME.match(line)):
            indent = f"{frame[1]}    "
        elif indent and line.startswith(indent):
            found.add(at)
        else:
            indent = ""
    return frozenset(found)


def _lines_of(each: _Traceback, tracebacks: Sequence[_Traceback], lines: Sequence[str]) -> set[int]:
    """Return the lines of a traceback with the lines of its message, as far as they can be told from other output."""
    starts = [other.start - 1 for other in tracebacks if other.start > each.start]
    limit = min([*starts, len(lines)])
    at, count = each.end, 0
    while at < limit and count < MAX_MESSAGE_LINES and lines[at].startswith(each.prefix):
        text = lines[at][len(each.prefix) :].removeprefix(" " if each.prefix else "")
        if _IGNORED.match(text):
            break
        count += bool(text.strip()) and not text.startswith((" ", "\t"))
        at += 1
    return set(range(each.start, at))


def _quote(traceback: _Traceback) -> str:
    return " ".join([traceback.text, *traceback.message])


def _tracebacks(lines: Sequence[str]) -> list[_Traceback]:
    """Return the complete tracebacks in the order in which they begin."""
    found: list[_Traceback] = []
    open_ones: dict[str, _Traceback] = {}
    groups: dict[str, _Traceback] = {}

    def open_one(gutter: str, opened: _Traceback) -> None:
        if gutter in open_ones:
            found.append(open_ones.pop(gutter))
        open_ones[gutter] = opened

    for at, line in enumerate(lines):
        for base, each in groups.items():
            if each.end == at and line.startswith(base) and line[len(base) :].lstrip()[:1] in ("|", "+"):
                each.end = at + 1  # the exceptions of the group
        if "  File " in line and not open_ones and _FILE.match(line):
            open_one("", _Traceback("", at))  # a syntax error of the program itself has no heading
            continue
        shown = line.rstrip()
        before = "" if _NOTEBOOK.match(shown) else shown.removesuffix(_HEADING)
        if before != shown and len(before) <= MAX_PREFIX_CHARACTERS:
            before, is_group = before.removesuffix(_GROUP), before.endswith(_GROUP)
            prefix = before.rstrip()
            introduction = lines[at - 1].removeprefix(prefix).lstrip() if at else ""
            if is_group:
                gutter = f"{before}|"
                groups[prefix] = group = _Traceback(gutter, at, introduction)
                open_one(gutter, group)
            elif not (prefix.endswith("|") and prefix[:-1].rstrip() in groups):
                open_one(prefix, _Traceback(prefix, at, introduction))
            continue
        for gutter, each in list(open_ones.items()):
            if line.startswith(gutter):
                _continue(each, line[len(gutter) :], at)
                break
        for gutter, each in list(open_ones.items()):
            if each.lines > MAX_MESSAGE_LINES:
                found.append(open_ones.pop(gutter))
    complete = (each for each in [*found, *open_ones.values()] if each.text)
    return sorted(complete, key=lambda each: each.start)


def _continue(traceback: _Traceback, text: str, at: int) -> None:
    """Take the next line of a traceback, without its prefix."""
    shown = text[1:] if traceback.prefix and text.startswith(" ") else text
    is_indented = shown.startswith((" ", "\t"))
    if not shown.strip() or (not traceback.text and shown.startswith("...<")):
        return
    if traceback.text:
        traceback.lines += not is_indented
        traceback.end = at + 1 if is_indented else traceback.end
        if is_indented and not traceback.lines and len(traceback.message) < MAX_MESSAGE_LINES:
            traceback.message.append(shown.strip())
    elif not is_indented and _EXCEPTION.match(shown.rstrip()):
        traceback.text, traceback.end = shown.strip(), at + 1
        if " " not in traceback.text:
            traceback.text = traceback.text.removesuffix(":")
    elif not is_indented:
        traceback.lines += 1

"""Program that the agent runs inside a task to record its code and packages; needs only Python 3.6.

It writes one JSON object a line as soon as a part is known, and ends by itself: the job is neither changed nor
delayed. Its source is passed to the interpreter of the task.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from typing import IO, Any, Dict, Iterator, List, Optional, Tuple, cast

LIMIT_S = 20
COMMAND_LIMIT_S = 5
MEMORY_BYTES = 2 * 2**30
MAX_DIFF_BYTES = 160 * 1024
MAX_PACKAGES = 3000
MAX_UNTRACKED = 100
SEARCHES = 7
SEARCH_EVERY_S = 0.5
Process = Tuple[List[str], str, str]
"""Arguments, working directory and PATH."""
_PYTHON = re.compile(r"python[0-9.]*\Z")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
PACKAGES = """
import json, os, sys
try:
    from importlib import metadata
except ImportError:
    sys.exit(1)
rows = []
for each in metadata.distributions():
    name = each.metadata["Name"]
    if not name:
        continue
    row = name + "==" + (each.version or "")
    text = each.read_text("direct_url.json")
    if text:
        origin = json.loads(text)
        commit = origin.get("vcs_info", {}).get("commit_id")
        kind = origin.get("vcs_info", {}).get("vcs", "")
        row = name + " @ " + (kind + "+" if kind else "") + origin["url"] + ("@" + commit if commit else "")
    rows.append(row)
conda, folder = [], os.path.join(sys.prefix, "conda-meta")
if os.path.isdir(folder):
    conda = sorted(each[:-5] for each in os.listdir(folder) if each.endswith(".json"))
found = {"executable": sys.executable, "version": sys.version.split()[0]}
print(json.dumps(dict(found, packages=sorted(set(rows), key=str.lower), conda=conda)))
"""


def main() -> None:
    signal.alarm(LIMIT_S)
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")  # where memory is short, this program is killed, not the task
    except OSError:
        pass
    emitted, interpreter = None, None
    for search in range(SEARCHES):
        processes = task_processes()
        found = next(filter(None, map(find_repository, directories(processes))), None)
        interpreter = next(filter(None, map(interpreter_of, processes)), None)
        if found and found != emitted:
            emitted = found
            emit(found)
        if interpreter or search == SEARCHES - 1:
            break
        time.sleep(SEARCH_EVERY_S)
    output = run([interpreter or sys.executable, "-c", PACKAGES], None)
    if output:
        listed = json.loads(output)
        for key in ("packages", "conda"):
            listed[key] = [without_credentials(each)[:300] for each in listed[key][:MAX_PACKAGES]]
        emit(listed)
    if emitted:
        emit(read_diff(emitted["directory"]))


def emit(found: Dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def run(command: List[str], directory: Optional[str], limit: int = 2**20) -> Optional[str]:
    """Return at most ``limit`` bytes of the output as text; None if the command fails."""
    environment = dict(os.environ, GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0", LC_ALL="C.UTF-8")
    try:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    stdout = cast(IO[bytes], process.stdout)
    until_s, parts, size = time.monotonic() + COMMAND_LIMIT_S, [], 0
    os.set_blocking(stdout.fileno(), False)
    while size <= limit and time.monotonic() < until_s:
        part: Optional[bytes] = stdout.read(65536)  # None while there is nothing to read
        if part == b"":
            break
        if part is None:
            time.sleep(0.01)
            continue
        parts.append(part)
        size += len(part)
    complete = size <= limit and time.monotonic() < until_s
    if not complete:
        process.kill()
    code = process.wait()
    text = b"".join(parts)[:limit].decode("utf-8", "replace")
    return text if code == 0 or size > limit else None


def git(directory: str, *words: str, limit: int = 2**20) -> Optional[str]:
    options = ["-c", "safe.directory=*", "-c", "core.fsmonitor=false"]
    return run(["git", *options, *words], directory, limit)


def task_processes() -> List[Process]:
    """Return the other processes of this task, oldest first."""
    mark = [b"%s=%s" % (key.encode(), os.environ.get(key, "").encode()) for key in MARKS]
    found = []
    for pid in sorted(int(each) for each in os.listdir("/proc") if each.isdigit()):
        if pid in (os.getpid(), os.getppid()):
            continue
        try:
            variables = read("/proc/%d/environ" % pid).split(b"\0")
            if not all(each in variables for each in mark):
                continue
            words = [each.decode("utf-8", "replace") for each in read("/proc/%d/cmdline" % pid).split(b"\0")]
            path = next((each[5:].decode() for each in variables if each.startswith(b"PATH=")), "")
            found.append((words[:-1], os.readlink("/proc/%d/cwd" % pid), path))
        except (OSError, UnicodeDecodeError):
            continue
    return found


MARKS = ("FAIRWAY_JOB", "FAIRWAY_ATTEMPT", "FAIRWAY_TASK")


def read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(256 * 1024)


def directories(processes: List[Process]) -> Iterator[str]:
    """Return where code may be: directories of scripts, then working directories, newest process first."""
    for words, directory, _ in reversed(processes):
        for word in words[1:20]:
            path = os.path.join(directory, word)
            if word.endswith((".py", ".sh")) and os.path.isfile(path):
                yield os.path.dirname(path)
        yield directory
    yield os.getcwd()


def find_repository(directory: str) -> Optional[Dict[str, Any]]:
    top = git(directory, "rev-parse", "--show-toplevel")
    if not top:
        return None
    top = top.strip()
    commit = git(top, "rev-parse", "--verify", "HEAD") or ""
    branch = git(top, "symbolic-ref", "--short", "--quiet", "HEAD") or ""
    remote = git(top, "config", "--get", "remote.origin.url") or ""
    return {
        "directory": top[:1000],
        "commit": commit.strip(),
        "branch": branch.strip()[:200],
        "remote": without_credentials(remote.strip())[:500],
    }


def read_diff(top: str) -> Dict[str, Any]:
    base = [] if git(top, "rev-parse", "--verify", "HEAD") is None else ["HEAD"]
    words = ["diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", *base]
    text = git(top, *words, limit=4 * 2**20)
    untracked = git(top, "ls-files", "--others", "--exclude-standard") or ""
    size = None if text is None else len(text.encode())
    return {
        "diff": (text or "").encode()[:MAX_DIFF_BYTES].decode("utf-8", "ignore"),
        "diff_bytes": size,
        "untracked": [each[:300] for each in untracked.splitlines()[:MAX_UNTRACKED]],
    }


def without_credentials(text: str) -> str:
    return _CREDENTIALS.sub(lambda found: "git@" if found.group() == "git@" else "", text)


def interpreter_of(process: Process) -> Optional[str]:
    """Return the path of the interpreter that a process runs; None if it runs no Python."""
    words, directory, path = process
    if not words or not _PYTHON.match(os.path.basename(words[0])):
        return None
    if "/" in words[0]:
        return os.path.join(directory, words[0])
    return shutil.which(words[0], path=path)


if __name__ == "__main__":
    main()

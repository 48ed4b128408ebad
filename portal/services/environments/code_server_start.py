"""Starts VS Code (code-server) in a workspace, and installs it in the user's home first if it is not there.

A program of its own, which a node runs with the Python of its machine (3.8 or newer, standard library only). While
it installs, a page at the address of the workspace shows how far it is, in the language of the browser: texts.json
beside this program has the translations of ``TEXTS``.

Arguments: folder of node, package, file with the secret, address, port.
"""

from __future__ import annotations

import fcntl
import hashlib
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

SAY_EVERY_S = 15
SCRIPTS = "code-server,argon2"
"""Packages whose scripts build what code-server needs."""
BUILD_TOOLS = (("g++", "build-essential"), ("make", "build-essential"))
KERBEROS_HEADER = "/usr/include/gssapi/gssapi.h"
MIB = 1024 * 1024

TEXTS_NAME = "texts.json"
gettext_noop = str
"""Marks a text for translation."""
TITLE = gettext_noop("Installing VS Code")
BEGINS = gettext_noop("It begins.")
WAITS = gettext_noop("Another workspace of yours installs it.")
INSTALLS = gettext_noop("npm downloads and builds it, which takes some minutes.")
AMOUNT = gettext_noop("{size} MiB installed, {minutes} min {seconds} s.")
ONCE = gettext_noop(
    "This is done once, on the first use. This page opens VS Code when it is ready; you may close it meanwhile."
)
TEXTS = (TITLE, BEGINS, WAITS, INSTALLS, AMOUNT, ONCE)
_NPM_CODE = re.compile(r"npm error code (\S+)")
PAGE = """<!doctype html><html lang="%s"><head><meta charset="utf-8"><meta http-equiv="refresh" content="3">
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<title>%s</title><style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:40rem;
margin:15vh auto;padding:0 1rem}h1{font-size:24px}pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}
</style></head><body><h1>%s</h1><p role="status">%s</p><p>%s</p><pre>%s</pre></body></html>
"""


class Progress:
    """What the page shows: ``step`` as a sentence, and the last line of the installer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.line, self.began = folder, BEGINS, "", time.monotonic()

    def text(self, texts: dict[str, str] | None = None) -> str:
        """Return the step, the size of what is installed, and the time it took so far."""
        texts = texts or {}
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        amount = texts.get(AMOUNT, AMOUNT)
        return f"{texts.get(self.step, self.step)} " + amount.format(
            size=_size_mib(self.folder), minutes=minutes, seconds=seconds
        )


def main(arguments: list[str]) -> None:
    node, package, secret_file, address, port = arguments
    home = Path.home() / ".local" / "share" / "fairway"
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"code-server-{hashlib.sha256(package.encode()).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        progress = Progress(folder)
        server = _serve_page(progress, address, int(port))
        try:
            with (home / "code-server.lock").open("w") as lock:
                progress.step = WAITS
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (folder / "complete").exists():
                    _install(Path(node), package, folder, progress)
        finally:
            server.shutdown()
            server.server_close()
    secret = Path(secret_file).read_text().replace("\n", "")
    os.environ["HASHED_PASSWORD"] = hashlib.sha256(secret.encode()).hexdigest()
    program = folder / "lib" / "node_modules" / "code-server"
    options = ["--auth", "password", "--bind-addr", f"{address}:{port}"]
    options += ["--disable-telemetry", "--disable-update-check", str(Path.home())]
    sys.stdout.flush()
    os.execv(str(Path(node) / "bin" / "node"), ["node", str(program), *options])  # noqa: S606


def _install(node: Path, package: str, folder: Path, progress: Progress) -> None:
    """Install the package with npm; end the program with a sentence if that fails."""
    shutil.rmtree(folder, ignore_errors=True)
    tools = folder / "tools"  # scripts of the package call node and npm, which must be these
    tools.mkdir(parents=True)
    npm = [str(node / "bin" / "node"), str(node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    (tools / "node").symlink_to(npm[0])
    (tools / "npm").write_text(f'#!/bin/sh\nexec "{npm[0]}" "{npm[1]}" "$@"\n')
    (tools / "npm").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin",
        "npm_config_nodedir": str(node),
        "npm_config_cache": str(folder / "cache"),
    }
    command = [*npm, "install", "--global", f"--prefix={folder}", f"--allow-scripts={SCRIPTS}"]
    command += ["--no-fund", "--no-audit", "--install-links", "--foreground-scripts", package]
    progress.step = INSTALLS
    _print(f"VS Code is not installed yet. {progress.step}")
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    threading.Thread(target=_say, args=(process, progress), daemon=True).start()
    last: list[str] = []
    code = ""
    for line in process.stdout or ():
        last = [*last[-19:], line.strip()[:300]]
        code = match[1] if (match := _NPM_CODE.search(line)) else code
        if not last[-1].startswith("npm warn"):  # about its options, which no user chose
            progress.line = last[-1]
    if process.wait() != 0:
        _print("\n".join(last))
        sys.exit(f"VS Code could not be installed. {_cause(code, process.returncode)}")
    shutil.rmtree(folder / "cache", ignore_errors=True)
    (folder / "complete").touch()
    _print(f"VS Code is installed. {progress.text()}")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _cause(code: str, exit_code: int) -> str:
    """Return why npm failed: its own ``code`` is a number if it could not build the package, else a name."""
    if code and not code.isdigit():
        return f"npm could not download it ({code})."
    packages = {package for program, package in BUILD_TOOLS if shutil.which(program) is None}
    if not Path(KERBEROS_HEADER).exists():
        packages.add("libkrb5-dev")
    built = f"npm could not build it (exit code {exit_code})."
    if not packages:
        return built
    return f"{built} This machine lacks packages that it needs: apt-get install {' '.join(sorted(packages))}"


def _language(accepted: str, known: dict[str, dict[str, str]]) -> str:
    """Return the language of the texts for an Accept-Language header, in its order; English if none is known."""
    for part in accepted.split(","):
        language = part.split(";")[0].strip().lower().split("-")[0]
        if language == "en" or language in known:
            return language
    return "en"


def _say(process: subprocess.Popen[str], progress: Progress) -> None:
    while process.poll() is None:
        time.sleep(SAY_EVERY_S)
        _print(f"{progress.text()} {progress.line}")


def _size_mib(folder: Path) -> int:
    total = 0
    for path, _folders, files in os.walk(folder):
        for name in files:
            try:
                total += Path(path, name).lstat().st_size
            except OSError:
                continue  # npm has removed it since
    return total // MIB


def _serve_page(progress: Progress, address: str, port: int) -> http.server.HTTPServer:
    path = Path(__file__).with_name(TEXTS_NAME)
    known: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            language = _language(self.headers.get("Accept-Language") or "", known)
            texts = known.get(language, {})
            title = texts.get(TITLE, TITLE)
            values = (title, title, progress.text(texts), texts.get(ONCE, ONCE), progress.line)
            text = (PAGE % (language, *map(html.escape, values))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_arguments: object) -> None:
            return

    server = http.server.ThreadingHTTPServer((address, port), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    main(sys.argv[1:])

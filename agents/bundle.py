"""Builds the agent program: one reproducible .pyz of ``agents/node``, the table of verbs and a subset of NVML.

``pynvml`` is that of the installed nvidia-ml-py, because a node has no packages and the program runs in
Python's isolated mode. Its licence text is included, as the licence requires. Each module is included as bytecode
too: a Python of the portal's version starts in half the time, and any other ignores the bytecode.
"""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import sys
import zipfile
from itertools import takewhile
from pathlib import Path

from agents.node.host.atomic_files import make_folder
from agents.nvml_subset import extract_subset

_SOURCE = Path(__file__).parent
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MAIN = b"import sys\nfrom agents.node.__main__ import main\nsys.exit(main())\n"
_PYC_FLAGS = (0b01).to_bytes(4, "little")
"""PEP 552: found by its source's hash, which is not compared when the module is imported."""
_MARSHAL_VERSION = 2
"""The last one without references between objects, which depend on what else the process holds."""
_PACKAGE = b'"""The hands on a node."""\n'


def build_archive(target: Path) -> str:
    """Write the archive atomically and return its SHA-256 as hexadecimal digits.

    Raise FileNotFoundError when nvidia-ml-py is not installed.
    """
    nvml = _nvml_module()
    make_folder(str(target.parent), 0o711)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    with part.open("wb") as stream:
        stream.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            _add(archive, "__main__.py", _MAIN)
            _add_module(archive, "agents/__init__.py", _PACKAGE)
            for path in (*sorted((_SOURCE / "node").rglob("*.py")), _SOURCE / "verbs.py"):
                _add_module(archive, f"agents/{path.relative_to(_SOURCE).as_posix()}", path.read_bytes())
            _add_module(archive, "pynvml.py", extract_subset(nvml.decode()).encode())
            _add(archive, "pynvml.LICENSE", _license_text(nvml))
    part.chmod(0o755)
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    part.replace(target)
    return digest


def _nvml_module() -> bytes:
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        raise FileNotFoundError("nvidia-ml-py is not installed: without it nodes cannot detect their GPUs.")
    return Path(found.origin).read_bytes()


def _license_text(module: bytes) -> bytes:
    """Return the leading comment of a module without comment marks."""
    comment = takewhile(lambda line: line.startswith(b"#"), module.splitlines())
    return b"\n".join(line.strip(b"#").removeprefix(b" ") for line in comment).strip() + b"\n"


def _add_module(archive: zipfile.ZipFile, name: str, source: bytes) -> None:
    """Add a module and its bytecode."""
    _add(archive, name, source)
    code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=0), _MARSHAL_VERSION)
    header = importlib.util.MAGIC_NUMBER + _PYC_FLAGS + importlib.util.source_hash(source)
    _add(archive, f"{name}c", header + code)


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o100644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)


if __name__ == "__main__":
    sys.stdout.write(build_archive(Path(sys.argv[1])) + "\n")

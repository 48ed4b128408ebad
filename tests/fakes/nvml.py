"""A driver that is not there: ``nvml.c`` built as libnvidia-ml.so.1, and the text file that it tells from."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pynvml
import pytest

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
Lines = list[str]


def missing_compiler() -> str | None:
    """Why it cannot be built here, or None when it can."""
    if shutil.which("cc") is None:
        return "the stand-in for NVML needs a C compiler (Debian: apt-get install gcc libc6-dev)"
    return None


@functools.cache
def build_library() -> Path:
    """The folder with the library, built once in this process."""
    folder = Path(tempfile.mkdtemp(prefix="fairway-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", str(folder / LIBRARY), str(SOURCE), "-lpthread"], check=True)
    return folder


def h200(number: int, *more: str, bus: int | None = None) -> Lines:
    """A GPU in good health; lines of ``more`` are about it too, and the last of a kind counts."""
    return [
        "gpu",
        f"uuid GPU-h200-{number}",
        "name NVIDIA H200",
        f"bus 00000000:{0x1A + number if bus is None else bus:02X}:00.0",
        "capability 9 0",
        "memory 143771 637 1000",
        "use 40",
        "watts 310",
        "joules 9000",
        "celsius 50",
        "throttle 0x0",
        "ecc 0",
        "rows 0 0 0 0",
        *more,
    ]


class FakeDriver:
    """One machine's driver: its file, which may be rewritten, and how a program is told to take it.

    ``take`` makes this very process take it, whatever it took before.
    """

    def __init__(self, folder: Path, gpus: Iterable[Lines]) -> None:
        self._path = folder / "nvml.txt"
        self.write(gpus)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(build_library()), "FAIRWAY_FAKE_NVML": str(self._path)}

    def take(self, patch: pytest.MonkeyPatch) -> None:
        library = str(build_library() / LIBRARY)
        patch.setenv("FAIRWAY_FAKE_NVML", str(self._path))
        patch.setattr("agents.node.gpus.nvml._LIBRARY", library)
        patch.setattr(pynvml, "nvmlLib", ctypes.CDLL(library))
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def write(self, gpus: Iterable[Lines]) -> None:
        """From now on these are the GPUs."""
        part = self._path.with_suffix(".part")
        part.write_text(
            "\n".join(["driver 570.124.06", "cuda 12080", *(line for gpu in gpus for line in gpu), ""])
        )
        part.replace(self._path)

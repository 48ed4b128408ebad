#!/usr/bin/env python3
"""Builds an image from this machine's own Python, without a registry: a file for `podman load` or the portal.

    python3 deploy/images/build.py tiny --out tiny.tar
    python3 deploy/images/build.py jupyterlab --out jupyterlab.tar
    python3 deploy/images/build.py tiny --also torch==2.13.0 --name localhost/fairway/torch:latest --out torch.tar

With a registry, the Containerfile beside each recipe builds the same image on a distribution's base.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
COMMANDS = (
    *("sh", "bash", "cat", "chmod", "cp", "cut", "date", "dd", "df", "dirname", "du", "echo", "env", "expr"),
    *(
        "false",
        "find",
        "grep",
        "head",
        "hostname",
        "id",
        "kill",
        "ln",
        "ls",
        "mkdir",
        "mknod",
        "mktemp",
        "mv",
    ),
    *("nproc", "ps", "pwd", "readlink", "rm", "sed", "seq", "sleep", "sort", "stat", "tail", "tee", "test"),
    *("timeout", "touch", "tr", "true", "uname", "wc", "whoami", "xargs"),
)
LEFT_OUT = (
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "ensurepip",
    "site-packages",
    "dist-packages",
)
LEFT_OUT_PREFIXES = ("config-", "libpython")
RECIPES = {
    "tiny": {"lock": None, "command": [f"/usr/local/bin/{PYTHON}"]},
    "jupyterlab": {"lock": HERE / "jupyterlab/requirements.lock", "command": ["/usr/local/bin/jupyter-lab"]},
}


def main() -> None:
    """Build the image that the command line names."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("recipe", choices=sorted(RECIPES))
    options.add_argument("--out", type=Path, required=True, help="the archive to write")
    options.add_argument("--name", help="the image's name; default fairway/<recipe>:latest")
    options.add_argument(
        "--also", action="append", default=[], help="a requirement that pip resolves itself, for trials"
    )
    options.add_argument(
        "--program",
        action="append",
        default=[],
        help="a command of this machine to include with its libraries",
    )
    chosen = options.parse_args()
    recipe = RECIPES[chosen.recipe]
    with tempfile.TemporaryDirectory(prefix="fairway-image-", dir=chosen.out.resolve().parent) as folder:
        root = Path(folder) / "root"
        lay_out_system(root, [*COMMANDS, *chosen.program])
        put_python(root)
        if recipe["lock"] is not None:
            install(root, "--require-hashes", "--no-deps", "--requirement", str(recipe["lock"]))
        if chosen.also:
            install(root, *chosen.also)
        put_files(root, HERE / chosen.recipe / "files")
        name = chosen.name or f"localhost/fairway/{chosen.recipe}:latest"
        digest = write_archive(root, chosen.out, name, list(recipe["command"]))
    print(f"{name} {digest}")  # noqa: T201


def cache_key(recipe: str) -> str:
    """Return a name that changes with the image: recipe, lock, this file, Python and system library."""
    parts = [
        Path(__file__).read_bytes(),
        sys.version.encode(),
        repr(platform.libc_ver()).encode(),
        recipe.encode(),
    ]
    parts += [path.read_bytes() for path in sorted((HERE / recipe).rglob("*")) if path.is_file()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def lay_out_system(root: Path, commands: Iterable[str]) -> None:
    """Create the folders and the few commands that a terminal in a container needs."""
    for folder in (
        "bin",
        "etc",
        "home",
        "lib64",
        "proc",
        "root",
        "run",
        "sys",
        "dev",
        "usr/bin",
        "usr/local/bin",
        "var",
    ):
        (root / folder).mkdir(parents=True)
    for folder in ("tmp", "var/tmp"):
        (root / folder).mkdir(parents=True)
        (root / folder).chmod(0o1777)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n"
    )
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    for path in (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/services"), Path("/etc/protocols")):
        if path.exists():
            _copy(path, root / path.relative_to("/"))
    searched = "/usr/bin:/bin:/usr/sbin:/sbin"
    found = [Path(place) for command in commands if (place := shutil.which(command, path=searched))]
    for path in found:
        target = root / "usr/bin" / path.name
        _copy(path.resolve(), target)
        target.chmod(0o755)  # without set-uid bits
        if path.name in ("sh", "bash"):
            _copy(target, root / "bin" / path.name)
    for library in libraries(found):
        _copy(library, root / library.relative_to("/"))


def put_python(root: Path) -> None:
    """Copy this interpreter and its standard library to /usr/local, where it finds them."""
    base = Path(sys.base_prefix)
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": str(base), "base": str(base)}))
    interpreter = Path(sys.executable).resolve()
    local = root / "usr/local"
    _copy(interpreter, local / "bin" / PYTHON)
    for name in ("python3", "python"):
        (local / "bin" / name).symlink_to(PYTHON)
    shutil.copytree(standard, local / "lib" / PYTHON, ignore=_left_out, symlinks=False)
    extensions = [interpreter, *(local / "lib" / PYTHON / "lib-dynload").glob("*.so")]
    needed = libraries(extensions)
    searched = next(library.parent for library in needed if library.name.startswith("libc."))
    for library in needed:
        own = base in library.parents and base != Path(
            "/usr"
        )  # the loader looks for it at its path on this machine
        _copy(library, root / (searched / library.name if own else library).relative_to("/"))
    site = local / "lib" / PYTHON / "site-packages"
    site.mkdir()
    (site.parent / "dist-packages").symlink_to("site-packages")  # Debian's Python looks there
    _compile(local / "lib" / PYTHON)


def install(root: Path, *what: str) -> None:
    """Install pip requirements into the image's Python."""
    local = root / "usr/local"
    site = local / "lib" / PYTHON / "site-packages"
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        prefix = Path(folder)
        subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--no-input",
                    "--disable-pip-version-check",
                ),
                *("--only-binary", ":all:", "--no-compile", "--ignore-installed", "--prefix", folder, *what),
            ],
            check=True,
            timeout=600,
        )
        if (prefix / "local").exists():  # where Debian's Python installs
            prefix /= "local"
        packages = next(each for each in prefix.glob("lib/python*/*-packages"))
        for unused in (*packages.glob("**/tests"), *packages.glob("**/*.map")):
            shutil.rmtree(unused, ignore_errors=True) if unused.is_dir() else unused.unlink(missing_ok=True)
        for script in (prefix / "bin").glob("*"):
            first, _, rest = script.read_bytes().partition(b"\n")
            if first.startswith(b"#!") and b"python" in first:
                script.write_bytes(f"#!/usr/local/bin/{PYTHON}\n".encode() + rest)
            script.chmod(0o755)
        shutil.copytree(packages, site, dirs_exist_ok=True)
        shutil.rmtree(packages)
        shutil.copytree(prefix, local, dirs_exist_ok=True, symlinks=True)
    programs = [*site.rglob("*.so"), *local.glob("lib/*.so*"), *local.glob("bin/*")]
    for library in libraries(programs):
        if library.parts[1] in ("lib", "lib64", "usr") and root not in library.parents:
            _copy(library, root / library.relative_to("/"))
    for kernel in local.glob("share/jupyter/kernels/*/kernel.json"):  # it names the Python that installed it
        described = json.loads(kernel.read_text())
        described["argv"][0] = f"/usr/local/bin/{PYTHON}"
        kernel.write_text(json.dumps(described, indent=1))
    _compile(site)


def put_files(root: Path, files: Path) -> None:
    """Copy a recipe's own files over the root."""
    if files.exists():
        shutil.copytree(files, root, dirs_exist_ok=True)


def libraries(programs: Iterable[Path]) -> list[Path]:
    """Return the shared libraries that programs are linked with, including the loader."""
    needed: set[Path] = set()
    paths = [str(path) for path in programs]
    for start in range(0, len(paths), 200):
        listed = subprocess.run(
            ["ldd", *paths[start : start + 200]], capture_output=True, text=True, timeout=60
        )
        for line in listed.stdout.splitlines():
            if line.endswith(":"):  # ldd prints the file before its libraries
                continue
            words = line.split()
            candidate = words[2] if len(words) > 2 and words[1] == "=>" else words[0] if words else ""
            if candidate.startswith("/"):
                needed.add(Path(candidate))
    return sorted(needed)


def write_archive(root: Path, out: Path, name: str, command: list[str]) -> str:
    """Write a docker archive of one layer and return the config digest. Equal roots give equal digests."""
    layer = root.parent / "layer.tar"
    with tarfile.open(layer, "w", format=tarfile.GNU_FORMAT) as packed:
        for path in sorted(root.rglob("*")):
            packed.add(path, arcname=str(path.relative_to(root)), recursive=False, filter=_as_roots)
    with layer.open("rb") as stream:
        layer_digest = hashlib.file_digest(stream, "sha256").hexdigest()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = json.dumps(
        {
            "architecture": machine,
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {
                "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"],
                "Cmd": command,
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "fairway"}],
        },
        sort_keys=True,
    ).encode()
    digest = hashlib.sha256(config).hexdigest()
    manifest = [{"Config": f"{digest}.json", "RepoTags": [name], "Layers": [f"{layer_digest}/layer.tar"]}]
    draft = out.with_name(out.name + ".new")
    with tarfile.open(draft, "w") as archive:
        for member, content in ((f"{digest}.json", config), ("manifest.json", json.dumps(manifest).encode())):
            described = tarfile.TarInfo(member)
            described.size = len(content)
            archive.addfile(described, io.BytesIO(content))
        archive.add(layer, arcname=f"{layer_digest}/layer.tar", filter=_as_roots)
    layer.unlink()
    draft.replace(out)
    return f"sha256:{digest}"


def _left_out(_: str, names: list[str]) -> set[str]:
    return {name for name in names if name in LEFT_OUT or name.startswith(LEFT_OUT_PREFIXES)}


def _copy(source: Path, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=True)


def _compile(folder: Path) -> None:
    """Compile ahead, since the user in the container may not write there; hash-based, for equal archives."""
    subprocess.run(
        [
            *(sys.executable, "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"),
            *("-s", str(folder), "-p", "/usr/local/lib", str(folder)),
        ],
        check=False,  # libraries may contain files for other Python versions
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=600,
    )


def _as_roots(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mtime = 0
    runnable = entry.isdir() or entry.mode & 0o100
    sticky = entry.mode & 0o1000  # shared temporary folders
    entry.mode = (0o755 if runnable else 0o644) if not sticky else 0o1777
    return entry


if __name__ == "__main__":
    main()

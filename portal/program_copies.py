"""Copies of programs that other accounts run: those of servers and of users' tasks."""

from __future__ import annotations

from pathlib import Path


def open_for_every_account(folder: Path) -> None:
    """Let every account read a copied folder and run its programs, whatever the umask of who made the original."""
    for part in [folder, *folder.rglob("*")]:
        if not part.is_symlink():
            runs = part.is_dir() or part.parent.name == "bin" or bool(part.stat().st_mode & 0o100)
            part.chmod(0o755 if runs else 0o644)

"""Each subject has the same name in every layer; docs/subjects.md lists where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from portal.management.commands.subject_docs import OTHER_PACKAGES, SUBJECTS, folders, subjects_text


@pytest.mark.parametrize(("layer", "folder"), folders())
def test_packages_of_a_layer_are_subjects(layer: str, folder: Path) -> None:
    packages = {path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages <= SUBJECTS.keys() | OTHER_PACKAGES.get(layer, {}).keys()
    assert OTHER_PACKAGES.get(layer, {}).keys() <= packages


def test_each_subject_stands_in_most_layers() -> None:
    """One that is in two layers only is a part of another subject."""
    for subject in SUBJECTS:
        assert sum((folder / subject).is_dir() for _, folder in folders()) >= 4, subject


def test_the_page_is_current() -> None:
    assert Path("docs/subjects.md").read_text() == subjects_text(), "run manage.py subject-docs"

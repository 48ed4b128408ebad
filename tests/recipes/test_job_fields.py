"""The recipes for job fields hold: edits of the files that they list suffice, applied to a copy of the sources."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from portal.domain.jobs.job_spec import job_fields
from portal.models import Job
from tests.process_environment import without_servers

ROOT = Path(__file__).parent.parent.parent
CHECKS = Path(__file__).parent / "job_field_checks.py"
COPIED = ("portal", "scheduler", "agents")
LINKED = ("templates", "static", "docs")
OF_THIS_RUN = ("FAIRWAY_TESTS_OWN_SERVER", "FAIRWAY_DATA_DIR", "PYTEST_XDIST_WORKER")

PLACEMENT_FIELD = """    max_compute_capability: float | None = declare(
        None,
        JobField(
            minimum=1.0, maximum=99.9, label="Compute capability, at most", help="Such as 9.0.",
            section="gpu_kind", affects_placement=True,
        ),
    )  # fmt: skip
"""
DISPLAY_FIELD = """    ticket_number: int = declare(
        0, JobField(minimum=0, maximum=1_000_000, label="Ticket", help="0: none.", section="limits")
    )
"""
RULE = """            and gpu.compute_capability <= (self.max_compute_capability or 99.9)
"""


class Sources:
    """A copy of the sources; ``edited`` are the files that were edited in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.edited: set[str] = set()
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in LINKED:
            (root / name).symlink_to(ROOT / name)
        (root / "tests").mkdir()
        for path in (ROOT / "tests").glob("*.py"):
            shutil.copy(path, root / "tests")
        shutil.copy(ROOT / "pyproject.toml", root)

    def insert_before(self, file: str, line: str, text: str) -> None:
        before = (self.root / file).read_text()
        assert before.count(f"\n{line}") == 1, f"{file} has not one line {line!r}"
        self._write(file, before.replace(f"\n{line}", f"\n{text}{line}"))

    def declare_like(self, file: str, like: str, field: str, default: tuple[str, str] = ("", "")) -> None:
        """Repeat each line that declares or assigns the field ``like``, for ``field`` with its default."""
        declaration = re.compile(rf"""\s*\(?["']?{like}["']?\s*[:=,].*\n""")
        lines = (self.root / file).read_text().splitlines(keepends=True)
        assert any(map(declaration.fullmatch, lines)), f"{file} does not declare {like}"
        repeated = [
            line + line.replace(like, field).replace(*default) if declaration.fullmatch(line) else line
            for line in lines
        ]
        self._write(file, "".join(repeated))

    def _write(self, file: str, text: str) -> None:
        (self.root / file).write_text(text)
        self.edited.add(file)

    def run(self, *arguments: str) -> str:
        """Return the output of a Python command in the copy, which must succeed."""
        environment = {name: value for name, value in without_servers().items() if name not in OF_THIS_RUN}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=environment
            | {
                "DJANGO_SETTINGS_MODULE": "portal.config.settings",
                "FAIRWAY_SECRET_KEY": secrets.token_urlsafe(64),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    yield Sources(tmp_path / "sources")
    shutil.rmtree(tmp_path / "sources")


def add_placement_field(sources: Sources) -> None:
    like, field = "min_compute_capability", "max_compute_capability"
    sources.insert_before("portal/domain/jobs/job_spec.py", "    topology_constraint: ", PLACEMENT_FIELD)
    sources.insert_before(
        "portal/domain/jobs/feasibility.py",
        '            and (self.mig_profile or "") == gpu.mig_profile',
        RULE,
    )
    for file in (
        "portal/domain/jobs/feasibility.py",
        "portal/models/jobs/jobs.py",
        "portal/api/serializers/jobs.py",
    ):
        sources.declare_like(file, like, field)


def add_display_field(sources: Sources) -> None:
    sources.insert_before("portal/domain/jobs/job_spec.py", "    env: ", DISPLAY_FIELD)
    sources.declare_like("portal/api/serializers/jobs.py", "shm_mib", "ticket_number")
    default = (
        "default=JobSpec.ticket_number",
        "default=JobSpec.ticket_number, db_default=JobSpec.ticket_number",
    )
    sources.declare_like("portal/models/jobs/jobs.py", "shm_mib", "ticket_number", default)


def listed_files(heading: str) -> set[str]:
    """Return the production files of a recipe: the paths of modules that begin its steps."""
    recipe = (ROOT / "docs/recipes.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\d+\. `([\w/]+\.py)`", recipe, re.MULTILINE))


@pytest.mark.long
@pytest.mark.parametrize(
    ("heading", "add", "most"),
    [
        ("Add a job field that affects placement", add_placement_field, 6),
        ("Add a display-only job field", add_display_field, 5),
    ],
)
def test_job_field_needs_only_the_files_of_its_recipe(sources, heading, add, most) -> None:
    add(sources)
    production = {file for file in sources.edited if not file.startswith("tests/")}
    assert production == listed_files(heading)
    assert len(production) + 2 <= most, "with a migration and a file of tests"
    sources.run("-m", "django", "makemigrations", "portal", "--name", "job_field")
    (sources.root / "tests/test_job_field.py").write_text(CHECKS.read_text())
    assert "No changes detected" in sources.run("-m", "django", "makemigrations", "--check", "--dry-run")
    sources.run("-m", "pytest", "-q", "-x", "tests/test_job_field.py", "-k", add.__name__[4:])


def test_job_columns_agree_with_specification() -> None:
    for name, rule in job_fields().items():
        column = Job._meta.get_field(name)
        assert column.null == rule.nullable, name
        if rule.is_scalar and rule.name != "name":
            assert column.get_default() == rule.default, name
        assert rule.max_length is None or column.max_length == rule.max_length, name

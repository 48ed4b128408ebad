"""What differs between compared runs, and what a reader of the comparison should know."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.domain.formatting import short_gpu_model
from portal.domain.sweeps.sweeps import Direction
from portal.selectors.experiments.experiments import Run, RunJob
from portal.web.display.formatting import gpu_amount, short_digest

COMMIT_DIGITS = 12


@dataclass(frozen=True)
class Difference:
    """A parameter, or a fact of the job, by run. ``odd`` says which values are not those of most runs."""

    name: str
    values: list[str | None]
    odd: list[bool]
    is_parameter: bool = True

    @property
    def differs(self) -> bool:
        """True if two values differ; a run whose fact is unknown does not count."""
        return len({value for value in self.values if self.is_parameter or value is not None}) > 1

    @property
    def cells(self) -> list[tuple[str | None, bool]]:
        return list(zip(self.values, self.odd, strict=True))


@dataclass(frozen=True)
class Caution:
    """A note on one of the compared runs, with the icon of a state."""

    icon: str
    title: str
    text: str


def compare_runs(runs: Sequence[Run], jobs: Mapping[str, RunJob]) -> list[Difference]:
    """Return the parameters of the runs and facts of their jobs, those that differ first."""
    names = sorted({name for run in runs for name in run.params})
    rows = [_difference(name, [run.params.get(name) for run in runs]) for name in names]
    rows += [
        _difference(name, values, is_parameter=False)
        for name, values in _facts(runs, jobs)
        if any(value is not None for value in values)
    ]
    return sorted(rows, key=lambda row: (not row.differs, not row.is_parameter, row.name))


def _difference(name: str, values: list[str | None], *, is_parameter: bool = True) -> Difference:
    known = [value for value in values if is_parameter or value is not None]
    (most, count), *others = Counter(known).most_common(2)
    usual = count > others[0][1] if others else True
    odd = [bool(others) and value in known and (not usual or value != most) for value in values]
    return Difference(name, values, odd, is_parameter)


def _facts(runs: Sequence[Run], jobs: Mapping[str, RunJob]) -> list[tuple[str, list[str | None]]]:
    known = [jobs.get(run.job) for run in runs]
    return [
        (_("commit"), [each.commit[:COMMIT_DIGITS] or None if each else None for each in known]),
        (_("image"), [_image(each) if each else None for each in known]),
        ("GPUs", [gpus_text(each) if each else None for each in known]),
    ]


def _image(found: RunJob) -> str:
    return short_digest(found.job.image_digest) if found.job.image_digest else found.job.environment.title


class BestValue(NamedTuple):
    value: float
    direction: Direction


def best_values(runs: Sequence[Run], directions: Mapping[str, Direction]) -> dict[str, BestValue]:
    """Return the best finite value of each metric with a direction; none where all runs have the same value."""
    best = {}
    for name, direction in directions.items():
        values = {run.metrics[name] for run in runs if name in run.metrics}
        finite = [value for value in values if math.isfinite(value)]
        if finite and len(values) > 1:
            choose = min if direction == Direction.MINIMIZE else max
            best[name] = BestValue(choose(finite), direction)
    return best


def gpus_text(found: RunJob) -> str:
    """Return the GPUs of a job: 16 × H200; blank without."""
    job = found.job
    if not job.total_gpus:
        return ""
    record = getattr(job, "environment_record", None)
    model = job.gpu_model or (record.gpu_model if record else "")
    return f"{gpu_amount(job.total_milli)} × {short_gpu_model(model) if model else 'GPU'}"


def _are_unlike(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def cautions(runs: Sequence[Run], rows: Sequence[Difference]) -> list[Caution]:
    """Return for which of the runs, lettered from A, a comparison with the first one misleads."""
    found = []
    for index, run in enumerate(runs):
        letter = "ABCD"[index]
        facts = [
            row.name for row in rows if not row.is_parameter and _are_unlike(row.values[0], row.values[index])
        ]
        changed = sum(row.is_parameter and row.values[index] != row.values[0] for row in rows)
        if facts:
            text = _("Compared with A, it differs in: {names}.").format(names=", ".join(facts))
            if changed:
                more = ngettext("{count} parameter differs, too.", "{count} parameters differ, too.", changed)
                text = f"{text} {more.format(count=changed)}"
            found.append(Caution("warning", _("{letter} is not like for like").format(letter=letter), text))
        if run.is_running:
            title = _("{letter} has not ended").format(letter=letter)
            found.append(Caution("running", title, _("Its last values are not final.")))
        elif run.status in ("FAILED", "KILLED"):
            title = _("{letter} did not complete").format(letter=letter)
            found.append(Caution("failed", title, _("Its curves end where it failed or was stopped.")))
    return found

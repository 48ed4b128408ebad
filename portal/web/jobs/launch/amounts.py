"""CPU, memory and shared memory of a form: they follow its GPUs, except those that the user typed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from portal.domain.jobs.job_spec import PROPORTIONAL_AMOUNTS, JobSpec, job_fields
from portal.selectors.nodes.resources_per_gpu import (
    ResourcesPerGpu,
    following_amounts,
    presumably_typed,
    proportional_amounts,
)
from portal.web.display.formatting import parse_whole_number
from portal.web.jobs.launch.spec_fields import form_values

TYPED_FIELD = "typed_amounts"
"""Hidden field with the form names of the amounts that the user typed, separated by spaces."""
_RECORDED = "recorded"
"""The word that the script of the page adds: without it nobody noticed what was typed."""
GPU_FIELDS = ("gpus_per_task", "milli_per_gpu", "gpu_model", "mig_profile", "pool")


def with_amounts(
    start: Mapping[str, Any],
    shares: Sequence[ResourcesPerGpu],
    typed: Collection[str] | None,
    *,
    refresh: bool,
    fixed: Collection[str] = (),
) -> dict[str, Any]:
    """Return the values of a form with amounts that follow its GPUs.

    ``typed`` are those that were typed, None if that is unknown; ``fixed`` ones (API names) keep their value, which a
    template or a suggestion gave, until the GPUs are changed.
    Without ``refresh`` only missing amounts are filled in.
    """
    present, gpus = present_amounts(start), _gpus(start)
    if typed is None:
        typed = presumably_typed(shares, present, **gpus)
    values = following_amounts(shares, present, typed, **gpus)
    kept = {*fixed} if refresh else {*fixed, *present}
    values = {name: amount for name, amount in values.items() if name not in kept}
    return {**start, **form_values(JobSpec, values), TYPED_FIELD: format_typed(typed)}


def format_typed(typed: Collection[str]) -> str:
    """Return the value of the hidden field for names of amounts."""
    return " ".join(job_fields()[name].form_name for name in PROPORTIONAL_AMOUNTS if name in typed)


def parse_typed(value: str) -> tuple[str, ...] | None:
    """Return the names of amounts of the hidden field, without others; None from a page without its script."""
    words, rules = value.split(), job_fields()
    if _RECORDED not in words:
        return None
    return tuple(name for name in PROPORTIONAL_AMOUNTS if rules[name].form_name in words)


def script_data(shares: Sequence[ResourcesPerGpu]) -> str:
    """Return what the page needs to let amounts follow the GPUs, as JSON."""
    defaults = form_values(JobSpec, proportional_amounts(shares, gpus_per_task=0))
    return json.dumps({"shares": [asdict(share) for share in shares], "defaults": defaults})


def present_amounts(start: Mapping[str, Any]) -> dict[str, int]:
    """Return the amounts of a form in the units of a request; unreadable ones are left out."""
    present = {}
    for name in PROPORTIONAL_AMOUNTS:
        rule = job_fields()[name]
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            present[name] = round(float(start[rule.form_name]) * rule.form_factor)
    return present


def _gpus(start: Mapping[str, Any]) -> dict[str, Any]:
    count = parse_whole_number(start.get("gpus_per_task", 1)) or 0
    shared = count == 1 and not start.get("mig_profile")
    milli = parse_whole_number(start.get("milli_per_gpu", 1000)) if shared else None
    return {
        "pool": str(start.get("pool") or ""),
        "gpu_model": str(start.get("gpu_model") or ""),
        "gpus_per_task": count,
        "milli_per_gpu": milli or JobSpec.milli_per_gpu,
    }

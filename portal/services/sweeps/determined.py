"""Reads an experiment file of Determined AI as a sweep, and lists the keys that have no counterpart. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.domain.end_states import FailureClass
from portal.domain.sweeps import Searcher
from portal.errors import InvalidRequest
from portal.services.yaml_input import load_yaml

MAX_DEPTH = 20
_TRIAL_CLASS = re.compile(r"[\w.]+:[A-Za-z_]\w*")
_SEARCHERS = {
    "single": Searcher.RANDOM,
    "random": Searcher.RANDOM,
    "grid": Searcher.GRID,
    "adaptive_asha": Searcher.ASHA,
    "async_halving": Searcher.ASHA,
}
_DEFAULT_DIVISOR, _DEFAULT_RUNGS, _DEFAULT_PARALLEL = 4, 5, 16
_NO_COUNTERPART = gettext_noop("It has no counterpart and is ignored.")
_REASONS = {
    "environment.image": gettext_noop("Choose an environment with this image."),
    "environment": gettext_noop("Choose an environment."),
    "project": gettext_noop("The project is chosen at the import."),
    "workspace": gettext_noop("The project is chosen at the import."),
    "resources.resource_pool": gettext_noop("The pool is chosen at the import."),
    "resources.priority": gettext_noop("Its scale differs; the job has priority 0."),
    "bind_mounts": gettext_noop("Give volumes instead."),
    "data": gettext_noop("Give variables or volumes instead."),
    "checkpoint_storage": gettext_noop("Trials save into their home or a volume."),
    "searcher.max_time": gettext_noop("The number of steps is unknown without an integer."),
}


@dataclass
class ImportedExperiment:
    """A sweep as fields of REST bodies, and the ignored keys with the reason for each."""

    job: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)


def read_experiment(text: str) -> ImportedExperiment:
    """Return the sweep of an experiment file. Raise InvalidRequest with the field ``experiment``."""
    loaded = load_yaml(text, "experiment")
    if not isinstance(loaded, dict):
        raise _wrong(_("It is not an experiment: its keys are missing."))
    given, found = dict(loaded), ImportedExperiment()
    _read_job(given, found)
    _read_searcher(_section(given, "searcher"), found)
    for name, value in _flatten(_section(given, "hyperparameters"), 0):
        found.parameters[name] = _parameter(name, value, is_grid=found.sweep["searcher"] == Searcher.GRID)
    found.ignored |= {str(key): _(_REASONS.get(str(key), _NO_COUNTERPART)) for key in given}
    return found


def _read_job(given: dict[Any, Any], found: ImportedExperiment) -> None:
    job = found.job
    name = re.sub(r"[^A-Za-z0-9._ -]+", "-", str(given.pop("name", "") or "experiment"))
    job["name"] = name.strip(" .-_")[:90].strip(" .-_") or "experiment"
    entrypoint = given.pop("entrypoint", None)
    if isinstance(entrypoint, str) and _TRIAL_CLASS.fullmatch(entrypoint.strip()):
        raise _wrong(
            _("The entrypoint {entrypoint} is a Trial class of Determined; give a command instead.").format(
                entrypoint=entrypoint
            )
        )
    if isinstance(entrypoint, str) and entrypoint.strip():
        job["command"] = ["/bin/sh", "-c", entrypoint]
    elif isinstance(entrypoint, list) and entrypoint:
        job["command"] = [str(word) for word in entrypoint]
    else:
        raise _wrong(_("It has no entrypoint; give a command or a list of words."))
    resources = _section(given, "resources")
    job["gpus_per_task"] = _count(resources.pop("slots_per_trial", 1), "resources.slots_per_trial", 0)
    if (shm_bytes := resources.pop("shm_size", None)) is not None:
        job["shm_mib"] = max(1, _count(shm_bytes, "resources.shm_size", 0) // 2**20)
    slots = resources.pop("max_slots", None)
    if slots is not None:
        found.sweep["max_parallel"] = max(
            1, _count(slots, "resources.max_slots", 1) // max(1, job["gpus_per_task"])
        )
    _ignore(found, "resources", resources)
    if (restarts := given.pop("max_restarts", None)) is not None:
        job["max_attempts"] = min(20, 1 + _count(restarts, "max_restarts", 0))
        if job["max_attempts"] > 1:
            job["retry_on"] = [
                each.value for each in (FailureClass.NODE_FAILURE, FailureClass.COMMAND_FAILURE)
            ]
    if (grace_s := given.pop("preemption_timeout", None)) is not None:
        job["termination_grace_s"] = min(600, _count(grace_s, "preemption_timeout", 1))
    environment = given.pop("environment", {})
    environment = dict(environment) if isinstance(environment, Mapping) else {"image": environment}
    job["env"] = _variables(environment.pop("environment_variables", []))
    _ignore(found, "environment", environment)
    reproducibility = _section(given, "reproducibility")
    if (seed := reproducibility.pop("experiment_seed", None)) is not None:
        found.sweep["seed"] = _count(seed, "reproducibility.experiment_seed", 0) % 2**31
    _ignore(found, "reproducibility", reproducibility)


def _read_searcher(given: dict[Any, Any], found: ImportedExperiment) -> None:
    name = str(given.pop("name", ""))
    if name not in _SEARCHERS:
        raise _wrong(
            _("The searcher {name!r} is not known; known are {sorted}.").format(
                name=name[:40], sorted=", ".join(sorted(_SEARCHERS))
            )
        )
    sweep = found.sweep
    searcher = _SEARCHERS[name]
    sweep |= {"searcher": searcher.value, "reads_environment": True}
    sweep["metric"] = str(given.pop("metric", "") or "")[:100]
    sweep["direction"] = "minimize" if given.pop("smaller_is_better", True) else "maximize"
    max_trials = given.pop("max_trials", None)
    if searcher is not Searcher.GRID:
        sweep["max_trials"] = 1 if name == "single" else _count(max_trials, "searcher.max_trials", 1)
    parallel = _count(
        given.pop("max_concurrent_trials", _DEFAULT_PARALLEL), "searcher.max_concurrent_trials", 0
    )
    sweep["max_parallel"] = min(parallel or 1000, sweep.get("max_parallel", 1000))
    length = given.pop("max_length", None)
    if isinstance(length, Mapping) and len(length) == 1:
        length = next(iter(length.values()))  # {epochs: 9}, {batches: 900}
    if length is None and isinstance(given.get("max_time"), int):
        length = given.pop("max_time")
    given.pop("time_metric", None)
    if length is not None:
        sweep["max_steps"] = _count(length, "searcher.max_length", 1)
    if searcher is not Searcher.ASHA:
        _ignore(found, "searcher", given)
        return
    divisor = round(float(_number(given.pop("divisor", _DEFAULT_DIVISOR), "searcher.divisor")))
    rungs = _count(given.pop("max_rungs", given.pop("num_rungs", _DEFAULT_RUNGS)), "searcher.max_rungs", 1)
    sweep["reduction_factor"] = max(2, divisor)
    if "max_steps" in sweep:
        sweep["min_steps"] = max(1, int(sweep["max_steps"] / max(2, divisor) ** min(rungs - 1, 30)))
    sweep["pause_pruned"] = not given.pop("stop_once", True)
    if given.get("mode") in ("standard", None):
        given.pop("mode", None)
    _ignore(found, "searcher", given)


def _flatten(given: Mapping[Any, Any], depth: int, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield hyperparameters by dotted name; a mapping with ``type`` is one, others are groups."""
    if depth > MAX_DEPTH:
        raise _wrong(_("Its hyperparameters are nested too deeply."))
    for key, value in given.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and "type" not in value:
            yield from _flatten(value, depth + 1, f"{name}.")
        else:
            yield name, value


def _parameter(name: str, given: Any, *, is_grid: bool) -> Any:
    if not isinstance(given, Mapping):
        return {"choices": [str(given) if isinstance(given, list | None) else given]}
    kind = given.get("type")
    if kind == "const":
        return {"choices": [given.get("val")]}
    if kind == "categorical" and isinstance(given.get("vals"), list):
        return {"choices": list(given["vals"])}
    if kind not in ("int", "double", "log"):
        raise _wrong(
            _("The hyperparameter {name} has the unknown type {kind}.").format(name=name, kind=str(kind)[:40])
        )
    low, high = (_number(given.get(key), f"{name}.{key}") for key in ("minval", "maxval"))
    base = _number(given.get("base", 10.0), f"{name}.base")
    is_log = kind == "log"
    if is_log and not (base > 1 and max(abs(low), abs(high)) * math.log10(base) <= 15):
        raise _wrong(
            _("The hyperparameter {name} has values above 1e15 or a base that is not above 1.").format(
                name=name
            )
        )
    count = given.get("count")
    if is_grid and count is not None:
        total = _count(count, f"{name}.count", 1)
        if total > 1000:
            raise _wrong(_("The hyperparameter {name} has more than 1000 values.").format(name=name))
        points = [low + index * (high - low) / max(1, total - 1) for index in range(total)]
        values = [base**each if is_log else round(each) if kind == "int" else each for each in points]
        return {"choices": list(dict.fromkeys(values))}
    if is_log:
        return {"low": base**low, "high": base**high, "log": True, "integer": False}
    return {"low": low, "high": high, "integer": kind == "int"}


def _variables(given: Any) -> dict[str, str]:
    lines = given.get("gpu") or given.get("cpu") or [] if isinstance(given, Mapping) else given or []
    if not isinstance(lines, list):
        raise _wrong(_("environment.environment_variables is not a list of NAME=VALUE."))
    return {name: value for name, _, value in (str(line).partition("=") for line in lines)}


def _section(given: dict[Any, Any], name: str) -> dict[Any, Any]:
    value = given.pop(name, None) or {}
    if not isinstance(value, Mapping):
        raise _wrong(_("{name} is not a mapping.").format(name=name))
    return dict(value)


def _ignore(found: ImportedExperiment, section: str, rest: Mapping[Any, Any]) -> None:
    for key in rest:
        path = f"{section}.{key}"
        found.ignored[path] = _(_REASONS.get(path, _NO_COUNTERPART))


def _count(value: Any, name: str, minimum: int) -> int:
    number = _number(value, name)
    if number != int(number) or number < minimum:
        raise _wrong(
            _("{name} is not a whole number of at least {minimum}.").format(name=name, minimum=minimum)
        )
    return int(number)


def _number(value: Any, name: str) -> float | int:
    try:
        number = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    except (TypeError, ValueError) as problem:
        raise _wrong(_("{name} is missing or is no number.").format(name=name)) from problem
    if not abs(number) <= 1e15:
        raise _wrong(_("{name} is too large.").format(name=name))
    return number


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(fields={"experiment": message})

"""Reads an experiment file of Determined AI as a sweep. Pure.

Each key of the file is used, or is listed as ignored or as used in another form; none is changed without a word.
Its keys and defaults: https://docs.determined.ai/latest/reference/training/experiment-config-reference.html.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.domain.jobs.end_states import FailureClass
from portal.domain.jobs.job_spec import MAX_TASKS
from portal.domain.sweeps.sweeps import MAX_PARALLEL, Searcher
from portal.errors import InvalidRequest
from portal.services.sweeps.determined_entrypoint import read_entrypoint
from portal.services.yaml_input import load_yaml

MAX_DEPTH = 20
_SEARCHERS = {
    "single": Searcher.RANDOM,
    "random": Searcher.RANDOM,
    "grid": Searcher.GRID,
    "adaptive_asha": Searcher.ASHA,
    "async_halving": Searcher.ASHA,
}
_DEFAULT_DIVISOR, _DEFAULT_RUNGS, _DEFAULT_PARALLEL, _DEFAULT_RESTARTS = 4, 5, 16, 5
_MAX_RESTARTS, _MAX_GRACE_S, _SEEDS = 19, 600, 2**31
_LENGTH_UNITS = ("batches", "epochs", "records")
_SHM_SIZE = re.compile(r"([0-9]*\.?[0-9]+) ?(?:([kmgtp])(?:i?b)?|b)?", re.IGNORECASE)
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
    "searcher.max_time": gettext_noop("max_length is used instead."),
    "searcher.max_trials": gettext_noop("This searcher does not use it."),
    "searcher.max_rungs": gettext_noop("This searcher does not use it."),
    "searcher.num_rungs": gettext_noop("This searcher does not use it."),
    "searcher.divisor": gettext_noop("This searcher does not use it."),
    "searcher.mode": gettext_noop("This searcher does not use it."),
    "searcher.stop_once": gettext_noop("This searcher does not use it."),
    "searcher.bracket_rungs": gettext_noop("This searcher does not use it."),
    "resources.slots": gettext_noop("slots_per_trial is used instead."),
    "resources.max_slots": gettext_noop("Trials have no GPUs."),
}


@dataclass
class ImportedExperiment:
    """A sweep as fields of REST bodies.

    ``ignored`` and ``changed``: the reasons for keys of the file without a counterpart, and in another form.
    """

    job: dict[str, Any] = field(default_factory=dict)
    sweep: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    is_single_node: bool = False

    def spread(self, largest_node_gpus: int) -> None:
        """Divide the GPUs of a trial into the fewest equal tasks of which each fits a node, as Determined does.

        More than a job may have are left as they are; its check refuses them.
        """
        slots = int(self.job["gpus_per_task"])
        if self.is_single_node or not 0 < largest_node_gpus < slots:
            return
        counts = range(2, min(slots, MAX_TASKS) + 1)
        fitting = (count for count in counts if slots % count == 0 and slots // count <= largest_node_gpus)
        if (tasks := next(fitting, None)) is None:
            return
        self.job |= {"tasks": tasks, "gpus_per_task": slots // tasks}
        self.changed["resources.slots_per_trial"] = _(
            "{slots} GPUs are {tasks} tasks of {gpus}: the largest node has {largest}."
        ).format(slots=slots, tasks=tasks, gpus=slots // tasks, largest=largest_node_gpus)


class _Section:
    """A mapping of the file. Keys are taken one by one; ``close`` lists those that nobody has taken.

    A key with null counts as absent, as in Determined.
    """

    def __init__(self, given: Any, path: str, found: ImportedExperiment) -> None:
        if not isinstance(given, Mapping | None):
            raise _wrong(_("{name} is not a mapping.").format(name=path))
        items = (given or {}).items()
        self._values = {key: value for key, value in items if value is not None}
        self._nulls = [key for key, value in items if value is None]
        self._known: set[str] = set()
        self._path, self._found = path, found

    def take(self, name: str, default: Any = None) -> Any:
        self._known.add(name)
        return self._values.pop(name, default)

    def has(self, name: str) -> bool:
        return name in self._values

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def section(self, name: str) -> _Section:
        return _Section(self.take(name), self.path(name), self._found)

    def whole(self, name: str, default: int | None, minimum: int, maximum: int | None = None) -> int | None:
        """Return a whole number; one above ``maximum`` becomes it, and is listed."""
        value = self.take(name)
        if value is None:
            return default
        number = _whole(value, self.path(name), minimum)
        if maximum is not None and number > maximum:
            self.changed(name, _("It is {maximum}, the largest value here.").format(maximum=maximum))
            return maximum
        return number

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise _wrong(_("{name} is neither true nor false.").format(name=self.path(name)))
        return value

    def text(self, name: str) -> str:
        value = self.take(name, "")
        if not isinstance(value, str):
            raise _wrong(_("{name} is not text; put it into quotes.").format(name=self.path(name)))
        return value

    def changed(self, name: str, message: str) -> None:
        self._found.changed[self.path(name)] = message

    def ignored(self, name: str, message: str = "") -> None:
        path = self.path(name)
        self._found.ignored[path] = message or _(_REASONS.get(path, _NO_COUNTERPART))

    def close(self) -> None:
        for name in [*self._values, *(each for each in self._nulls if each not in self._known)]:
            self.ignored(str(name))


def read_experiment(text: str) -> ImportedExperiment:
    """Return the sweep of an experiment file. Raise InvalidRequest with the field ``experiment``.

    A generic task, which has no searcher, is one trial.
    """
    return read_keys(load_yaml(text, "experiment"))


def read_keys(loaded: Any) -> ImportedExperiment:
    """Return the sweep of the content of an experiment file. Raise as ``read_experiment``."""
    if not isinstance(loaded, dict):
        raise _wrong(_("It is not an experiment: its keys are missing."))
    found = ImportedExperiment()
    top = _Section(loaded, "", found)
    is_experiment = top.has("searcher")
    _read_job(top, found, is_experiment=is_experiment)
    slots = found.job["gpus_per_task"]
    if is_experiment:
        _read_searcher(top.section("searcher"), found)
    else:
        top.take("searcher")
        found.sweep |= {"searcher": Searcher.RANDOM.value, "reads_environment": True, "max_trials": 1}
        found.sweep.setdefault("max_parallel", 1)
        found.changed["searcher"] = _("There is none: one trial runs.")
    _read_environment(top.section("environment"), found, slots)
    parameters = top.take("hyperparameters", {})
    if not isinstance(parameters, Mapping):
        raise _wrong(_("{name} is not a mapping.").format(name="hyperparameters"))
    for path, value in _flatten(parameters, found, 0):
        name = ".".join(path)
        if name in found.parameters:
            raise _wrong(_("The hyperparameter {name} is given twice, also as a group.").format(name=name))
        is_grid = found.sweep["searcher"] == Searcher.GRID
        found.parameters[name] = _Hyperparameter(name, found).read(value, is_grid=is_grid)
    top.close()
    return found


def _read_job(top: _Section, found: ImportedExperiment, *, is_experiment: bool) -> None:
    job = found.job
    given = top.take("name", "")
    name = str(given)
    if not isinstance(given, str | int | float) or isinstance(given, bool):
        raise _wrong(_("{name} is not text; put it into quotes.").format(name="name"))
    words = re.sub(r"[^A-Za-z0-9._ -]+", "-", name)
    job["name"] = words.strip(" .-_")[:90].strip(" .-_") or "experiment"
    if name and job["name"] != given:
        top.changed("name", _("It is {name} here.").format(name=job["name"]))
    entrypoint = read_entrypoint(top.take("entrypoint"))
    job["command"] = entrypoint.command
    if entrypoint.launcher != "none":
        job |= {"launcher": entrypoint.launcher, "launcher_options": entrypoint.options}
    found.ignored |= entrypoint.ignored
    found.changed |= entrypoint.changed
    _read_resources(top.section("resources"), found)
    restarts = top.whole("max_restarts", _DEFAULT_RESTARTS if is_experiment else None, 0, _MAX_RESTARTS)
    if restarts is not None:
        job["max_attempts"] = 1 + restarts
        if restarts:
            job["retry_on"] = [FailureClass.NODE_FAILURE.value, FailureClass.COMMAND_FAILURE.value]
    if (grace_s := top.whole("preemption_timeout", None, 1, _MAX_GRACE_S)) is not None:
        job["termination_grace_s"] = grace_s
    reproducibility = top.section("reproducibility")
    if (seed := reproducibility.whole("experiment_seed", None, 0)) is not None:
        found.sweep["seed"] = seed % _SEEDS
        if seed >= _SEEDS:
            reproducibility.changed("experiment_seed", _("It is {seed} here.").format(seed=seed % _SEEDS))
    reproducibility.close()


def _read_resources(resources: _Section, found: ImportedExperiment) -> None:
    name = "slots" if resources.has("slots") and not resources.has("slots_per_trial") else "slots_per_trial"
    slots = found.job["gpus_per_task"] = resources.whole(name, 1, 0) or 0
    found.is_single_node = resources.flag("is_single_node", default=False)
    if (size := resources.take("shm_size")) is not None:
        size_bytes = _size_bytes(size, resources.path("shm_size"))
        found.job["shm_mib"] = max(1, math.ceil(size_bytes / 2**20))
        if size_bytes != found.job["shm_mib"] * 2**20:
            resources.changed("shm_size", _("It is {mib} MiB here.").format(mib=found.job["shm_mib"]))
    if slots and (most := resources.whole("max_slots", None, 1)) is not None:
        parallel = found.sweep["max_parallel"] = min(MAX_PARALLEL, max(1, most // slots))
        if parallel * slots != most:
            resources.changed("max_slots", _("{count} trials in parallel.").format(count=parallel))
    resources.close()


def _read_environment(environment: _Section, found: ImportedExperiment, slots: int) -> None:
    path, given = environment.path("environment_variables"), environment.take("environment_variables", [])
    if isinstance(given, Mapping):
        kinds = _Section(given, path, found)
        used = next((kind for kind in ("cuda", "gpu", "rocm") if kinds.has(kind)), "cuda") if slots else "cpu"
        path, given = f"{path}.{used}", kinds.take(used, [])
        for kind in ("cpu", "cuda", "gpu", "rocm"):
            if kinds.take(kind) is not None:
                kinds.ignored(kind, _("Trials use the variables for {kind}.").format(kind=used))
        kinds.close()
    if not isinstance(given, list) or not all(isinstance(line, str) for line in given):
        raise _wrong(_("{path} is not a list of NAME=VALUE.").format(path=path))
    variables: dict[str, str] = {}
    for line in given:
        name, sign, value = line.partition("=")
        if not sign:
            found.ignored[f"{path}.{name}"[:100]] = _("It has no value: write NAME=VALUE.")
            continue
        if name in variables:
            found.changed[f"{path}.{name}"[:100]] = _("It is given twice; the last value is used.")
        variables[name] = value
    found.job["env"] = variables
    environment.close()


def _read_searcher(given: _Section, found: ImportedExperiment) -> None:
    name = given.text("name")
    if name not in _SEARCHERS:
        raise _wrong(
            _("The searcher {name!r} is not known; known are {sorted}.").format(
                name=name[:40], sorted=", ".join(sorted(_SEARCHERS))
            )
        )
    sweep, searcher = found.sweep, _SEARCHERS[name]
    sweep |= {"searcher": searcher.value, "reads_environment": True, "metric": given.text("metric")}
    sweep["direction"] = "minimize" if given.flag("smaller_is_better", default=True) else "maximize"
    if name == "single":
        sweep["max_trials"] = 1
    elif searcher is not Searcher.GRID:
        sweep["max_trials"] = _whole(given.take("max_trials"), given.path("max_trials"), 1)
    parallel = given.whole("max_concurrent_trials", _DEFAULT_PARALLEL, 0, MAX_PARALLEL)
    if parallel == 0:
        given.changed(
            "max_concurrent_trials",
            _("It is {maximum}, the largest value here.").format(maximum=MAX_PARALLEL),
        )
    sweep["max_parallel"] = min(parallel or MAX_PARALLEL, sweep.get("max_parallel", MAX_PARALLEL))
    _read_length(given, sweep)
    if searcher is Searcher.ASHA:
        _read_rungs(given, sweep, "num_rungs" if name == "async_halving" else "max_rungs")
    given.close()


def _read_length(given: _Section, sweep: dict[str, Any]) -> None:
    """Read the length of a trial, whose unit is that in which its program reports."""
    name = "max_length" if given.has("max_length") else "max_time"
    length, unit = given.take(name), ""
    if name == "max_length" and isinstance(length, Mapping):
        if len(length) != 1 or next(iter(length)) not in _LENGTH_UNITS:
            raise _wrong(
                _("{name} is neither a whole number nor one of {units} with a number.").format(
                    name=given.path(name), units=", ".join(_LENGTH_UNITS)
                )
            )
        ((unit, length),) = length.items()
    if length is not None or unit:
        sweep["max_steps"] = _whole(length, given.path(name), 1)
    message = _("The program counts the steps that it reports in {unit}.")
    if unit:
        given.changed(name, message.format(unit=unit))
    if metric := given.text("time_metric"):
        given.changed("time_metric", message.format(unit=metric[:100]))


def _read_rungs(given: _Section, sweep: dict[str, Any], rungs_key: str) -> None:
    """Read the rungs of ASHA, which has one bracket with all of them."""
    exact = _number(given.take("divisor", _DEFAULT_DIVISOR), given.path("divisor"))
    divisor = sweep["reduction_factor"] = max(2, round(exact))
    if divisor != exact:
        given.changed(
            "divisor", _("It is {divisor} here, a whole number of at least 2.").format(divisor=divisor)
        )
    brackets = given.take("bracket_rungs", [])
    if not isinstance(brackets, list):
        raise _wrong(_("{name} is not a list.").format(name=given.path("bracket_rungs")))
    counts = [_whole(each, given.path("bracket_rungs"), 1) for each in brackets]
    if counts:
        rungs, rungs_key = max(counts), "bracket_rungs"
        if len(counts) > 1:
            given.changed("bracket_rungs", _("One bracket of {rungs} rungs.").format(rungs=rungs))
    else:
        rungs = given.whole(rungs_key, _DEFAULT_RUNGS, 1) or 1
    if (steps := sweep.get("max_steps")) is not None:
        sweep["min_steps"] = max(1, steps // divisor ** min(rungs - 1, 60))
        fitting = next(count for count in range(1, 62) if steps < divisor**count)
        if rungs > fitting:
            given.changed(rungs_key, _("Only {count} rungs fit.").format(count=fitting))
    sweep["pause_pruned"] = not given.flag("stop_once", default=True)
    mode = given.text("mode")
    if mode not in ("", "aggressive", "standard", "conservative"):
        raise _wrong(_("searcher.mode is not aggressive, standard or conservative."))
    if mode in ("standard", "conservative"):
        given.changed("mode", _("All trials are in one bracket, as with aggressive."))


def _flatten(
    given: Mapping[Any, Any], found: ImportedExperiment, depth: int, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield hyperparameters by path; a mapping with ``type`` is one, others are groups."""
    if depth > MAX_DEPTH:
        raise _wrong(_("Its hyperparameters are nested too deeply."))
    for key, value in given.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and "type" not in value:
            if not value:
                found.ignored[f"hyperparameters.{'.'.join(path)}"] = _("The group is empty.")
            yield from _flatten(value, found, depth + 1, path)
        else:
            yield path, value


@dataclass
class _Hyperparameter:
    name: str
    found: ImportedExperiment

    @property
    def path(self) -> str:
        return f"hyperparameters.{self.name}"

    def read(self, given: Any, *, is_grid: bool) -> Any:
        if not isinstance(given, Mapping):
            return {"choices": [self._value(given)]}
        section = _Section(given, self.path, self.found)
        kind = section.take("type")
        if kind == "const":
            if "val" not in given:
                raise _wrong(_("{name} is missing.").format(name=f"{self.name}.val"))
            parameter = {"choices": [self._value(section.take("val"))]}
        elif kind == "categorical" and isinstance(given.get("vals"), list):
            parameter = {"choices": [self._value(each) for each in section.take("vals")]}
        elif kind in ("int", "double", "log"):
            parameter = self._range(section, kind, is_grid=is_grid)
        else:
            raise _wrong(
                _("The hyperparameter {name} has the unknown type {kind}.").format(
                    name=self.name, kind=str(kind)[:40]
                )
            )
        section.close()
        return parameter

    def _value(self, value: Any) -> Any:
        """Return a value of a parameter: lists, mappings and null are JSON texts."""
        if not isinstance(value, list | Mapping | None):
            return value
        self.found.changed[self.path] = _("The program gets lists, mappings and null as JSON texts.")
        return json.dumps(value, ensure_ascii=False)

    def _range(self, section: _Section, kind: str, *, is_grid: bool) -> dict[str, Any]:
        read = _integer if kind == "int" else _number
        low, high = (read(section.take(key), f"{self.name}.{key}") for key in ("minval", "maxval"))
        if not low < high:
            raise _wrong(_("{name}.minval is not below {name}.maxval.").format(name=self.name))
        base = 1.0
        if kind == "log":
            base = _number(section.take("base", 10.0), f"{self.name}.base")
            if not (base > 1 and max(abs(low), abs(high)) * math.log10(base) <= 15):
                raise _wrong(
                    _(
                        "The hyperparameter {name} has values above 1e15 or a base that is not above 1."
                    ).format(name=self.name)
                )
        if is_grid and section.has("count"):
            return self._points(section, kind, low, high, base)
        if section.take("count") is not None:
            section.ignored("count", _("Only a grid uses it."))
        if kind == "log":
            return {"low": base**low, "high": base**high, "log": True, "integer": False}
        return {"low": low, "high": high, "integer": kind == "int"}

    def _points(self, section: _Section, kind: str, low: float, high: float, base: float) -> dict[str, Any]:
        """Return the values of a range in a grid: equally spaced with both ends, or the middle."""
        total = _whole(section.take("count"), f"{self.name}.count", 1)
        if kind == "int" and total > (most := int(high - low + 1)):
            section.changed("count", _("The range has only {count} whole numbers.").format(count=most))
            total = most
        if total > 1000:
            raise _wrong(_("The hyperparameter {name} has more than 1000 values.").format(name=self.name))
        points = [(low + high) / 2]
        if total > 1:
            points = [low + index * (high - low) / (total - 1) for index in range(total)]
        if kind == "int":  # halves are rounded away from zero
            return {"choices": [int(math.copysign(math.floor(abs(each) + 0.5), each)) for each in points]}
        return {"choices": [base**each if kind == "log" else each for each in points]}


def _size_bytes(value: Any, name: str) -> int:
    """Return a size in bytes of a whole number, or of a text such as 4g or 1.5 GiB."""
    if not isinstance(value, str):
        return _whole(value, name, 0)
    match = _SHM_SIZE.fullmatch(value.strip())
    if match is None or len(value) > 40:
        raise _wrong(_("{name} is not a size such as 4g or 512MiB.").format(name=name))
    factor = 1024 ** (" kmgtp".index(match[2].lower()) if match[2] else 0)
    return _whole(math.floor(float(match[1]) * factor), name, 0)


def _integer(value: Any, name: str) -> int:
    number = _number(value, name)
    if number != int(number):
        raise _wrong(_("{name} is not a whole number.").format(name=name))
    return int(number)


def _whole(value: Any, name: str, minimum: int) -> int:
    number = _number(value, name)
    if number != int(number) or number < minimum:
        raise _wrong(
            _("{name} is not a whole number of at least {minimum}.").format(name=name, minimum=minimum)
        )
    return int(number)


def _number(value: Any, name: str) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(_("{name} is missing or is not a number.").format(name=name))
    if not abs(value) <= 1e15:
        raise _wrong(_("{name} is too large.").format(name=name))
    return value


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(fields={"experiment": message})

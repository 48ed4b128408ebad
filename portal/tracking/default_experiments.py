"""The experiment that MLflow's client uses if a program names none: id 0, name Default.

On a server of its own it always exists. Here each project has one, with an id of its own, which is created when it is
first used; requests may name it by 0.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

from portal.errors import InvalidRequest, NotFound
from portal.tracking.client import call

DEFAULT_ID, DEFAULT_NAME = "0", "Default"
_ONE, _SEVERAL = ("experiment_id", "experimentId"), ("experiment_ids", "experimentIds")
_CREATES_IN_DEFAULT = ("runs/create", "logged-models")
"""Endpoints whose requests may leave out the experiment."""


def ensure_experiment(project: str, name: str) -> str:
    """Return the id of the experiment of a project (public id), which is created if needed."""
    with suppress(NotFound):
        return _find(project, name)
    with suppress(InvalidRequest):  # another request was faster
        return str(call(project, "POST", "experiments/create", {"name": name})["experiment_id"])
    return _find(project, name)


def default_experiment(project: str, *, create: bool) -> str:
    """Return the id of the project's default experiment. Raise NotFound if there is none, without ``create``."""
    return _ensure_default(project) if create else _find(project, DEFAULT_NAME)


@functools.lru_cache(maxsize=10_000)
def _ensure_default(project: str) -> str:
    return ensure_experiment(project, DEFAULT_NAME)  # its id never changes


def _find(project: str, name: str) -> str:
    found = call(project, "GET", "experiments/get-by-name", experiment_name=name)
    return str(found["experiment"]["experiment_id"])


def experiment_of(content: dict[str, Any]) -> str:
    """Return the id of the experiment in the body of a request, "" if it has none."""
    return str(next((content[name] for name in _ONE if content.get(name) is not None), ""))


def names_default(content: dict[str, Any], endpoint: str) -> bool:
    """Return whether the body of a request to an endpoint names the default experiment, or leaves it out."""
    listed = (each for name in _SEVERAL if isinstance(content.get(name), list) for each in content[name])
    is_left_out = endpoint in _CREATES_IN_DEFAULT and not experiment_of(content)
    return is_left_out or any(map(_is_default, [*(content.get(name) for name in _ONE), *listed]))


def replace_default(content: dict[str, Any], endpoint: str, experiment: str) -> None:
    """Replace the id 0 of the default experiment in the body of a request by its own id."""
    if endpoint in _CREATES_IN_DEFAULT and not experiment_of(content):
        content["experiment_id"] = experiment
    for name in _ONE:
        if _is_default(content.get(name)):
            content[name] = experiment
    for name in _SEVERAL:
        if isinstance(content.get(name), list):
            content[name] = [experiment if _is_default(each) else each for each in content[name]]


def _is_default(value: Any) -> bool:
    return value == DEFAULT_ID or (value == 0 and type(value) is int)

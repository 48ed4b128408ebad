"""Options of launchers, declared once: form, REST and validation read the same table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OptionValue = bool | int | float | str
PATH_PATTERN = r"[^\x00-\x1f]{1,500}"


@dataclass(frozen=True)
class LauncherOption:
    """One option of a launcher; its type is that of its default.

    ``minimum`` and ``maximum`` are inclusive bounds of a number; ``pattern`` must match a whole text.
    """

    name: str
    default: OptionValue
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""

    @property
    def type_name(self) -> str:
        """Name of its type in JSON."""
        return {bool: "boolean", int: "integer", float: "number", str: "string"}[type(self.default)]

    def error_of(self, value: object) -> str | None:
        """Return what is wrong with the value, or None."""
        expected = (int, float) if isinstance(self.default, float) else type(self.default)
        if not isinstance(value, expected) or isinstance(value, bool) != isinstance(self.default, bool):
            return f"Must be of the type {self.type_name}."
        if self.choices and value not in self.choices:
            return f"Choose one of {', '.join(self.choices)}."
        if isinstance(value, str) and self.pattern and value and not re.fullmatch(self.pattern, value):
            return f"Must match {self.pattern}."
        if self.minimum is None or self.maximum is None or not isinstance(value, int | float):
            return None
        in_range = self.minimum <= value <= self.maximum
        return None if in_range else f"Must be between {self.minimum:g} and {self.maximum:g}."


def option_errors(options: Sequence[LauncherOption], values: Mapping[str, object]) -> list[str]:
    """Return what is wrong with the values of a launcher's options."""
    known = {each.name: each for each in options}
    errors = []
    for name, value in values.items():
        if name not in known:
            offered = f"it has {', '.join(known)}" if known else "it has none"
            errors.append(f"The launcher has no option {name}; {offered}.")
        elif fault := known[name].error_of(value):
            errors.append(f"{name}: {fault}")
    return errors


def option_values(
    options: Sequence[LauncherOption], values: Mapping[str, OptionValue]
) -> dict[str, OptionValue]:
    """Return the values of all options, with defaults for those not given."""
    return {each.name: values.get(each.name, each.default) for each in options}

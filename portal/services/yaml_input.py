"""Reads YAML that users write."""

from __future__ import annotations

from typing import Any

import yaml

from portal.errors import InvalidRequest

MAX_BYTES = 256 * 1024


class _AliasError(Exception):
    """The text has an alias."""


class _Loader(yaml.SafeLoader):
    """Safe loader without aliases: a small text cannot stand for a huge one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise _AliasError
        return super().compose_node(parent, index)


def load_yaml(text: str, field: str) -> Any:
    """Return the content of a YAML text. Raise InvalidRequest for ``field``."""
    try:
        if len(text.encode()) > MAX_BYTES:
            problem = f"The text is larger than {MAX_BYTES // 1024} KiB."
        else:
            return yaml.load(text, _Loader)  # noqa: S506 - a subclass of the safe loader
    except yaml.YAMLError as error:
        problem = f"It is not valid YAML: {str(error)[:300]}"
    except RecursionError:
        problem = "It is nested too deeply."
    except _AliasError:
        problem = "Aliases (*name) are not supported; write the value out."
    except ValueError as error:  # such as a date that does not exist
        problem = f"It contains a value that cannot be read: {str(error)[:200]}"
    raise InvalidRequest(fields={field: problem})

#!/usr/bin/env python3
"""Fairway's command line: Django's own, inside an environment that it makes for itself when there is none."""

import os
import sys

HYPHENATED_COMMANDS = {
    name.replace("_", "-"): name
    for name in ("begin_recovery", "check_all", "node_setup", "policy_docs", "subject_docs")
}


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit("Fairway needs Python 3.11 or newer; this is Python %d.%d." % sys.version_info[:2])
    from pathlib import Path

    from portal.bootstrap.environment import BootstrapError, enter

    try:
        argv = enter(Path(__file__).resolve().parent, [os.path.abspath(__file__), *sys.argv[1:]])
    except BootstrapError as error:
        sys.exit(str(error))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.config.settings")
    from portal.config.data_paths import apply_data_dir_option
    from portal.config.variables import SettingsRefused

    apply_data_dir_option(argv)
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    if len(argv) > 1:
        argv[1] = HYPHENATED_COMMANDS.get(argv[1], argv[1])
    try:
        execute_from_command_line(argv)
    except (ImproperlyConfigured, SettingsRefused) as error:
        sys.exit(f"CommandError: {error}")
    except ModuleNotFoundError as error:
        settings = os.environ["DJANGO_SETTINGS_MODULE"]
        if error.name is None or not f"{settings}.".startswith(f"{error.name}."):
            raise
        sys.exit(f"CommandError: There are no settings {settings}.")


if __name__ == "__main__":
    main()

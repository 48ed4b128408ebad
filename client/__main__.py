"""Runs the command as ``python -m``."""

from .cli import main

raise SystemExit(main())

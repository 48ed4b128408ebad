"""An engine harness for a file of faults."""

from tests.engine_harness import harness, shared_harness

__all__ = ["harness", "shared_harness"]

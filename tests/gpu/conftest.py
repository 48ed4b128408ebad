"""An engine harness for the jobs of the GPU tests."""

from tests.engine_harness import harness, shared_harness

__all__ = ["harness", "shared_harness"]

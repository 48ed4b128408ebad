"""An engine room for a file of faults."""

from tests.engine_room import room, shared_room

__all__ = ["room", "shared_room"]

"""Rig nodes, and an engine room, for the tests of the engine."""

from tests.engine_room import room, shared_room
from tests.rig.plugin import lab_image, make_rig, rig, rig_cluster, rig_nodes, tiny_image

__all__ = ["lab_image", "make_rig", "rig", "rig_cluster", "rig_nodes", "room", "shared_room", "tiny_image"]

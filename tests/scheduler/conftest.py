"""Rig nodes, and an engine harness, for the tests of the engine."""

from tests.engine_harness import harness, shared_harness
from tests.rig.plugin import lab_image, make_rig, rig, rig_cluster, rig_nodes, tiny_image

__all__ = [
    "harness",
    "lab_image",
    "make_rig",
    "rig",
    "rig_cluster",
    "rig_nodes",
    "shared_harness",
    "tiny_image",
]

"""Rig nodes for the tests of the engine."""

from tests.rig.plugin import lab_image, make_rig, rig, rig_cluster, rig_nodes, tiny_image

__all__ = ["lab_image", "make_rig", "rig", "rig_cluster", "rig_nodes", "tiny_image"]

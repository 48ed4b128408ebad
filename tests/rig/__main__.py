"""Rig nodes for trying by hand: `python -m tests.rig up --nodes 2`, `list`, `down`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.rig import records
from tests.rig.agent import rig_agent
from tests.rig.cluster import RigCluster
from tests.rig.images import rig_image
from tests.rig.needs import missing_for_rig
from tests.rig.rig import Rig


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.rig", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make nodes that stay until `down`")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--gpus", type=int, default=4, help="pretend GPUs a node")
    up.add_argument("--images", nargs="*", default=["tiny"], choices=["tiny", "jupyterlab"])
    up.add_argument("--enrol", action="store_true", help="enrol them in a cluster of their own")
    commands.add_parser("list", help="what stands")
    down = commands.add_parser("down", help="take every kept run down, or the named one")
    down.add_argument("run", nargs="?")
    chosen = parser.parse_args()
    reason = missing_for_rig()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    return {"up": make, "list": show, "down": take_down}[chosen.command](chosen)


def make(chosen: argparse.Namespace) -> int:
    stores = [rig_image(name).store for name in chosen.images]
    rig = Rig(chosen.nodes, image_stores=stores, gpus=chosen.gpus, kept=True).up()
    assert rig.record is not None
    print(f"run {rig.record.run}; this machine is {rig.portal_address} to the nodes")
    cluster = RigCluster(Path(rig.record.folder) / "keys", rig_agent()) if chosen.enrol else None
    for node in rig.nodes:
        print(f"\n{node.name}  {node.address}:{node.port}  {node.host_key()}")
        print(f"  console: {' '.join(node.console())} sh")
        if cluster is not None:
            cluster.enrol(node)
            print(f"  ssh -i {cluster.keys['control']} fairway@{node.address}")
    print(f"\npython -m tests.rig down {rig.record.run}")
    return 0


def show(_: argparse.Namespace) -> int:
    for record in records.all_runs():
        state = "kept" if record.kept else "in use" if records.owner_is_alive(record) else "left behind"
        print(f"{record.run}  {state}  {', '.join(node.name for node in record.nodes)}  {record.folder}")
    return 0


def take_down(chosen: argparse.Namespace) -> int:
    with records.machine_lock():
        for record in records.all_runs():
            if record.run == chosen.run or (chosen.run is None and record.kept):
                records.remove_run(record)
                print(f"took down {record.run}")
        records.clean_leftovers()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A run of the rig: some nodes on one bridge, made together and taken down together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self

from tests.rig import network, records
from tests.rig.node import RigNode


class Rig:
    """Nodes made for one run. Use it as a context manager, or call `up` and `down`."""

    def __init__(
        self,
        nodes: int = 2,
        *,
        image_stores: Sequence[Path] | Sequence[Sequence[Path]] = (),
        gpus: int = 4,
        state_disk_mib: int = 1024,
        kept: bool = False,
    ) -> None:
        """`image_stores` are the stores every node shares, or one list of stores per node."""
        self._count = nodes
        self._stores = [_stores_of(image_stores, index) for index in range(nodes)]
        self._gpus = gpus
        self._state_disk_mib = state_disk_mib
        self._kept = kept
        self._owner: IO[str] | None = None
        self.record: records.RunRecord | None = None
        self.nodes: list[RigNode] = []
        self.portal_address = ""

    def up(self) -> Self:
        """Makes and boots the nodes; cleans what killed runs have left before it begins."""
        with records.machine_lock():
            records.clean_leftovers()
            self.record, self._owner = records.new_run(self._kept)
            subnet = network.free_subnet()
            network.make_bridge(self.record.bridge, subnet)
        self.portal_address = f"{subnet}.1"
        try:
            for index in range(self._count):
                self.nodes.append(self._plan_node(index, subnet))
            self.record.save()
            with ThreadPoolExecutor(max_workers=4) as pool:
                list(pool.map(_make_and_boot, self.nodes))
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """Takes everything down that this run has made."""
        if self.record is not None:
            for node in self.nodes:
                node.shut_down()
            records.remove_run(self.record)
        if self._owner is not None:
            self._owner.close()
        self.record, self._owner, self.nodes = None, None, []

    def add_address(self, address: str) -> None:
        """Lets this machine answer at one more address that nodes reach, such as a cloud's metadata address."""
        assert self.record is not None
        network.ip("addr", "add", f"{address}/32", "dev", self.record.bridge)

    def __enter__(self) -> Self:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    def _plan_node(self, index: int, subnet: str) -> RigNode:
        assert self.record is not None
        run = self.record.run
        record = records.NodeRecord(
            name=f"gn{index + 1}", netns=f"fwr{run}n{index + 1}", veth=f"fwr{run}v{index + 1}"
        )
        self.record.nodes.append(record)
        return RigNode(
            run=self.record,
            record=record,
            address=f"{subnet}.{network.FIRST_NODE_ADDRESS + index}",
            gateway=f"{subnet}.1",
            image_stores=self._stores[index],
            state_disk_mib=self._state_disk_mib,
            gpu_count=self._gpus,
        )


def _make_and_boot(node: RigNode) -> None:
    node.make()
    node.boot()


def _stores_of(stores: Sequence[Path] | Sequence[Sequence[Path]], index: int) -> tuple[Path, ...]:
    if stores and not isinstance(stores[0], Path):
        return tuple(stores[index])  # type: ignore[arg-type]
    return tuple(stores)  # type: ignore[arg-type]

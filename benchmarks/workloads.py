"""Workloads: which arrays are saved, and onto what they are loaded. Knows no library of arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from benchmarks.leaf import Leaf
from benchmarks.llama import Model, training_state

WHOLE = "whole"
PARAMS = "params"
REPLICATED = "replicated"
SAVED = "saved"  # no target of a load: as the arrays lay when they were saved

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Workload:
    """Arrays to save, and the loads that follow.

    Attributes:
        name: as on the command line.
        leaves: the arrays, in the order in which they lie in a plain file.
        mesh: the mesh that they are saved from; None: one device, no mesh.
        targets: what is loaded after each save, in turn: `WHOLE`, `PARAMS` (only the leaves below
            `params`), `REPLICATED`, or a mesh such as "8x1".
        is_quick: whether it is for a look only, and need not wait until the machine is calm.
        processes: how many a job has that saves and loads it, each with as many of the devices; 1: no job.
    """

    name: str
    leaves: tuple[Leaf, ...]
    mesh: tuple[int, int] | None = None
    targets: tuple[str, ...] = (WHOLE,)
    is_quick: bool = False
    processes: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays together."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def devices(self) -> int:
        """How many devices a worker has to have, or all workers of a job together."""
        return self.mesh[0] * self.mesh[1] if self.mesh else 1

    def held_bytes(self, target: str) -> int:
        """Bytes that a load onto `target` takes, or with `SAVED` the state; the replicas of one process may be one."""
        return sum(leaf.nbytes * self._copies(leaf, target) for leaf in self.wanted(target))

    def _copies(self, leaf: Leaf, target: str) -> int:
        mesh = self.mesh_of(target)
        if self.processes == 1 or mesh is None:
            return 1
        cut_over = {axis for part in leaf.spec if part for axis in part.split("+")} if target != REPLICATED else set()
        return math.prod(size for axis, size in zip("xy", mesh, strict=True) if axis not in cut_over)

    def wanted(self, target: str) -> tuple[Leaf, ...]:
        """The leaves that a load onto `target` returns."""
        if target == PARAMS:
            return tuple(leaf for leaf in self.leaves if leaf.path[0] == "params")
        return self.leaves

    def mesh_of(self, target: str) -> tuple[int, int] | None:
        """The mesh that a load onto `target` ends on."""
        if "x" in target:
            rows, _, columns = target.partition("x")
            return int(rows), int(columns)
        return self.mesh

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Workload:
        """What `dataclasses.asdict` and JSON made of one."""
        leaves = tuple(
            Leaf(tuple(leaf["path"]), tuple(leaf["shape"]), leaf["dtype"], tuple(leaf["spec"]))
            for leaf in fields["leaves"]
        )
        mesh = (fields["mesh"][0], fields["mesh"][1]) if fields["mesh"] else None
        return cls(**{**fields, "leaves": leaves, "mesh": mesh, "targets": tuple(fields["targets"])})


def workloads(quick: bool) -> dict[str, Workload]:
    """The workloads by name; `quick` makes most of them smaller."""
    model = Model().scaled(width=8, layers=4) if quick else Model().scaled(width=4, layers=16)
    sharded = _sharded(2 if quick else 8)
    made = (
        Workload("dense", _equal(4 if quick else 16, (4096, 4096))),
        Workload("llama", training_state(model)),
        Workload("llama_stacked", training_state(model, stacked=True)),
        Workload("small", _equal(1000, (500,))),
        Workload("small_10k", _equal(1000 if quick else 10_000, (500,))),
        Workload("moe", _experts(200 if quick else 2000)),
        Workload("sharded", sharded, (4, 2)),
        Workload("resharding", sharded, (4, 2), ("8x1", "1x8", "2x1", REPLICATED)),
        Workload("partial", training_state(model), targets=(PARAMS,)),
    )
    return {workload.name: dataclasses.replace(workload, is_quick=quick) for workload in made}


def _equal(count: int, shape: tuple[int, ...]) -> tuple[Leaf, ...]:
    """Arrays of one shape, eight in a layer."""
    return tuple(Leaf((f"layer_{index // 8:04d}", f"param_{index % 8}"), shape) for index in range(count))


def _experts(count: int) -> tuple[Leaf, ...]:
    """Experts with matrices of 256, 384 and 512 KiB in turn."""
    widths = (256, 384, 512)
    return tuple(
        Leaf((f"layer_{index // 64:02d}", f"expert_{index % 64:02d}"), (widths[index % 3], 256))
        for index in range(count)
    )


def _sharded(count: int) -> tuple[Leaf, ...]:
    """Layers of about 64 MiB, cut over rows, columns, both, one dimension over both axes, and not at all."""
    layers = []
    for number in range(count):
        name = f"layer_{number}"
        layers += [
            Leaf((name, "both"), (2048, 2048), spec=("x", "y")),
            Leaf((name, "rows"), (2048, 2048), spec=("x", None)),
            Leaf((name, "columns"), (2048, 2048), spec=(None, "y")),
            Leaf((name, "one_over_both"), (2048, 1792), spec=("x+y", None)),
            Leaf((name, "whole"), (512, 1024)),
            Leaf((name, "scale"), (2048,), spec=("y",)),
            Leaf((name, "half"), (512, 512), "bfloat16", ("x", "y")),
        ]
    return tuple(layers)

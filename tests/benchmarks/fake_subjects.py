"""Checkpoint libraries for the tests of the benchmarks: an honest one, and some that are not."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np

from benchmarks.arrays import State
from benchmarks.leaf import Leaf
from benchmarks.workloads import Workload

TINY = Workload("tiny", (Leaf(("params", "a"), (8, 16)), Leaf(("params", "b"), (6,), "bfloat16")))
HONEST, WRONG_BYTES, FORGETFUL, DYING = (
    f"tests.benchmarks.fake_subjects:{name}" for name in ("Honest", "WrongBytes", "Forgetful", "Dying")
)


class Honest:
    """Every leaf in a file of its own."""

    arrays = "jax"
    durable = False
    packages = ("numpy",)

    def start_save(self, path: Path, state: State) -> None:
        path.mkdir()
        for number, leaf in enumerate(jax.tree.leaves(state)):
            (path / str(number)).write_bytes(np.asarray(leaf).tobytes())

    def load(self, path: Path, like: State) -> State:
        leaves, structure = jax.tree.flatten(like)
        return structure.unflatten(self.read(path / str(number), leaf) for number, leaf in enumerate(leaves))

    def read(self, file: Path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        host = np.frombuffer(file.read_bytes(), leaf.dtype).reshape(leaf.shape)
        return jax.device_put(host, leaf.sharding, may_alias=False)

    def close(self) -> None:
        """Nothing to close."""


class WrongBytes(Honest):
    """One bit of the last leaf is another."""

    def start_save(self, path: Path, state: State) -> None:
        super().start_save(path, state)
        last = max(path.iterdir())
        content = bytearray(last.read_bytes())
        content[-1] ^= 1
        last.write_bytes(content)


class Forgetful(Honest):
    """A leaf is missing."""

    def load(self, path: Path, like: State) -> State:
        loaded = super().load(path, like)
        del loaded["params"]["a"]
        return loaded


class Dying(Honest):
    """The process is gone in the middle of a load."""

    def load(self, path: Path, like: State) -> State:
        print("last words", flush=True)
        os._exit(3)

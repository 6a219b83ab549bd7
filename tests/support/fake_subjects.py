"""Checkpoint libraries for the tests of the benchmarks: a correct one, and some with faults."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import jax
import numpy as np

import jaxckpt_train
from benchmarks.arrays import State
from benchmarks.leaf import Leaf
from benchmarks.subject_ours import Ours
from benchmarks.workloads import Workload

TINY = Workload("tiny", (Leaf(("params", "a"), (8, 16)), Leaf(("params", "b"), (6,), "bfloat16")))
HONEST, WRONG_BYTES, FORGETFUL, DYING = (
    f"tests.support.fake_subjects:{name}" for name in ("Honest", "WrongBytes", "Forgetful", "Dying")
)
HONEST_IN_JOB, WRONG_IN_ONE, DYING_IN_ONE, OURS_COUNTED = (
    f"tests.support.fake_subjects:{name}" for name in ("HonestInJob", "WrongInOne", "DyingInOne", "OursCounted")
)


class Honest:
    """Saves every leaf to its own file."""

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
    """Saves the last leaf with a flipped bit."""

    def start_save(self, path: Path, state: State) -> None:
        super().start_save(path, state)
        last = max(path.iterdir())
        content = bytearray(last.read_bytes())
        content[-1] ^= 1
        last.write_bytes(content)


class Forgetful(Honest):
    """Loads without one leaf."""

    def load(self, path: Path, like: State) -> State:
        loaded = super().load(path, like)
        del loaded["params"]["a"]
        return loaded


class Dying(Honest):
    """Ends its process in a load."""

    def load(self, path: Path, like: State) -> State:
        print("last words", flush=True)
        os._exit(3)


class HonestInJob(Honest):
    """Each process saves its shards of every leaf to its own files, and loads them again."""

    def start_save(self, path: Path, state: State) -> None:
        path.mkdir(exist_ok=True)
        for number, leaf in enumerate(jax.tree.leaves(state)):
            for shard in leaf.addressable_shards:
                (path / f"{number}-{shard.device.id}").write_bytes(np.asarray(shard.data).tobytes())

    def load(self, path: Path, like: State) -> State:
        leaves, structure = jax.tree.flatten(like)
        return structure.unflatten(self.joined(path, number, leaf) for number, leaf in enumerate(leaves))

    def joined(self, path: Path, number: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        shape = leaf.sharding.shard_shape(leaf.shape)
        shards = [
            jax.device_put(
                np.frombuffer((path / f"{number}-{device.id}").read_bytes(), leaf.dtype).reshape(shape), device
            )
            for device in sorted(leaf.sharding.addressable_devices, key=lambda device: device.id)
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


class WrongInOne(HonestInJob):
    """The last process saves a flipped bit."""

    def start_save(self, path: Path, state: State) -> None:
        super().start_save(path, state)
        if jax.process_index() == jax.process_count() - 1:
            file = path / f"0-{jax.local_devices()[0].id}"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)


class DyingInOne(HonestInJob):
    """The last process exits in a load, and the others wait for it."""

    def load(self, path: Path, like: State) -> State:
        if jax.process_index() == jax.process_count() - 1:
            print("last words", flush=True)
            os._exit(3)
        threading.Event().wait()


class OursCounted(Ours):
    """Ours, which records how many bytes its progress reported."""

    def load(self, path: Path, like: State) -> State:
        counts: list[int] = []
        loaded = jaxckpt_train.load(path, like, progress=counts.append)
        (path.parent / f"count-{jax.process_index()}").write_text(str(sum(counts)))
        return loaded

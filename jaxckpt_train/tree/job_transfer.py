"""Moves bytes between the processes of a job: by collectives of XLA, over one device of each process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt_train.tree.caller_context import nothing_set

LEAST_ROW_BYTES = 4096
"""Of a row: the sum over so many makes XLA's CPU client return from the call before the program has run."""


class JobTransfer:
    """Between all processes. Each of them orders the same transfers, of rows of the same length.

    Two small programs do all of it: what is moved is bytes, whatever they mean.

    Args:
        process: number of this one.
    """

    def __init__(self, process: int) -> None:
        of_process: dict[int, jax.Device] = {}
        for device in sorted(jax.devices(), key=lambda device: device.id):
            of_process.setdefault(device.process_index, device)
        self._here = process
        self._mesh = Mesh(np.array([of_process[number] for number in sorted(of_process)]), ("process",))

    def gather(self, row: np.ndarray) -> Moving:
        """Have all processes get the rows of all; `row` is aligned, and belongs to the transfer from now on."""
        return self._move(row[None], _gather(self._mesh))

    def exchange(self, rows: np.ndarray) -> Moving:
        """Give row number i to process i, and get the rows that they give; `rows` belongs to the transfer."""
        return self._move(rows[None], _exchange(self._mesh))

    def _move(self, mine: np.ndarray, move: Callable[[jax.Array], tuple[jax.Array, jax.Array]]) -> Moving:
        sharding = NamedSharding(self._mesh, _spec("process"))
        alone = jax.sharding.SingleDeviceSharding(self._mesh.devices[self._here])
        shape = (self._mesh.size, *mine.shape[1:])
        given = jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(mine, alone)])
        with nothing_set():
            return Moving(move(given)[0])


class Moving:
    """One transfer under way."""

    def __init__(self, moved: jax.Array) -> None:
        self._moved = moved

    def is_over(self) -> bool:
        """Whether it has ended, well or not; does not wait."""
        return bool(self._moved.is_ready())  # type: ignore[attr-defined]

    def failure(self) -> jax.errors.JaxRuntimeError | None:
        """Why it failed, once it is over."""
        try:
            self._moved.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            return error
        return None

    def rows(self) -> np.ndarray:
        """What has come from each process: uint8, not writable."""
        (shard,) = self._moved.addressable_shards
        data = np.asarray(shard.data)
        return data.reshape(-1, data.shape[-1])


def _with_sum(moved: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The array, and of each process's row a sum that nobody needs.

    XLA's CPU client runs what takes fewer than about a thousand operations within the call, a collective too; then it
    could not be seen from outside that another process is gone.
    """
    rows = moved.reshape(moved.shape[0], -1)
    return moved, jnp.sum(rows[:, :LEAST_ROW_BYTES].astype(jnp.uint32), axis=1)


def _spec(*axes: str | None) -> PartitionSpec:
    spec: PartitionSpec = PartitionSpec(*axes)  # type: ignore[no-untyped-call]
    return spec


@functools.cache
def _gather(mesh: Mesh) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    everywhere, one_each = NamedSharding(mesh, _spec()), NamedSharding(mesh, _spec("process"))
    return jax.jit(_with_sum, out_shardings=(everywhere, one_each))


@functools.cache
def _exchange(mesh: Mesh) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    columns = NamedSharding(mesh, _spec(None, "process"))
    one_each = NamedSharding(mesh, _spec("process"))
    return jax.jit(_with_sum, out_shardings=(columns, one_each))

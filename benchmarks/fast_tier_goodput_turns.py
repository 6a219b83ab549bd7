"""A process of the training in `benchmarks.fast_tier_goodput`, which restores, checks what it restored, and updates."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.checkpoint_managers import preservation_policy, save_decision_policy
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

import jaxckpt_train as jct
from benchmarks.goodput_log import Log

MIB, ARRAYS, COLUMNS = 1 << 20, 8, 1024
ENDLESS = 10**9  # updates
KEEP = 2  # checkpoints of each tier
State = dict[str, jax.Array]
EMERGENCY = "orbax emergency"
REPLICAS = {EMERGENCY: 2}
"""How many copies of the state the processes hold. The emergency manager saves and restores whole copies only."""


@dataclasses.dataclass(frozen=True)
class Given:
    """The arguments of an attempt.

    Attributes:
        subject: the set-up.
        slow: the directory of the run.
        fast: the parent of the directories of the hosts.
        log: the file of the log.
        cache: of what XLA has compiled.
        mib: the size of the state.
        update_s: the duration of an update.
        fast_steps, slow_steps: updates between two saves to each tier, where there are two.
        address: where the processes of the job meet.
        processes: their number.
        most_updates: the attempt ends after this many updates; None: it is killed.
    """

    subject: str
    slow: str
    fast: str
    log: str
    cache: str
    mib: int
    update_s: float
    fast_steps: int
    slow_steps: int
    address: str
    processes: int
    most_updates: int | None = None


class Keeper(Protocol):
    """A checkpoint library in the loop."""

    def resume(self, state: State) -> tuple[State, int]:
        """Restore the newest checkpoint, if there is one; return the state and its completed updates."""

    def steps(self) -> Iterable[int]:
        """The numbers of the updates to do."""

    def completed(self, state: State, number: int) -> None:
        """This many updates are complete: save if a save is due."""


class Ours:
    """CheckpointCallback. Without a fast tier it saves whenever the last save is committed."""

    def __init__(self, given: Given) -> None:
        host = f"host{jax.process_index()}"
        tier = {"directory": f"{given.fast}/{host}", "failure_domain": host, "interval_steps": given.fast_steps}
        is_fast = given.subject == "ours, fast tier"
        continuous, fixed = jct.ContinuousCheckpointingPolicy(), jct.FixedIntervalPolicy(given.slow_steps)
        self._callback = jct.CheckpointCallback(
            given.slow,
            save_policy=fixed if is_fast else continuous,
            fast_tier=tier if is_fast else None,
            keep_latest=KEEP,
            progress=False,
        )
        self._callback.__enter__()

    def resume(self, state: State) -> tuple[State, int]:
        restored = self._callback.resume(state)
        return restored, self._callback.completed_steps

    def steps(self) -> Iterable[int]:
        return self._callback.steps(ENDLESS)

    def completed(self, state: State, number: int) -> None:
        self._callback(state)


class Orbax:
    """CheckpointManager: asynchronous, without compression, and it saves whenever the last save is committed."""

    def __init__(self, given: Given) -> None:
        self._first = 0
        self._manager = ocp.CheckpointManager(
            given.slow,
            item_handlers=ocp.PyTreeCheckpointHandler(use_compression=False),
            options=ocp.CheckpointManagerOptions(
                save_decision_policy=save_decision_policy.ContinuousCheckpointingPolicy(),
                preservation_policy=preservation_policy.LatestN(KEEP),
                cleanup_tmp_directories=True,
            ),
        )

    def resume(self, state: State) -> tuple[State, int]:
        step = self._manager.latest_step()
        if step is None:
            return state, 0
        like, self._first = _abstract(state), step
        each = ocp.checkpoint_utils.construct_restore_args(like)
        return self._manager.restore(step, args=ocp.args.PyTreeRestore(item=like, restore_args=each)), step

    def steps(self) -> Iterable[int]:
        return range(self._first, ENDLESS)

    def completed(self, state: State, number: int) -> None:
        if self._manager.should_save(number):
            self._manager.save(number, args=ocp.args.PyTreeSave(state))


class OrbaxEmergency:
    """The emergency CheckpointManager: replica 0 saves to the slow tier, each other replica to its own hosts."""

    def __init__(self, given: Given) -> None:
        self._first, self._fast_steps = 0, given.fast_steps
        self._host = Path(given.fast, f"host{jax.process_index()}")
        self._host.mkdir(parents=True, exist_ok=True)
        flags.FLAGS.mark_as_parsed()  # it reads one of its flags
        ocp.multihost.initialize_runtime_to_distributed_ids()
        ocp.multihost.initialize_distributed_to_device_ids()
        options = emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(save_interval_steps=given.fast_steps, max_to_keep=KEEP),
            persistent=emergency.PersistentCheckpointOptions(save_interval_steps=given.slow_steps, max_to_keep=KEEP),
            cleanup_tmp_directories=True,
        )
        like = _abstract(initial_state(given))
        self._manager = emergency.CheckpointManager(self._host, given.slow, mesh_of(given), like, options=options)

    def resume(self, state: State) -> tuple[State, int]:
        self._first = int(self._manager.latest_step() or 0)  # it may be an integer of numpy
        later = [path for path in self._host.iterdir() if path.name.isdigit() and int(path.name) > self._first]
        for path in later:  # incomplete without the lost host; the manager would refuse to save this step again
            shutil.rmtree(path)
        self._manager.reload()
        return (self._manager.restore(self._first).state if self._first else state), self._first

    def steps(self) -> Iterable[int]:
        return range(self._first, ENDLESS)

    def completed(self, state: State, number: int) -> None:
        if number % self._fast_steps == 0:  # each call lets all processes meet, also where no save is due
            self._manager.save(number, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))


SUBJECTS: dict[str, type[Keeper]] = {
    "ours, slow tier": Ours,
    "ours, fast tier": Ours,
    "orbax": Orbax,
    EMERGENCY: OrbaxEmergency,
}


def mesh_of(given: Given) -> Mesh:
    """All devices: the state is cut over the axis "shard", and equal over the axis "replica"."""
    replicas = REPLICAS.get(given.subject, 1)
    return Mesh(np.array(jax.devices()).reshape(replicas, -1), ("replica", "shard"))


def initial_state(given: Given) -> State:
    """The state before the first update."""
    rows = given.mib * MIB // 4 // COLUMNS // ARRAYS
    sharding = NamedSharding(mesh_of(given), PartitionSpec("shard"))
    return {
        f"a{number}": jax.make_array_from_callback(
            (rows, COLUMNS), sharding, functools.partial(_values, number * rows, rows, 0)
        )
        for number in range(ARRAYS)
    }


def _values(above: int, rows: int, step: int, where: tuple[slice, ...]) -> np.ndarray:
    """The values of some rows after this many updates; `above`: the rows of the arrays before this one."""
    start, stop, _ = where[0].indices(rows)
    found = np.arange((above + start) * COLUMNS, (above + stop) * COLUMNS, dtype=np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # a hash of the place
        found ^= found >> shift
        found *= np.uint32(factor)
    power = pow(3, step, 1 << 33)
    found *= np.uint32(power % (1 << 32))
    found += np.uint32((power - 1) // 2)
    return found.reshape(-1, COLUMNS)


@functools.partial(jax.jit, donate_argnums=0)
def update(state: State) -> tuple[State, jax.Array]:
    """An update, and a value to which all processes contribute, so that all wait for the slowest."""
    state = {name: array * 3 + 1 for name, array in state.items()}
    return state, jnp.sum(state["a0"][:, 0])


def check(state: State, step: int) -> None:
    """Compare each local value with what it must be after this many updates."""
    for number, (name, array) in enumerate(sorted(state.items())):
        for shard in array.addressable_shards:
            wanted = _values(number * array.shape[0], array.shape[0], step, shard.index)
            if not np.array_equal(np.asarray(shard.data), wanted):
                raise AssertionError(f"{name}: wrong values after update {step}")


def _abstract(state: State) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def train(given: Given, process: int) -> None:
    """Restore the newest step, and train until the process is killed."""
    log = Log(Path(given.log if process == 0 else os.devnull))
    with Path(f"{given.log}.{process}").open("wb") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    jax.config.update("jax_compilation_cache_dir", given.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(given.address, given.processes, process)
    keeper, state = SUBJECTS[given.subject](given), initial_state(given)
    log.made()
    state, began = keeper.resume(state)
    check(state, began)
    log.restored(began)
    for step in keeper.steps():
        started = time.monotonic()
        state, value = update(state)
        loss = float(value)
        time.sleep(max(0.0, started + given.update_s - time.monotonic()))
        log.update(step + 1, loss)
        keeper.completed(state, step + 1)
        log.called(step + 1)
        if given.most_updates is not None and step + 1 - began >= given.most_updates:
            os._exit(0)

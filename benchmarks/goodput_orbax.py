"""Orbax in the loop of the goodput benchmark: CheckpointManager, and Checkpointer of its second interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.goodput_subjects import ENDLESS, KEEP, Interval
from benchmarks.lm_training import LmTraining
from benchmarks.loopback import free_address

# Of the ways to have Orbax (0.12.8) keep this training, those that have a turn by default are its best ones; short
# trials, in which an undisturbed update took 70 ms. A save costs the loop 0.35 s without compression, 0.44 s with, and
# 0.4 to 0.6 s without OCDBT. Continuous saves without a least interval, the default of the second interface, make the
# mean update take 175 ms (207 ms there), with the interval of Young and Daly 97 ms. Asked first whether a save is due,
# it costs 0.2 ms for an update instead of 5: taking the state of NNX objects for each is what takes so long.
PLAIN = {"use_compression": False}


def listen_for_preemption() -> None:
    """Start what Orbax asks whether the job is to leave: JAX's preemption service, also where there is one process."""
    jax.distributed.initialize(free_address(), num_processes=1, process_id=0)


def state_of(training: LmTraining) -> Any:
    """What is saved of it, apart from the position in the data."""
    return nnx.state((training.model, training.optimizer))


def abstract(state: Any) -> Any:
    """Shapes, dtypes and shardings of it."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


class OrbaxV0:
    """`CheckpointManager`: asynchronous, state and iterator in a Composite, as Grain and Orbax recommend it.

    Args:
        directory: of the run.
        options: of `CheckpointManagerOptions`: when to save.
        saving: of the handler of the state.
    """

    def __init__(self, directory: Path, options: dict[str, Any], saving: dict[str, Any]) -> None:
        import orbax.checkpoint as ocp
        from grain import checkpoint

        self._ocp, self._grain, self._left = ocp, checkpoint, False
        listen_for_preemption()
        options = {"max_to_keep": KEEP, "cleanup_tmp_directories": True, **options}
        handlers = {"state": ocp.PyTreeCheckpointHandler(**saving), "data": checkpoint.CheckpointHandler()}
        self._manager = ocp.CheckpointManager(
            directory, item_handlers=handlers, options=ocp.CheckpointManagerOptions(**options)
        )
        self._step = 0

    def __enter__(self) -> OrbaxV0:
        return self

    def __exit__(self, *raised: object) -> None:
        self._manager.close()

    def resume(self, training: LmTraining) -> int:
        step = self._manager.latest_step()
        if step is None:
            return 0
        like = abstract(state_of(training))
        each = self._ocp.checkpoint_utils.construct_restore_args(like)
        restored = self._manager.restore(
            step,
            args=self._ocp.args.Composite(
                state=self._ocp.args.PyTreeRestore(item=like, restore_args=each),
                data=self._grain.CheckpointRestore(training.data),
            ),
        )
        nnx.update((training.model, training.optimizer), restored["state"])
        training.data = restored["data"]
        self._step = step
        return step

    def steps(self) -> Iterator[int]:
        while not self._left and self._step < ENDLESS:
            yield self._step

    def completed(self, training: LmTraining, number: int, loss: Any) -> None:
        self._step = number
        if self._manager.should_save(number):
            items = {"state": self._ocp.args.PyTreeSave(state_of(training))}
            items["data"] = self._grain.CheckpointSave(training.data)
            self._manager.save(number, args=self._ocp.args.Composite(**items))
        if self._manager.reached_preemption(number):
            self._manager.wait_until_finished()
            self._left = True


class OrbaxV1:
    """`training.Checkpointer` of `orbax.checkpoint.experimental.v1`.

    Args:
        directory: of the run.
        policy: when to save; None: as often as it can, and when it is asked to leave, which is its default.
        saving: of `Context.array.saving`.
    """

    def __init__(self, directory: Path, policy: Any, saving: dict[str, Any]) -> None:
        import orbax.checkpoint.experimental.v1 as ocp
        from orbax.checkpoint import utils

        listen_for_preemption()
        context = ocp.Context()
        for option, value in saving.items():
            setattr(context.array.saving, option, value)
        self._checkpointer = ocp.training.Checkpointer(
            directory,
            context=context,
            save_decision_policy=policy,
            preservation_policy=ocp.training.preservation_policies.LatestN(KEEP),
            cleanup_tmp_directories=True,
        )
        self._reached_preemption = utils.reached_preemption
        self._step, self._left = 0, False

    def __enter__(self) -> OrbaxV1:
        return self

    def __exit__(self, *raised: object) -> None:
        self._checkpointer.close()

    def resume(self, training: LmTraining) -> int:
        latest = self._checkpointer.latest
        if latest is None:
            return 0
        restored = self._checkpointer.load_checkpointables(
            latest, {"state": abstract(state_of(training)), "data": training.data}
        )
        nnx.update((training.model, training.optimizer), restored["state"])
        training.data = restored["data"] or training.data
        self._step = latest.step
        return self._step

    def steps(self) -> Iterator[int]:
        while not self._left and self._step < ENDLESS:
            yield self._step

    def completed(self, training: LmTraining, number: int, loss: Any) -> None:
        self._step = number
        if self._checkpointer.should_save(number):
            self._checkpointer.save_checkpointables_async(number, {"state": state_of(training), "data": training.data})
        if self._reached_preemption(number):
            self._checkpointer.wait()
            self._left = True


def make_keeper(name: str, directory: Path, interval: Interval) -> OrbaxV0 | OrbaxV1:
    """The subject with this name, on a run directory."""
    from orbax.checkpoint.checkpoint_managers import save_decision_policy as policies

    directory.mkdir(parents=True, exist_ok=True)
    preempted = policies.PreemptionCheckpointingPolicy()
    fixed: Any = policies.AnySavePolicy([policies.FixedIntervalPolicy(interval.steps), preempted])
    continuous: Any = policies.AnySavePolicy(
        [policies.ContinuousCheckpointingPolicy(minimum_interval_secs=max(1, round(interval.seconds))), preempted]
    )
    back_to_back: Any = policies.AnySavePolicy([policies.ContinuousCheckpointingPolicy(), preempted])
    match name:
        case "orbax_v0":
            return OrbaxV0(directory, {"save_interval_steps": interval.steps}, PLAIN)
        case "orbax_v0_compressed":
            return OrbaxV0(directory, {"save_interval_steps": interval.steps}, {})
        case "orbax_v0_no_ocdbt":
            return OrbaxV0(directory, {"save_interval_steps": interval.steps}, {**PLAIN, "use_ocdbt": False})
        case "orbax_v0_continuous":
            return OrbaxV0(directory, {"save_decision_policy": continuous}, PLAIN)
        case "orbax_v0_back_to_back":
            return OrbaxV0(directory, {"save_decision_policy": back_to_back}, PLAIN)
        case "orbax_v1":
            return OrbaxV1(directory, fixed, PLAIN)
        case "orbax_v1_no_ocdbt":
            return OrbaxV1(directory, fixed, {**PLAIN, "use_ocdbt": False})
        case "orbax_v1_default":
            return OrbaxV1(directory, None, {})
    raise ValueError(f"no subject {name!r}")

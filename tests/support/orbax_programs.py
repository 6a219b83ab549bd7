"""Programs for a manager of Orbax's form, run with Orbax and with ours: each returns its observations."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxckpt_train.integrations import orbax_manager

OURS = orbax_manager
"""Our manager, options and args, for a program without Orbax."""
OURS_FOR_ORBAX = SimpleNamespace(
    CheckpointManager=orbax_manager.CheckpointManager,
    CheckpointManagerOptions=ocp.CheckpointManagerOptions,
    args=ocp.args,
)
"""Our manager with the options and args of Orbax, for a program that changed one import."""
LOSSES = {0: 5.0, 1: 3.0, 2: 4.0, 3: 2.5, 4: 2.0, 5: 1.0}


def tree_of(step: int) -> dict[str, Any]:
    """Return a state whose bytes depend on the step, with leaves of every kind that Orbax saves."""
    return {
        "params": {"w": jnp.arange(600, dtype=jnp.bfloat16).reshape(30, 20) + step, "b": jnp.zeros(3)},
        "opt_state": [jnp.full(7, step, jnp.int8), {"mu": jnp.float32(step) / 3, "nu": None}],
        "host": np.arange(5) * step,
        "count": step,
        "rate": step / 7,
        "is_done": step % 2 == 0,
    }


def abstract_of(tree: Any) -> Any:
    """Return the tree with abstract arrays in place of those on devices."""
    abstract = ocp.utils.to_shape_dtype_struct
    return jax.tree.map(lambda leaf: abstract(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def as_bytes(tree: Any) -> dict[str, Any]:
    """Return dtype, shape and bytes of every leaf by its path."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | str):
            return (type(leaf), leaf)
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return (str(jax.random.key_impl(leaf)), np.asarray(jax.random.key_data(leaf)).tobytes())
        array = np.asarray(leaf)
        return (array.dtype, array.shape, array.tobytes())

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): plain(leaf) for path, leaf in leaves}


def saving(library: Any, directory: Path, options: Mapping[str, Any]) -> list[Any]:
    """Save six steps, and observe them with the same manager and with a new one."""
    seen: list[Any] = []
    made = library.CheckpointManagerOptions(**options)
    with library.CheckpointManager(directory, options=made) as manager:
        seen.append((manager.all_steps(), manager.latest_step(), manager.best_step()))
        for step, loss in LOSSES.items():
            is_due = manager.should_save(step)
            args = library.args.StandardSave(tree_of(step))
            is_saved = manager.save(step, args=args, metrics={"loss": loss}, custom_metadata={"epoch": step * 10})
            seen.append((step, is_due, is_saved, manager.all_steps(), manager.latest_step(), manager.best_step()))
        seen.append(manager.save(5, args=library.args.StandardSave(tree_of(5))))
        manager.wait_until_finished()
        seen.append((manager.all_steps(), manager.is_saving_in_progress()))
    with library.CheckpointManager(directory, options=made) as manager:
        seen.append((manager.all_steps(), manager.latest_step(), manager.best_step(), manager.should_save(4)))
        for step in manager.all_steps():
            seen.append(manager.metadata(step).custom_metadata)
            target = library.args.StandardRestore(abstract_of(tree_of(0)))
            seen.append(as_bytes(manager.restore(step, args=target)))
        seen.append(as_bytes(manager.restore(None, args=library.args.StandardRestore(tree_of(0)))))
        seen.append(as_bytes(manager.restore(manager.latest_step())))
    return seen


def several_items(library: Any, directory: Path) -> list[Any]:
    """Save several checkpointables of different kinds, and restore some or all of them."""
    generator = np.random.RandomState(3)
    seen: list[Any] = []
    with library.CheckpointManager(directory, item_names=("state", "notes", "key", "rng", "rate")) as manager:
        args = library.args.Composite(
            state=library.args.PyTreeSave(tree_of(7)),
            notes=library.args.JsonSave({"name": "a run", "shape": [3, None], "lr": 0.1}),
            key=library.args.JaxRandomKeySave(jax.random.key(5)),
            rng=library.args.NumpyRandomKeySave(generator.get_state()),
            rate=library.args.ArraySave(jnp.float32(0.25)),
        )
        seen.append(manager.save(1, args=args))
        seen.append(manager.all_steps())
    with library.CheckpointManager(directory) as manager:
        args = library.args.Composite(
            state=library.args.PyTreeRestore(item=abstract_of(tree_of(0))), notes=library.args.JsonRestore()
        )
        found = manager.restore(1, args=args)
        seen.append((sorted(found), found.notes, found["notes"], "state" in found, as_bytes(found.state)))
        rest = library.args.Composite(
            key=library.args.JaxRandomKeyRestore(),
            rng=library.args.NumpyRandomKeyRestore(),
            rate=library.args.ArrayRestore(),
        )
        found = manager.restore(1, args=rest)
        generator.set_state(found.rng)
        seen.append((as_bytes(found.key), generator.bytes(20), as_bytes(found.rate)))
    return seen


def leaf_by_leaf(library: Any, directory: Path) -> list[Any]:
    """Restore with arguments for each leaf: sharded, replicated, on the host."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), devices=jax.devices()[:8], axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    tree = {"w": jnp.arange(64.0).reshape(8, 8), "b": jnp.arange(8), "host": np.arange(3.0), "n": 3}
    wanted = {
        "w": ocp.ArrayRestoreArgs(sharding=jax.sharding.NamedSharding(mesh, spec("x", "y")), dtype=jnp.float32),
        "b": ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=spec("y")),
        "host": ocp.RestoreArgs(restore_type=np.ndarray),
        "n": ocp.RestoreArgs(restore_type=int),
    }
    seen: list[Any] = []
    with library.CheckpointManager(directory) as manager:
        manager.save(1, args=library.args.PyTreeSave(tree))
        manager.wait_until_finished()
        for item in (tree, None):
            found = manager.restore(1, args=library.args.PyTreeRestore(item=item, restore_args=wanted))
            places = [found["w"].sharding.spec, found["w"].sharding.shard_shape((8, 8)), found["b"].sharding.spec]
            seen.append((as_bytes(found), places, type(found["host"]), type(found["n"])))
        manager.save(2, args=library.args.PyTreeSave(found))
        manager.wait_until_finished()
        found = manager.restore(2)
        seen.append((as_bytes(found), found["w"].sharding.spec, found["b"].sharding.spec))
    return seen


def reading(library: Any, directory: Path) -> list[Any]:
    """Read a run with a read-only manager, and try to save and to delete."""
    with library.CheckpointManager(directory) as manager:
        for step in (1, 2):
            manager.save(step, args=library.args.StandardSave(tree_of(step)))
    seen: list[Any] = []
    with library.CheckpointManager(directory, options=library.CheckpointManagerOptions(read_only=True)) as manager:
        seen += [manager.all_steps(), manager.latest_step(), manager.best_step(), manager.should_save(9)]
        seen.append(manager.save(9, args=library.args.StandardSave(tree_of(9))))
        manager.delete(1)
        seen += [manager.all_steps(), as_bytes(manager.restore(1, args=library.args.StandardRestore(tree_of(0))))]
    return seen


def deleting(library: Any, directory: Path) -> list[Any]:
    """Delete steps, and request missing ones."""
    seen: list[Any] = []
    with library.CheckpointManager(directory) as manager:
        for call in (lambda: manager.restore(None), lambda: manager.delete(1)):
            seen.append(error_of(call))
        for step in (1, 2, 3):
            manager.save(step, args=library.args.StandardSave({"w": jnp.full(4, step)}))
        manager.wait_until_finished()
        manager.delete(2)
        seen.append((manager.all_steps(), manager.latest_step()))
        seen += [error_of(lambda: manager.delete(2)), error_of(lambda: manager.restore(2))]
        again = library.args.StandardSave({"w": jnp.zeros(4)})
        seen.append(error_of(lambda: manager.save(3, args=again, force=True)))
        seen.append((manager.save(3, args=again), manager.save(4, args=again), manager.all_steps()))
    with library.CheckpointManager(directory) as manager:
        seen.append(manager.all_steps())
    return seen


def error_of(call: Any) -> str:
    """Return the name of the raised error, as a program of Orbax expects it."""
    try:
        call()
    except FileNotFoundError:
        return "FileNotFoundError"
    except ValueError as error:
        return "StepAlreadyExistsError" if type(error).__name__ == "StepAlreadyExistsError" else "ValueError"
    return "none"


def iterating(library: Any, directory: Path) -> list[Any]:
    """Save and restore the position of a Grain iterator."""
    own = {"CheckpointSave": grain.checkpoint.CheckpointSave, "CheckpointRestore": grain.checkpoint.CheckpointRestore}
    save, restore = (getattr(library.args, name, own[name]) for name in own)
    data = iter(grain.MapDataset.range(100).shuffle(seed=1).batch(4).to_iter_dataset())
    seen: list[Any] = [next(data).tolist() for _ in range(3)]
    with library.CheckpointManager(directory) as manager:
        manager.save(3, args=library.args.Composite(data=save(data), state=library.args.StandardSave({"n": 3})))
        seen.append(next(data).tolist())
    fresh = iter(grain.MapDataset.range(100).shuffle(seed=1).batch(4).to_iter_dataset())
    with library.CheckpointManager(directory) as manager:
        found = manager.restore(3, args=library.args.Composite(data=restore(fresh)))
        seen.append((found.data is fresh, next(fresh).tolist()))
    return seen


def _policies() -> dict[str, Any]:
    saves = ocp.checkpoint_managers.save_decision_policy
    keeps = ocp.checkpoint_managers.preservation_policy
    return {
        "save_decision_policy": saves.AnySavePolicy([saves.FixedIntervalPolicy(3), saves.SpecificStepsPolicy([1, 4])]),
        "preservation_policy": keeps.AnyPreservationPolicy([keeps.LatestN(1), keeps.CustomSteps([1])]),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "an interval, and the newest": {"save_interval_steps": 2, "max_to_keep": 2},
    "a period": {"max_to_keep": 1, "keep_period": 2},
    "a time": {"max_to_keep": 2, "keep_time_interval": datetime.timedelta(hours=1)},
    "some steps": {"save_interval_steps": 100, "save_on_steps": [2, 3], "max_to_keep": 3},
    "a function": {"should_save_fn": lambda step, newest: newest is None or step - newest >= 2},
    "the best": {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "max_to_keep": 2},
    "Orbax's policies": _policies(),
    "in the call": {"enable_async_checkpointing": False, "max_to_keep": 2, "save_interval_steps": 3},
}

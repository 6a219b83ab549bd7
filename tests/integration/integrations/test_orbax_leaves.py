"""The manager in Orbax's form: restore arguments, partial targets and metadata, compared with Orbax itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.integrations import orbax_manager
from jaxckpt_train.integrations.orbax_manager import args

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning"),
    # A restore that Orbax refuses leaves coroutines that are never awaited.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SPEC = jax.sharding.PartitionSpec


@pytest.fixture(autouse=True)
def _coroutines_end_here() -> Iterator[None]:
    """Collect the coroutines that Orbax leaves in the test that made them."""
    yield
    gc.collect()


def mesh() -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 4), ("x", "y"), devices=jax.devices()[:8], axis_types=auto)


def placed(*axes: Any) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh(), SPEC(*axes))


def tree() -> dict[str, Any]:
    """Return leaves of every kind, one of them over eight devices."""
    sharded = jax.device_put(jnp.arange(64, dtype=jnp.float32).reshape(8, 8), placed("x", "y"))
    return {
        "w": sharded,
        "host": np.arange(3.0),
        "n": 3,
        "rate": 0.5,
        "none": None,
        "empty": {},
        "list": [1, jnp.int8(3), {"deep": jnp.ones((2, 3), jnp.bfloat16)}],
    }


def every(value: Any) -> Any:
    """Return a tree with this value in place of every leaf."""
    return jax.tree.map(lambda _: value, tree())


def with_leaf(path: str, value: Any, rest: Any) -> Any:
    return {**(tree() if rest is None else every(rest)), path: value}


def described(value: Any) -> Any:
    """Return containers by type, and leaves by type, dtype, sharding and value."""
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [described(each) for each in value]
    if isinstance(value, jax.Array):
        spec = value.sharding.spec if isinstance(value.sharding, jax.sharding.NamedSharding) else None
        return "jax", value.dtype, spec, np.asarray(value).tolist()
    if isinstance(value, np.ndarray):
        return "numpy", value.dtype, value.tolist()
    return type(value).__name__, value


def pytree(item: Any = None, restore_args: Any = None, **more: Any) -> Callable[[Any], Any]:
    return lambda library: library.args.PyTreeRestore(item, restore_args=restore_args, **more)


def standard(item: Any = None) -> Callable[[Any], Any]:
    return lambda library: library.args.StandardRestore(item)


def restores() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield args to restore with, as functions of the library."""
    whole, array = ocp.RestoreArgs, ocp.ArrayRestoreArgs
    yield "nothing", standard()
    yield "any object", pytree(every(object()))
    yield "other shapes", pytree(every(jax.ShapeDtypeStruct((9,), jnp.bfloat16)))
    yield "numbers", pytree(every(0))
    yield "a dtype for all", pytree(restore_args=every(whole(dtype=jnp.float16)))
    yield "integers", pytree(every(0), every(whole(dtype=np.int32)))
    yield "on the host", pytree(restore_args=every(whole(restore_type=np.ndarray)))
    yield "on the host, wider", pytree(restore_args=every(whole(restore_type=np.ndarray, dtype=np.float64)))
    yield "replicated", pytree(restore_args=every(array(sharding=placed())))
    yield "replicated in a dtype", pytree(restore_args=every(array(mesh=mesh(), mesh_axes=SPEC(), dtype=jnp.int32)))
    yield "over other axes", pytree(every(0), with_leaf("w", array(sharding=placed("y")), whole()))
    yield "a number as another", pytree(restore_args=with_leaf("n", whole(restore_type=float), whole()))
    yield "its shape", pytree(restore_args=with_leaf("w", array(sharding=placed(), global_shape=(8, 8)), whole()))
    yield "arguments of the tree", pytree(tree(), ocp.checkpoint_utils.construct_restore_args(tree()))
    yield "a placeholder", pytree(with_leaf("w", ..., 0))
    yield "none for an array", pytree(with_leaf("w", None, 0))
    yield "a part", pytree({"n": 0, "w": 0}, partial_restore=True)
    yield "a deep part", pytree({"list": [0, 0, {"deep": 0}]}, partial_restore=True)
    yield "a part elsewhere", pytree({"w": 0}, {"w": array(sharding=placed("x"))}, partial_restore=True)
    yield "more than there is", pytree({"n": 0, "other": 7}, partial_restore=True)
    yield "without transforms", pytree({"n": 0}, {"n": whole()}, transforms={})
    yield "as it is", standard(tree())
    yield (
        "in bfloat16",
        standard(with_leaf("w", jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=placed("x")), None)),
    )
    yield "where it was", standard(with_leaf("w", jax.ShapeDtypeStruct((8, 8), jnp.float32), None))
    yield "an array as numpy", standard(with_leaf("w", np.zeros((8, 8), np.float16), None))
    yield "numpy as an array", standard(with_leaf("host", jnp.zeros(3), None))
    yield "numpy in another dtype", standard(with_leaf("host", jax.ShapeDtypeStruct((3,), jnp.float32), None))
    yield "a float for an int", standard(with_leaf("n", 0.0, None))
    yield "a tuple for a list", standard(with_leaf("list", tuple(tree()["list"]), None))


RESTORES = dict(restores())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for name, library in (("orbax", ocp), ("ours", orbax_manager)):
        found[name] = folder / name
        with library.CheckpointManager(found[name]) as manager:
            manager.save(1, args=library.args.PyTreeSave(tree()))
    return found


def restored(library: Any, directory: Path, name: str) -> Any:
    with library.CheckpointManager(directory, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        if isinstance(RESTORES[name](ocp), ocp.args.StandardRestore):
            manager = library.CheckpointManager(directory, item_handlers=ocp.StandardCheckpointHandler())
        return described(manager.restore(1, args=RESTORES[name](library)))


@pytest.mark.parametrize("name", RESTORES)
def test_leaves_are_restored_as_orbax_does(name: str, saved: dict[str, Path]) -> None:
    expected = restored(ocp, saved["orbax"], name)
    assert restored(orbax_manager, saved["ours"], name) == expected


REFUSED: dict[str, Callable[[Any], Any]] = {
    "a part without saying so": pytree({"n": 0}),
    "something else": standard({"other": 0}),
    "another shape": standard(with_leaf("w", jax.ShapeDtypeStruct((8, 4), jnp.float32), None)),
    "a number of an array": pytree(
        restore_args={"w": ocp.RestoreArgs(restore_type=int)}, item={"w": 0}, partial_restore=True
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mismatched_targets_are_value_errors(name: str, saved: dict[str, Path]) -> None:
    for library, directory in ((ocp, saved["orbax"]), (orbax_manager, saved["ours"])):
        with library.CheckpointManager(directory) as manager, pytest.raises(ValueError):  # noqa: PT011
            manager.restore(1, args=REFUSED[name](library))


def test_own_restore_arguments_match_those_of_orbax(saved: dict[str, Path]) -> None:
    own = {
        "w": orbax_manager.ArrayRestoreArgs(sharding=placed("y"), dtype=jnp.int32),
        "n": orbax_manager.RestoreArgs(float),
    }
    theirs = {"w": ocp.ArrayRestoreArgs(sharding=placed("y"), dtype=jnp.int32), "n": ocp.RestoreArgs(float)}
    found = []
    for library, directory, given in ((ocp, saved["orbax"], theirs), (orbax_manager, saved["ours"], own)):
        with library.CheckpointManager(directory) as manager:
            partial = library.args.PyTreeRestore({"w": 0, "n": 0}, restore_args=given, partial_restore=True)
            found.append(described(manager.restore(1, args=partial)))
    assert found[0] == found[1]


def test_a_conversion_of_a_target_is_logged(saved: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    target = {**tree(), "w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)}
    with orbax_manager.CheckpointManager(saved["ours"]) as manager:
        manager.restore(1, args=args.StandardRestore(tree()))
        assert not [message for message in caplog.messages if "converted" in message]
        manager.restore(1, args=args.StandardRestore(target))
    (warning,) = [message for message in caplog.messages if "converted" in message]
    assert "w from float32 to bfloat16" in warning


def test_save_arguments_convert_as_in_orbax(tmp_path: Path) -> None:
    state = {"w": jnp.arange(4.0), "host": np.arange(3.0), "n": 3, "kept": jnp.ones(2)}
    wanted = {"w": np.dtype(jnp.bfloat16), "host": np.dtype(np.float32), "n": None, "kept": None}
    found = []
    for library, directory in ((ocp, tmp_path / "orbax"), (orbax_manager, tmp_path / "ours")):
        save_args = {name: library.SaveArgs(dtype=dtype) for name, dtype in wanted.items()}
        with library.CheckpointManager(directory) as manager:
            manager.save(1, args=library.args.PyTreeSave(state, save_args=save_args))
            manager.wait_until_finished()
            found.append(described(manager.restore(1)))
    assert found[0] == found[1]
    assert state["w"].dtype == jnp.float32


def test_item_metadata_of_single_item_has_tree(saved: dict[str, Path]) -> None:
    with ocp.CheckpointManager(saved["orbax"], item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        theirs = manager.item_metadata(1)
    with orbax_manager.CheckpointManager(saved["ours"]) as manager:
        found = manager.item_metadata(1)
        assert found == manager.metadata(1).item_metadata
        assert sorted(found) == sorted(theirs.keys())
        assert found["w"] is found.tree["w"]
        shapes = jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), found.tree)
        assert shapes == jax.tree.map(lambda leaf: (tuple(leaf.shape), np.dtype(leaf.dtype)), theirs.tree)
        assert len(jax.tree.leaves(found)) == len(jax.tree.leaves(theirs))
        as_was = described(manager.restore(1))
        for target in (found, found.tree):
            assert described(manager.restore(1, args=args.StandardRestore(target))) == as_was


def test_item_metadata_of_several_items_has_their_trees(tmp_path: Path) -> None:
    with orbax_manager.CheckpointManager(tmp_path) as manager:
        items = {"state": args.StandardSave({"w": jnp.ones(3)}), "notes": args.JsonSave({"a": 1})}
        manager.save(1, args=args.Composite(**items))
        manager.wait_until_finished()
        found = manager.item_metadata(1)
        assert found.state.tree == {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
        assert (found.notes, sorted(found)) == (None, ["notes", "state"])
        assert manager.metadata(1).custom_metadata == {}
        with pytest.raises(jct.SettingsError):
            manager.item_metadata(None)

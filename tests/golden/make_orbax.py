"""Write a checkpoint in each form of the installed Orbax, and its expected content as JSON.

`python make_orbax.py FOLDER [--seed 0] [--large] [--forms zarr,ocdbt]`, in an environment with any version of
orbax-checkpoint and without this package, writes FOLDER/<form>/saved and FOLDER/<form>/expected.json.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.metadata
import inspect
import json
import logging
import os
import shutil
import sys
import traceback
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # arrays of several chunks
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

with contextlib.suppress(ImportError):  # its older name, which Orbax 0.1 imports it by
    from jax.experimental.array_serialization import serialization

    sys.modules.setdefault("jax.experimental.gda_serialization", sys.modules[serialization.__package__])

import orbax.checkpoint as ocp

logging.getLogger("absl").setLevel(logging.ERROR)
VERSION = tuple(int(part) for part in importlib.metadata.version("orbax-checkpoint").split(".")[:2])
STEP = 7
CONFIG = {"rate": 0.1, "sizes": [1, 2], "name": "état"}
METRICS = {"loss": 0.25}
DTYPES = ("bfloat16", "float32", "float16", "int32", "int8", "uint8", "bool_")


class Values:
    """Arrays of random values from a seed."""

    def __init__(self, seed, large):
        self._random = np.random.RandomState(seed)
        self._factors = (512, 8) if large else (1, 1)
        self._mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))

    def numpy(self, dtype, *shape):
        kind = np.dtype(getattr(jnp, dtype))  # old TensorStores register other dtypes under these names
        if kind == np.bool_:
            return self._random.randint(0, 2, shape).astype(bool)
        if kind.kind in "iu":
            return self._random.randint(0, 100, shape).astype(kind)
        return self._random.standard_normal(shape).astype(np.float32).astype(kind)

    def array(self, dtype, *shape):
        """Return an array on one device."""
        return jnp.asarray(self.numpy(dtype, *shape))

    def sharded(self, dtype, rows, columns):
        """Return an array over all devices, with a chunk for each; it is larger with `--large`."""
        values = self.numpy(dtype, rows * self._factors[0], columns * self._factors[1])
        return jax.device_put(values, NamedSharding(self._mesh, PartitionSpec("x", "y")))

    def several(self, layers):
        return {f"layer_{number}": self.array(DTYPES[number % 7], 3 + number, 5) for number in range(layers)}


def plain_tree(values, large):
    """Arrays and numbers."""
    tree = {
        "params": {"kernel": values.sharded("float32", 4, 6), "half": values.sharded("bfloat16", 2, 4)},
        "moments": [values.array("float32", 3), (values.array("int32", 2, 2), values.numpy("float64", 2))],
        "count": jnp.int32(11),
        "step": 2**40 + 1,
        "rate": 0.1,
    }
    return {**tree, "more": values.several(40)} if large else tree


def full_tree(values, large):
    """Also other leaves: text, None, empty containers, and keys with special characters."""
    folder = "" if VERSION < (0, 2) else "mlp/"  # the first versions make no folders below the folder of an item
    return {
        **plain_tree(values, large),
        "name": "naïve",
        "nothing": None,
        "empty": {"dict": {}, "list": [], "deep": [{"a": None}]},
        "flag": True,
        folder + "~ linear 0": {"w": values.array("float32", 2)},
    }


def inline_tree(values):
    """Leaves that the first versions put into one msgpack file on request."""
    return {
        "kernel": values.array("float32", 3, 2),
        "half": values.array("bfloat16", 5),
        "numpy": [values.numpy("int64", 3), values.numpy("bool_", 2), np.zeros((0, 2), np.float16)],
        "scalar": np.float32(1.5),
        "step": 9,
        "rate": -0.5,
        "text": "naïve",
        "bytes": b"\x00\xff",
        "none": None,
        "empty": {},
    }


def train_state(values):
    """A Flax train state with Adam, after an update."""
    import optax
    from flax.training.train_state import TrainState

    params = {"Dense_0": {"kernel": values.array("float32", 3, 4), "bias": values.array("bfloat16", 4)}}
    state = TrainState.create(apply_fn=len, params=params, tx=optax.adam(1e-3))
    return state.apply_gradients(grads=jax.tree_util.tree_map(lambda leaf: leaf * 2, params))


def encoded(node):
    """A tree as JSON: kinds of containers, and every byte of its leaves."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return {"namedtuple": {name: encoded(getattr(node, name)) for name in node._fields}}
    if hasattr(node, "apply_gradients"):
        return {"dict": {name: encoded(getattr(node, name)) for name in ("step", "params", "opt_state")}}
    if hasattr(node, "items"):
        return {"dict": {str(key): encoded(child) for key, child in node.items()}}
    if isinstance(node, (list, tuple)):
        return {type(node).__name__: [encoded(child) for child in node]}
    if isinstance(node, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(node)
        text = base64.b64encode(array.tobytes()).decode()
        return {"array": [array.dtype.name, list(array.shape), isinstance(node, jax.Array), text]}
    if isinstance(node, bytes):
        return {"bytes": base64.b64encode(node).decode()}
    return {"value": node}


def done(checkpointer):
    """Wait until everything is written."""
    for name in ("wait_until_finished", "close"):
        if hasattr(checkpointer, name):
            getattr(checkpointer, name)()


def save_args_of(tree):
    """Ask the first versions to keep text, which they do only in the file of the structure."""
    if VERSION >= (0, 4):
        return {}
    args = jax.tree_util.tree_map(lambda leaf: ocp.SaveArgs(aggregate=isinstance(leaf, str)), tree)
    return {"save_args": args}


def by_handler(path, tree, args=None, **options):
    known = inspect.signature(ocp.PyTreeCheckpointHandler.__init__).parameters
    if not set(options) <= set(known):
        raise NotImplementedError(f"PyTreeCheckpointHandler has no {sorted(set(options) - set(known))}")
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))
    checkpointer.save(path, tree, **(save_args_of(tree) if args is None else {"save_args": args}))
    done(checkpointer)


def save_default(path, values, large):
    tree = full_tree(values, large)
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(path, tree, **save_args_of(tree))
    done(checkpointer)
    return {"state": tree}


def save_zarr(path, values, large):
    tree = full_tree(values, large)
    by_handler(path, tree, use_ocdbt=False)
    return {"state": tree}


def save_ocdbt(path, values, large):
    import tensorstore as ts

    tree = full_tree(values, large)
    if VERSION < (0, 4):  # there it is asked for twice
        context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 1000000}, "file_io_concurrency": {"limit": 16}})
        ocp.type_handlers.register_standard_handlers_with_options(use_ocdbt=True, ts_context=context)
    try:
        by_handler(path, tree, use_ocdbt=True)
    finally:
        if VERSION < (0, 4):
            ocp.type_handlers.register_standard_handlers_with_options(use_ocdbt=False)
    if not (path / "manifest.ocdbt").exists():
        raise NotImplementedError("it writes no OCDBT")
    return {"state": tree}


def save_zarr3(path, values, large):
    tree = full_tree(values, large)
    by_handler(path, tree, use_ocdbt=True, use_zarr3=True)
    return {"state": tree}


def save_aggregate(path, values, large):
    tree = inline_tree(values)
    leaves = jax.tree_util.tree_map(lambda leaf: ocp.SaveArgs(aggregate=True), tree)
    by_handler(path, tree, leaves)
    if not (path / "checkpoint").exists():
        raise NotImplementedError("it puts nothing into one file")
    return {"state": tree}


def save_standard(path, values, large):
    tree = plain_tree(values, large)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, tree)
    done(checkpointer)
    return {"state": tree}


def save_array(path, values, large):
    array = values.sharded("float32", 4, 6)
    checkpointer = ocp.Checkpointer(ocp.ArrayCheckpointHandler())
    checkpointer.save(path, array)
    done(checkpointer)
    return {"state": array}


def save_manager(path, values, large):
    """Save as programs of the first versions do, with a checkpointer for each item."""
    items = {"state": full_tree(values, large), "params": {"w": values.array("float32", 2, 3)}, "config": CONFIG}
    checkpointers = {
        "state": ocp.PyTreeCheckpointer(),
        "params": ocp.PyTreeCheckpointer(),
        "config": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    path.mkdir()
    manager = ocp.CheckpointManager(path.absolute(), checkpointers, options)
    arguments = {"state": save_args_of(items["state"])}
    manager.save(STEP, items, save_kwargs=arguments, metrics=METRICS)
    done(manager)
    return items


def item_names(names):
    return {"item_names": tuple(names)} if VERSION < (0, 7) else {}


def save_items(path, values, large):
    """Save as programs of later versions do, with an argument object for each item."""
    items = {"state": full_tree(values, large), "params": {"w": values.array("float32", 2, 3)}, "config": CONFIG}
    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(items["state"]),
        params=ocp.args.StandardSave(items["params"]),
        config=ocp.args.JsonSave(CONFIG),
    )
    manager = ocp.CheckpointManager(path.absolute(), **item_names(items))
    manager.save(STEP, args=args)
    done(manager)
    return items


def save_keys(path, values, large):
    """Save PRNG keys, old and typed, as separate items."""
    keys = {"legacy": jax.random.PRNGKey(3), "typed": jax.random.key(5)}
    args = ocp.args.Composite(
        legacy=ocp.args.JaxRandomKeySave(keys["legacy"]),
        typed=ocp.args.JaxRandomKeySave(keys["typed"]),
        state=ocp.args.StandardSave({"w": values.array("float32", 2)}),
    )
    manager = ocp.CheckpointManager(path.absolute(), **item_names([*keys, "state"]))
    manager.save(STEP, args=args)
    done(manager)
    return {"legacy": keys["legacy"], "typed": jax.random.key_data(keys["typed"])}


def save_one_item(path, values, large):
    tree = plain_tree(values, large)
    path.mkdir()
    if hasattr(ocp, "args") and VERSION >= (0, 5):
        manager = ocp.CheckpointManager(path.absolute())
        manager.save(STEP, args=ocp.args.StandardSave(tree))
    else:
        manager = ocp.CheckpointManager(path.absolute(), ocp.PyTreeCheckpointer())
        manager.save(STEP, tree)
    done(manager)
    return {"default": tree}


def save_flax(path, values, large):
    from flax.training import checkpoints

    state = train_state(values)
    checkpoints.save_checkpoint(str(path.absolute()), state, STEP, orbax_checkpointer=ocp.PyTreeCheckpointer())
    return {"state": state}


def save_train_state(path, values, large):
    state = train_state(values)
    by_handler(path, state)
    return {"state": state}


def save_v1(path, values, large):
    from orbax.checkpoint import v1

    tree = full_tree(values, large)
    v1.save_pytree(path.absolute(), tree)
    return {"state": tree}


FORMS = {
    "default": save_default,
    "zarr": save_zarr,
    "ocdbt": save_ocdbt,
    "zarr3": save_zarr3,
    "aggregate": save_aggregate,
    "standard": save_standard,
    "array": save_array,
    "manager": save_manager,
    "items": save_items,
    "keys": save_keys,
    "one-item": save_one_item,
    "flax": save_flax,
    "train-state": save_train_state,
    "v1": save_v1,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true", help="more arrays, of more bytes")
    parser.add_argument("--forms", default=",".join(FORMS))
    options = parser.parse_args()
    for form in options.forms.split(","):
        folder = options.folder.absolute() / form
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            items = FORMS[form](folder / "saved", Values(options.seed, options.large), options.large)
        except Exception as error:  # noqa: BLE001  # versions without this form fail in many ways
            traceback.print_exc()
            print(f"{form}: not there: {type(error).__name__}: {str(error)[:200]!r}", flush=True)
            continue
        items = {name: {"json": item} if item is CONFIG else encoded(item) for name, item in items.items()}
        (folder / "expected.json").write_text(json.dumps(items, ensure_ascii=False))
        print(f"{form}: written", flush=True)
    for folder in options.folder.absolute().iterdir():  # all writes have ended
        if not (folder / "expected.json").exists():
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

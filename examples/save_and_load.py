"""One checkpoint: saved from a mesh of 4x2 devices, inspected, and loaded in four ways.

`python examples/save_and_load.py [DIRECTORY]`; by default in a temporary directory. The devices are CPU devices.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors import safe_open

import jaxckpt_train as jct

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def split_over(*mesh_shape: int) -> NamedSharding:
    """Rows and columns split over a mesh of this shape."""
    mesh = jax.make_mesh(mesh_shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec("x", "y"))


def layout(array: jax.Array) -> str:
    """Describe the placement of an array."""
    shard = array.sharding.shard_shape(array.shape)
    return f"{array.dtype}{list(array.shape)} in shards of {list(shard)} on {len(array.sharding.device_set)} devices"


def look_and_load(path: Path, kernel: jax.Array) -> None:
    """Show the metadata of the checkpoint at `path`, and load it in four ways."""
    print("\nWhat is in it. Reads no array and touches no device:")
    for name, leaf in jct.metadata(path).checkpointables["state"].leaves.items():
        print(f"  {name:14} {leaf.description:24} {leaf.bytes:5} bytes  {leaf.sharding or ''}")

    print("\n1. Without a target: nested dicts of numpy arrays (and PRNG keys), on any machine, without the model:")
    print(f"  {jax.tree.map(lambda leaf: type(leaf).__name__, jct.load(path))}")

    print(f"\n2. A part, by pattern. No more is read:\n  {jax.tree.map(np.shape, jct.load(path, only='params/**'))}")

    print("\n3. Onto another mesh, 2x4 instead of 4x2:")
    like = {"params": {"kernel": jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=split_over(2, 4))}}
    again = jct.load(path, like, only="params/kernel")["params"]["kernel"]
    print(f"  {layout(again)}; same bytes: {same(again, kernel)}")

    print("\n4. With another tool: the data files are safetensors files, a shard is a tensor named by its place:")
    with safe_open(path / "state" / "p00000-s000.safetensors", framework="numpy") as file:
        for name in sorted(name for name in list(file.keys()) if name.startswith("params/kernel@")):
            box = tuple(slice(int(start), int(stop)) for start, stop in re.findall(r"(\d+):(\d+)", name))
            print(f"  {name}: same bytes: {same(file.get_tensor(name), kernel[box])}")


def same(array: jax.Array | np.ndarray, expected: jax.Array) -> bool:
    """Whether two arrays have the same bytes; the example fails if they do not."""
    equal = np.asarray(array).tobytes() == np.asarray(expected).tobytes()
    assert equal, "a load must give what was saved"
    return equal


def main(directory: str) -> None:
    """Save a small state below `directory`, then inspect it."""
    path = Path(directory, "checkpoint")
    kernel = jax.device_put(jax.random.normal(jax.random.key(0), (64, 32)), split_over(4, 2))
    state = {"params": {"kernel": kernel, "bias": jnp.zeros(32, jnp.bfloat16)}, "key": jax.random.key(7), "step": 12}
    jct.save(path, state, overwrite=True)  # durable when it returns; save_async returns after the snapshot
    print(f"saved {path}: kernel {layout(kernel)}")
    look_and_load(path, kernel)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(sys.argv[1] if len(sys.argv) > 1 else temporary)

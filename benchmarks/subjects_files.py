"""The subjects that put JAX arrays into one file with one call: `safetensors` and `flax_msgpack`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.arrays import State

PARTIAL = {"params"}


class Safetensors:
    """`safetensors.flax`: `save_file` of a flat dict of JAX arrays, `load_file` to JAX arrays.

    Of the package's interfaces this is the one that ends in JAX arrays. A part is read with `safe_open`. Nothing stays
    mapped: `jnp.array` copies every tensor out of the file.
    """

    arrays = "jax"
    durable = False
    packages = ("safetensors", "jax", "jaxlib", "numpy")

    def __init__(self) -> None:
        import flax.traverse_util
        import safetensors
        import safetensors.flax

        self._flatten, self._unflatten = flax.traverse_util.flatten_dict, flax.traverse_util.unflatten_dict
        self._module, self._open = safetensors.flax, safetensors.safe_open

    def start_save(self, path: Path, state: State) -> None:
        path.mkdir()
        self._module.save_file(self._flatten(state, sep="/"), path / "model.safetensors")

    def load(self, path: Path, like: State) -> State:
        file = path / "model.safetensors"
        if like.keys() == PARTIAL:
            with self._open(file, framework="flax") as opened:
                flat = {name: opened.get_tensor(name) for name in self._flatten(like, sep="/")}
        else:
            flat = self._module.load_file(file)
        return self._unflatten(flat, sep="/")

    def close(self) -> None:
        """Nothing is kept."""


class FlaxMsgpack:
    """`flax.serialization.to_bytes` written to a file; `from_bytes`, whose numpy arrays go to the device."""

    arrays = "jax"
    durable = False
    packages = ("flax", "msgpack", "jax", "jaxlib", "numpy")

    def __init__(self) -> None:
        import flax.serialization
        import jax

        self._flax, self._jax = flax.serialization, jax

    def start_save(self, path: Path, state: State) -> None:
        path.mkdir()
        (path / "state.msgpack").write_bytes(self._flax.to_bytes(state))

    def load(self, path: Path, like: State) -> State:
        state = self._flax.from_bytes(like, (path / "state.msgpack").read_bytes())
        return self._jax.tree.map(lambda array, leaf: self._jax.device_put(array, leaf.sharding), state, like)

    def close(self) -> None:
        """Nothing is kept."""

"""States of real trainings: of an MNIST, a Llama-like and a Gemma-like model, sharded over devices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

MESH = (4, 2)


def mesh() -> jax.sharding.Mesh:
    """Eight devices in two axes."""
    return jax.make_mesh(MESH, ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))


def sharded(shape: tuple[int, ...], dtype: Any, seed: int, *axes: str | None) -> jax.Array:
    """Return an array of random numbers, sharded over the devices."""
    values = np.random.default_rng(seed).integers(-1000, 1000, shape).astype(np.float32) / 7
    sharding = NamedSharding(mesh(), PartitionSpec(*axes))
    return jax.device_put(values.astype(dtype), sharding)


def mnist() -> TrainState:
    """A Flax train state with Adam, of small whole arrays."""
    params = {
        "Conv_0": {"kernel": jnp.arange(3 * 3 * 4.0).reshape(3, 3, 1, 4), "bias": jnp.ones(4)},
        "Dense_0": {"kernel": jnp.linspace(-1, 1, 40).reshape(4, 10), "bias": jnp.zeros(10)},
    }
    state = TrainState.create(apply_fn=math.sqrt, params=params, tx=optax.adam(1e-3))
    return state.apply_gradients(grads=jax.tree.map(lambda leaf: leaf + 0.5, params))


def llama() -> dict[str, Any]:
    """Stacked layers in bfloat16 with float32 moments, sharded both ways; PRNG keys, a step, text."""
    params = {
        "embed": sharded((64, 16), jnp.bfloat16, 1, "tensor", "fsdp"),
        "layers": {
            "attn": {"qkv": sharded((3, 16, 48), jnp.bfloat16, 2, None, "fsdp", "tensor")},
            "mlp": {"up": sharded((3, 16, 32), jnp.bfloat16, 3, None, "fsdp", "tensor")},
            "norm": sharded((3, 16), jnp.float32, 4),
        },
    }
    moments = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) * 2, params)
    return {
        "params": params,
        "opt_state": {"mu": moments, "count": jnp.int32(12)},
        "rngs": {"dropout": jax.random.key(7), "legacy": jax.random.PRNGKey(8)},
        "step": 12,
        "name": "llama, état",
    }


def gemma() -> dict[str, Any]:
    """Layers in a list, a tuple, empty containers and None, uneven arrays, integers of few bits, numpy."""
    return {
        "layers": [{"kernel": sharded((8, 6), jnp.float32, number, "fsdp"), "scale": None} for number in range(3)],
        "quantised": sharded((8, 8), jnp.int8, 9, "fsdp", "tensor"),
        "halves": (jnp.arange(5, dtype=jnp.float16), np.arange(3, dtype=np.int64)),
        "empty": {"a": {}, "b": []},
        "scalars": {"rate": 0.125, "flag": True, "big": 2**40},
        "float8": sharded((16, 4), jnp.float8_e4m3fn, 11, "fsdp"),
    }


STATES = {"mnist": mnist, "llama": llama, "gemma": gemma}

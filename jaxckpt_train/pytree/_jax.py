"""Compatibility with several JAX versions, and isolation from the JAX settings of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxckpt_train.store.boxes import Box, box_from_index, full_box

try:
    from jax import enable_x64
except ImportError:
    from jax.experimental import enable_x64  # type: ignore[attr-defined, no-redef]
try:
    from jax.sharding import get_mesh
except ImportError:
    from jax._src.mesh import get_concrete_mesh

    def get_mesh() -> jax.sharding.Mesh:
        """Return the mesh in effect; an empty one if there is none."""
        return get_concrete_mesh() or _NO_MESH


# Each name was introduced in another release: `set_mesh` with 0.7.1, `enable_x64` with 0.8.0, `get_mesh` with 0.8.1.
try:
    from jax import set_mesh
except ImportError:
    from jax.sharding import use_mesh as set_mesh  # type: ignore[attr-defined, no-redef]
__all__ = ["boxes_of", "enable_x64", "get_mesh", "set_mesh", "without_caller_settings"]
_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


@contextlib.contextmanager
def without_caller_settings() -> Iterator[None]:
    """Suspend the caller's mesh and `disable_jit` within, so that JAX compiles programs for arrays on any device.

    In a training loop under `jax.set_mesh(mesh)`, JAX refuses arrays on other devices, and the shard of an array that
    one process holds is such an array. Under `disable_jit`, programs ignore where their results should go.
    """
    with set_mesh(_NO_MESH), jax.disable_jit(False):
        yield


def boxes_of(indices: Mapping[jax.Device, Any], shape: tuple[int, ...]) -> Iterator[tuple[jax.Device, Box]]:
    """Yield each device of a map of JAX from devices to indices, with its box."""
    for device, index in indices.items():
        yield device, full_box(shape) if index is None else box_from_index(index, shape)

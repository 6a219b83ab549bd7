"""What a caller has set in JAX for its own programs, kept away from ours: a mesh, or that nothing is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


@contextlib.contextmanager
def nothing_set() -> Iterator[None]:
    """Within, JAX compiles programs for the arrays that they are given, wherever these lie.

    In a training loop that runs under `jax.set_mesh(mesh)` it would refuse arrays of other devices, and a shard that a
    process has of an array is one of those. Without compiling, programs would ignore where their results should go.
    """
    with jax.set_mesh(_NO_MESH), jax.disable_jit(False):
        yield

"""What a caller has set in JAX for its own programs, kept away from ours: a mesh, or that nothing is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

try:
    from jax import enable_x64
except ImportError:
    from jax.experimental import enable_x64  # type: ignore[attr-defined, no-redef]
try:
    from jax.sharding import get_mesh
except ImportError:
    from jax._src.mesh import get_concrete_mesh

    def get_mesh() -> jax.sharding.Mesh:
        """The mesh in effect; an empty one if there is none."""
        return get_concrete_mesh() or _NO_MESH


# Each name came with a release of its own: `set_mesh` with 0.7.1, `enable_x64` with 0.8.0, `get_mesh` with 0.8.1.
try:
    from jax import set_mesh
except ImportError:
    from jax.sharding import use_mesh as set_mesh  # type: ignore[attr-defined, no-redef]
__all__ = ["enable_x64", "get_mesh", "nothing_set", "set_mesh"]
_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


@contextlib.contextmanager
def nothing_set() -> Iterator[None]:
    """Within, JAX compiles programs for the arrays that they are given, wherever these lie.

    In a training loop that runs under `jax.set_mesh(mesh)` it would refuse arrays of other devices, and a shard that a
    process has of an array is one of those. Without compiling, programs would ignore where their results should go.
    """
    with set_mesh(_NO_MESH), jax.disable_jit(False):
        yield

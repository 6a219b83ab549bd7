"""The caller's settings are read and set in every supported version of JAX."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(["get_mesh"], id="as-jax-0.8.0"),
        pytest.param(["get_mesh", "enable_x64"], id="as-jax-0.7.1"),
        pytest.param(["get_mesh", "enable_x64", "set_mesh"], id="as-jax-0.7.0"),
    ],
)
def test_names_that_jax_has_elsewhere_are_found(gone: list[str], run_python) -> None:
    program = """
import sys

import jax
import jax.experimental

if hasattr(jax, "enable_x64"):
    jax.experimental.enable_x64 = jax.enable_x64
if hasattr(jax, "set_mesh"):
    jax.sharding.use_mesh = jax.set_mesh
for name in sys.argv[1:]:
    vars(jax).pop(name, None)
    vars(jax.sharding).pop(name, None)

import jaxckpt_train
from jaxckpt_train.pytree import _jax

mesh = jax.make_mesh((1,), ("x",))
with _jax.set_mesh(mesh), _jax.enable_x64(True):
    print(_jax.get_mesh() == mesh, jax.numpy.arange(2.0).dtype)
    with _jax.without_caller_settings():
        print(_jax.get_mesh().empty)
print(_jax.get_mesh().empty, jax.numpy.arange(2.0).dtype)
"""
    done = run_python(program, *gone, check=True, fresh=True)
    assert done.stdout.splitlines() == ["True float64", "True", "True float32"]

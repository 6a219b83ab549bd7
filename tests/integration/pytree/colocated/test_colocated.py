"""Processes that save through JAX's Colocated Python on its CPU backend: each device acts as a host."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxckpt_train as jct
from jaxckpt_train.pytree.colocated import transfer
from tests.conftest import RunPython
from tests.support.colocated_states import MIB


@pytest.fixture(autouse=True)
def _cuts_of_a_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small arrays as large ones are cut."""
    monkeypatch.setattr(transfer, "LEAST_CUT_BYTES", MIB)


def test_colocated_python_without_its_pickler_is_reported(run_python: RunPython, tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['cloudpickle'] = None\n"
        "import jax.numpy as jnp, jaxckpt_train as jct\n"
        "jct.save_async(sys.argv[1], {'a': jnp.zeros(3)}, settings=jct.StoreSettings(colocated=True))\n"
        "print('began')"
    )
    done = run_python(script, tmp_path / "c")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "SettingsError: StoreSettings.colocated" in done.stderr
    assert "cloudpickle" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_script_that_ends_without_waiting_still_finishes_save(run_python: RunPython, tmp_path: Path) -> None:
    script = (
        "import sys, jax, jax.numpy as jnp, jaxckpt_train as jct\n"
        "tree = {str(i): jax.device_put(jnp.full((1 << 20,), i), d) for i, d in enumerate(jax.devices())}\n"
        "jct.save_async(sys.argv[1], tree, settings=jct.StoreSettings(colocated=True))"
    )
    run_python(script, tmp_path / "c", devices=4, check=True)
    loaded = jct.load(tmp_path / "c")
    assert {name: int(leaf[-1]) for name, leaf in loaded.items()} == {"0": 0, "1": 1, "2": 2, "3": 3}
    assert jct.verify(tmp_path / "c").ok


def test_importing_the_package_imports_no_colocated_python(run_python: RunPython, tmp_path: Path) -> None:
    script = (
        "import sys, jax.numpy as jnp, jaxckpt_train as jct\n"
        "jct.save(sys.argv[1], {'a': jnp.zeros(3)}); jct.load(sys.argv[1], like={'a': jnp.ones(3)})\n"
        "print([name for name in sys.modules if 'colocated_python' in name])"
    )
    assert run_python(script, tmp_path / "c", check=True, fresh=True).stdout.strip() == "[]"

"""The measured peers: each loads what it saved, and each variant matches its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import subjects_files, subjects_orbax
from benchmarks.registry import ENTRIES

JAX_PEERS = {
    name: entry.made_by.partition(":")
    for name, entry in ENTRIES.items()
    if entry.made_by.startswith(("subjects_files", "subjects_orbax"))
}
ZEROS = 1 << 20


def saved_by(name: str, path: Path) -> tuple[Any, dict[str, Any]]:
    module, _, maker = JAX_PEERS[name]
    subject = getattr({"subjects_files": subjects_files, "subjects_orbax": subjects_orbax}[module], maker)()
    content = np.random.default_rng(0).random((64, 48), np.float32)
    state = {"params": {"w": jnp.array(content)}, "opt": {"zeros": jnp.zeros(ZEROS, jnp.uint8)}}
    wait = subject.start_save(path, state)
    if wait is not None:
        wait()
    return subject, state


def stored(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", JAX_PEERS)
def test_peer_loads_what_it_saved(name: str, tmp_path: Path) -> None:
    subject, state = saved_by(name, tmp_path / "one")
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    loaded = subject.load(tmp_path / "one", like)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for found, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert isinstance(found, jax.Array)
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    subject.close()


@pytest.mark.parametrize("name", [name for name in JAX_PEERS if name.startswith("orbax")])
def test_orbax_variant_matches_its_name(name: str, tmp_path: Path) -> None:
    subject, _ = saved_by(name, tmp_path / "one")
    subject.close()
    has_ocdbt = any(file.name == "manifest.ocdbt" for file in (tmp_path / "one").rglob("*"))
    assert has_ocdbt is not name.endswith("no_ocdbt")
    is_compressed = stored(tmp_path / "one") < ZEROS // 2
    assert is_compressed is not name.endswith("no_compression")

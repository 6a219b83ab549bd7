"""Writes of arrays for Orbax: many small arrays become few files, memory is bounded, and Orbax restores them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.formats import orbax_write
from jaxckpt_train.formats.orbax_write import export_orbax
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import open_committed
from tests.support.same_trees import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
BACKEND = LocalBackend()


def export(source: Path, final: Path, settings: StoreSettings) -> list[int]:
    """Export a checkpoint, and return the sizes that the progress callback received."""
    sizes: list[int] = []
    committed = open_committed(BACKEND, str(source))
    part = committed.manifest.parts[0]
    export_orbax(BACKEND, committed, part, BACKEND, str(final), settings, progress=sizes.append)
    return sizes


def restored(item: Path) -> object:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(item)


def test_many_small_leaves_become_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax_write, "CHUNK_BYTES", 4 << 20)  # the large leaf has several chunks, and is written alone
    large = np.random.default_rng(0).normal(size=(6 << 10, 512))
    state = {f"l{n}": {"w": np.full(3 + n, n, np.float32)} for n in range(1000)} | {"large": large}
    assert large.nbytes > orbax_write.BATCH_BYTES
    jct.save(tmp_path / "a", state)
    sizes = export(tmp_path / "a", tmp_path / "5", StoreSettings())
    assert sum(each.is_file() for each in (tmp_path / "5").rglob("*")) < 40
    assert sum(sizes) == sum(layer["w"].nbytes for layer in list(state.values())[:-1]) + large.nbytes
    assert_same(restored(tmp_path / "5" / "state"), state)


def test_small_leaves_are_committed_in_bounded_batches(tmp_path: Path) -> None:
    state = {f"v{n:02}": np.random.default_rng(n).normal(size=10_000) for n in range(40)} | {
        "empty": np.zeros((0, 3)),
        "one": np.array(3.0, np.float32),
        "larger than a batch": np.random.default_rng(99).normal(size=50_000),
        "larger than the budget": np.random.default_rng(98).normal(size=200_000),
    }
    jct.save(tmp_path / "a", state)
    sizes = export(tmp_path / "a", tmp_path / "5", StoreSettings(read_budget_bytes=1 << 20))
    assert sum(sizes) == sum(value.nbytes for value in state.values())
    small = [nbytes for nbytes in sizes if nbytes < 400_000]
    assert 0 < max(small) <= 1 << 18
    assert_same(restored(tmp_path / "5" / "state"), state)

"""`staging_bytes` limits what leaves the devices in one save, however many checkpointables there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.checkpointables import staging
from jaxckpt_train.pytree import copies
from jaxckpt_train.pytree.copies import TransferBudget

KIB = 1 << 10
STAGING_BYTES = 1 << 20
LEAF_BYTES = 256 * KIB
BOUND_BYTES = STAGING_BYTES + LEAF_BYTES  # a thread that fetches before its turn takes one leaf more


class Total:
    """The bytes under way in all budgets of a test together, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def made(self, limit_bytes: int) -> TransferBudget:
        return _Counted(limit_bytes, self)


class _Counted(TransferBudget):
    def __init__(self, limit_bytes: int, total: Total) -> None:
        super().__init__(limit_bytes)
        self._total = total

    def take(self, nbytes: int) -> bool:
        before = self._under_way
        has_room = super().take(nbytes)
        self._count(before)
        return has_room

    def take_anyway(self, nbytes: int) -> None:
        before = self._under_way
        super().take_anyway(nbytes)
        self._count(before)

    def _count(self, before: int) -> None:
        self._total.now += self._under_way - before
        self._total.most = max(self._total.most, self._total.now)


def parts(leaves: int) -> dict[str, Any]:
    """Three checkpointables, each of more than all staging buffers."""
    elements = LEAF_BYTES // 4
    return {
        name: {f"x{n}": jnp.arange(elements, dtype=jnp.float32) + 100 * n + len(name) for n in range(leaves)}
        for name in ("params", "opt", "ema")
    }


def saved(monkeypatch: pytest.MonkeyPatch, path: Path, mode: Any) -> int:
    """Save three checkpointables, and return the most bytes that were under way at a time."""
    total = Total()
    monkeypatch.setattr(staging, "TransferBudget", total.made)
    monkeypatch.setattr(copies, "TransferBudget", total.made)
    state = parts(8)
    settings = jct.StoreSettings(snapshot=mode, staging_bytes=STAGING_BYTES, io_threads=1)
    jct.save_checkpointables(path, state, settings=settings)
    loaded = jct.load_checkpointables(path)
    for name, tree in state.items():
        for leaf, array in tree.items():
            assert np.asarray(loaded[name][leaf]).tobytes() == np.asarray(array).tobytes()
    return total.most


@pytest.mark.parametrize("mode", ["stream", "device"])
def test_checkpointables_together_keep_the_staging_limit(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    most = saved(monkeypatch, tmp_path / "c", mode)
    assert LEAF_BYTES < most <= BOUND_BYTES


def test_counter_detects_transfers_without_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage = staging._stage
    monkeypatch.setattr(
        staging, "_stage", lambda *given: stage(*given[:4], staging.TransferBudget(1 << 40), None, None)
    )
    assert saved(monkeypatch, tmp_path / "c", "stream") > BOUND_BYTES

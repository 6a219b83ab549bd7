"""Calls to hosts: one at a time for each host, on all hosts at once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pytree.colocated import host
from tests.support.colocated_states import HOSTS, MIB
from tests.support.same_trees import assert_same


def test_a_host_reads_one_budget_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {str(n): jax.device_put(np.full((MIB // 4,), n, np.float32), jax.devices()[n % 2]) for n in range(12)}
    jct.save(tmp_path / "c", tree, settings=HOSTS)
    reads, at_once, both, read = Counter[jax.Device](), Counter[jax.Device](), threading.Barrier(2), host._read

    def reading(message: np.ndarray, sharding: jax.sharding.Sharding, boxes: list[jax.Array]) -> Any:
        (device,) = sharding.device_set
        reads[device] += 1
        at_once[device] += 1
        assert at_once[device] == 1
        both.wait(60)  # the other host reads at the same time
        try:
            return read(message, sharding, boxes)
        finally:
            at_once[device] -= 1

    monkeypatch.setattr(host, "_read", reading)
    settings = jct.StoreSettings(colocated=True, read_budget_bytes=MIB)
    assert_same(jct.load(tmp_path / "c", like=tree, settings=settings), tree)
    assert list(reads.values()) == [6, 6]

"""benchmarks.memory: temporary, kept and leaked memory is measured, and the limits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import memory_trees
from benchmarks.memory_child import measure_save, run_series
from benchmarks.memory_probe import Peak, rollup_bytes, usage
from benchmarks.memory_verdict import MIB, Series, within
from benchmarks.step_time_subjects import Nothing, Wait

NOISE = 4 * MIB


class Greedy:
    """A library that copies 48 MiB in a save, and keeps `kept_bytes` after it."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes, self._kept = kept_bytes, []

    def start_save(self, path: Path, tree: Any) -> Wait:
        copy = np.ones(48 * MIB, np.uint8)
        time.sleep(0.02)
        self._kept.append(np.ones(self._kept_bytes, np.uint8))
        return lambda: copy.size

    def load(self, path: Path, like: Any) -> Any:
        raise NotImplementedError


def test_slope_of_a_series_is_computed() -> None:
    found = Series.of([500, 900] + [1000 + 7 * number for number in range(8)])
    assert found.line.slope == pytest.approx(7)
    assert (found.first_bytes, found.last_bytes) == (1000, 1049)


def test_steady_growth_is_leak_whatever_noise() -> None:
    noise = np.random.default_rng(0).integers(-64 * 1024, 64 * 1024, 50)
    assert Series.of([100 * MIB + 100 * 1024 * number + int(noise[number]) for number in range(50)]).leaks


def test_noise_and_a_single_step_are_no_leak() -> None:
    noise = np.random.default_rng(0).integers(-64 * 1024, 64 * 1024, 50)
    assert not Series.of([100 * MIB + int(one) for one in noise]).leaks
    assert not Series.of([100 * MIB + (MIB if number > 25 else 0) for number in range(50)]).leaks


def test_limit_is_budget_plus_allowance() -> None:
    assert within(96 * MIB, 64 * MIB)
    assert not within(96 * MIB + 1, 64 * MIB)


def test_temporary_memory_is_measured() -> None:
    with Peak() as peak:
        np.ones(64 * MIB, np.uint8)
    assert peak.extra == pytest.approx(64 * MIB, abs=NOISE)
    assert peak.samples > 0


def test_kernel_counters_agree_with_page_walk() -> None:
    assert abs(usage().total - rollup_bytes()) < NOISE


def test_copy_during_save_is_measured(tmp_path: Path) -> None:
    answer = measure_save(Greedy(0), {"leaf": jnp.zeros(8)}, tmp_path / "save")
    assert answer["extra_bytes"] == pytest.approx(48 * MIB, abs=NOISE)
    assert answer["extra_private_bytes"] == pytest.approx(48 * MIB, abs=NOISE)


def test_memory_of_failed_donation_is_measured(tmp_path: Path) -> None:
    tree = {"leaf": jnp.zeros(8 * MIB, jnp.float32)}
    step = jax.jit(lambda tree: {"leaf": tree["leaf"] + 1}, donate_argnums=0).lower(tree).compile()
    held = np.asarray(tree["leaf"])
    answer = measure_save(Nothing(0.0), tree, tmp_path / "save", step)
    assert answer["extra_bytes"] == pytest.approx(32 * MIB, abs=NOISE)
    assert held.size == 8 * MIB


def test_library_without_leak_is_accepted(tmp_path: Path) -> None:
    assert not Series.of(run_series(Nothing(0.0), 20, MIB, tmp_path)["rss_bytes"]).leaks


def test_load_targets_match_the_random_trees() -> None:
    workload = memory_trees.Workload("tiny", 3, (8, 8), (4, 2), (1, 8))
    tree, like = memory_trees.make(workload), memory_trees.target(workload)
    assert memory_trees.device_bytes(tree) == workload.nbytes == 3 * 8 * 8 * 4
    moved = jax.tree.map(lambda leaf, target: jax.device_put(leaf, target.sharding), tree, like)
    assert memory_trees.byte_sum(moved) == memory_trees.byte_sum(tree)
    assert memory_trees.byte_sum(memory_trees.make(workload, seed=1)) != memory_trees.byte_sum(tree)

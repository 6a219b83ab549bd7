"""Calls to hosts: one at a time for each host, and none waits for a host that never finishes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pytree.colocated import host
from jaxckpt_train.pytree.colocated.transfer import HostQueue
from tests.support.colocated_states import HOSTS, MIB
from tests.support.same_trees import assert_same


def test_next_call_goes_to_idle_host() -> None:
    turns = HostQueue(["a", "a", "b", "a", "b"])
    assert [turns.take(), turns.take()] == [0, 2]
    turns.release(2)
    assert turns.take() == 4
    turns.release(0)
    assert turns.take() == 1


@pytest.mark.parametrize("is_ended", [False, True], ids=["released", "ended"])
def test_wait_for_host_ends_on_release(is_ended: bool) -> None:
    turns, taken = HostQueue(["a", "a"]), list[int | None]()
    assert turns.take() == 0
    waiting = threading.Thread(target=lambda: taken.append(turns.take()))
    waiting.start()
    if is_ended:
        turns.end()
    else:
        turns.release(0)
    waiting.join()
    assert taken == [None if is_ended else 1]


def test_ended_queue_gives_no_calls() -> None:
    turns = HostQueue(["a", "b"])
    turns.end()
    assert [turns.take(), turns.take()] == [None, None]


def test_a_host_reads_one_budget_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = jax.devices()[:2]
    tree = {str(n): jax.device_put(np.full((MIB // 4,), n, np.float32), jax.devices()[n % 2]) for n in range(12)}
    jct.save(tmp_path / "c", tree, settings=HOSTS)
    begun, is_fast_done, seen, read = {slow: 0, fast: 0}, threading.Event(), list[int](), host._read

    def reading(message: np.ndarray, sharding: jax.sharding.Sharding, boxes: list[jax.Array]) -> Any:
        (device,) = sharding.device_set
        begun[device] += 1
        if device == slow:
            assert is_fast_done.wait(60)
            seen.append(begun[slow])
        return read(message, sharding, boxes)

    def progress(done: int) -> None:
        if begun[fast] == 6:
            is_fast_done.set()

    monkeypatch.setattr(host, "_read", reading)
    settings = jct.StoreSettings(colocated=True, read_budget_bytes=MIB)
    assert_same(jct.load(tmp_path / "c", like=tree, settings=settings, progress=progress), tree)
    assert seen == [1, 2, 3, 4, 5, 6]

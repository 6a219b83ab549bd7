"""The time that a save waits for updates queued by JAX counts as training, not as a cost of the save."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pytree.copies import MOST_ASKED, device_wait_s, some_arrays
from jaxckpt_train.pytree.snapshot import snapshot
from jaxckpt_train.settings import SnapshotMode

LEAST_S = 0.4


@jax.jit
def work(value: jax.Array, rounds: int) -> jax.Array:
    return jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x * 1e-3) + 1, value)


@functools.cache
def rounds() -> int:
    """A number of rounds that take the device at least `LEAST_S` seconds."""
    value, count = jnp.ones((300, 300)), 50
    while True:
        started = time.perf_counter()
        jax.block_until_ready(work(value, count))
        if time.perf_counter() - started > 2 * LEAST_S:
            return count
        count *= 2


def queued() -> jax.Array:
    """An array that the device is still computing."""
    count = rounds()
    found = work(jnp.ones((300, 300)), count)
    assert not found.is_ready()
    return found


def saved(
    directory: Path, make: Callable[[], Any], mode: SnapshotMode = "auto"
) -> tuple[dict[str, Any], float, dict[str, Any]]:
    """Save a state made right before; return the event of the save, the seconds that the call took, and the state."""
    with jct.StepManager(directory, settings=jct.StoreSettings(snapshot=mode)) as manager:
        manager.own()
        state = make()
        started = time.perf_counter()
        manager.save(1, {"state": state})
        took_s = time.perf_counter() - started
        manager.wait()
        (event,) = (each for each in manager.history.events() if each["event"] == "save")
    return event, took_s, state


@pytest.mark.parametrize("mode", ["auto", "host", "stream"])
def test_wait_for_queued_updates_is_no_blocking(mode: SnapshotMode, tmp_path: Path) -> None:
    rest = {"ready": jnp.arange(3.0), "host": np.arange(4)}
    event, took_s, state = saved(tmp_path, lambda: {"slow": queued(), **rest}, mode)
    assert event["device_wait_s"] > took_s / 2
    assert event["blocked_s"] < took_s / 2
    assert event["blocked_s"] + event["device_wait_s"] <= took_s + 0.01
    assert event["snapshot_s"] + event["write_s"] < event["save_s"] - event["device_wait_s"] + 0.01
    loaded = jct.StepManager(tmp_path).restore()["state"]
    assert all(np.array_equal(loaded[name], state[name]) for name in state)


def test_device_snapshot_does_not_wait(tmp_path: Path) -> None:
    snapshot({"slow": jnp.ones((300, 300))}, "device").close()  # compiles the copies
    with jct.StepManager(tmp_path, settings=jct.StoreSettings(snapshot="device")) as manager:
        manager.own()
        slow = queued()
        manager.save(1, {"state": {"slow": slow}})
        assert not slow.is_ready()
        manager.wait()
        (event,) = (each for each in manager.history.events() if each["event"] == "save")
    assert event["device_wait_s"] > event["blocked_s"] + event["write_s"]
    assert event["blocked_s"] < LEAST_S / 2


def test_wait_for_queued_metrics_is_no_blocking(tmp_path: Path) -> None:
    jax.block_until_ready(jnp.ones((300, 300))[0, 0])  # compiles it
    with jct.StepManager(tmp_path) as manager:
        manager.own()
        loss = queued()[0, 0]
        started = time.perf_counter()
        manager.save(1, {"state": {"host": np.arange(4)}}, metrics={"loss": loss})
        took_s = time.perf_counter() - started
        manager.wait()
        (event,) = (each for each in manager.history.events() if each["event"] == "save")
    assert event["metrics"] == {"loss": float(loss)}
    assert event["device_wait_s"] > took_s / 2 > event["blocked_s"]


@pytest.mark.parametrize(
    "state",
    [
        {"numpy": np.arange(3), "number": 3},
        {"ready": jnp.arange(3), "key": jax.random.key(3)},
        {f"leaf{number}": jnp.full(2, number) for number in range(MOST_ASKED + 100)},
    ],
)
def test_computed_state_needs_no_wait(state: Any, tmp_path: Path) -> None:
    jax.block_until_ready(state)
    assert saved(tmp_path, lambda: state)[0]["device_wait_s"] < LEAST_S / 10  # 0.0, except on a busy machine


def test_deleted_and_traced_arrays_are_still_refused(tmp_path: Path) -> None:
    deleted = jnp.arange(3)
    deleted.delete()
    for state in ({"gone": deleted}, {"slow": queued(), "gone": deleted}):
        with pytest.raises(jct.UnsupportedLeafError, match="'gone'"):
            jct.save(tmp_path / "a", state)
    with pytest.raises(jct.UnsupportedLeafError, match="traced"):
        jax.jit(lambda x: jct.save(tmp_path / "a", {"x": x}))(jnp.arange(3))


def test_few_of_many_leaves_are_polled() -> None:
    many = [jnp.zeros(1)] * (10 * MOST_ASKED)
    assert 0 < len(some_arrays(many)) <= MOST_ASKED
    assert len(some_arrays(many[:MOST_ASKED])) == MOST_ASKED
    assert some_arrays(["text", None, 3, np.arange(2)]) == []
    assert device_wait_s([]) == 0.0
    assert device_wait_s([queued()]) > LEAST_S / 8


def test_queued_updates_count_as_useful_time(tmp_path: Path) -> None:
    count, state = rounds() // 4, {"slow": jnp.ones((300, 300))}
    with jct.CheckpointCallback(tmp_path, save_interval_steps=4) as ckpt:
        state = ckpt.resume(state)
        began = time.perf_counter()
        for _ in ckpt.steps(12):
            state = {"slow": work(state["slow"], count)}
            ckpt(state)
        took_s = time.perf_counter() - began
        found = ckpt.summary(show=False)
    (attempt,) = found.attempts
    assert attempt.blocked_s < took_s / 4
    assert attempt.useful_s > took_s / 2

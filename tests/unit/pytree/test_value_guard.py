"""The value guard finds nan and inf in every kind of leaf, on every device, and such states are not saved."""

from __future__ import annotations

import cmath
import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from jaxckpt_train.pytree import snapshot
from jaxckpt_train.pytree.flatten import flatten
from jaxckpt_train.pytree.snapshot import ValueGuard
from jaxckpt_train.store.segment import DTYPES

FLOATS = ["float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
WITH_INF = ["float16", "bfloat16", "float32", "complex64", "float8_e5m2"]
REJECT = jct.StoreSettings(nonfinite="reject")


def flaws(tree: Any) -> dict[str, str]:
    flat = flatten(tree)
    return dict(ValueGuard(flat.names, flat.leaves).flaws())


def holding(dtype: str, value: float, where: Any) -> Any:
    array = np.ones((3, 40), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    array[2, 17] = value
    return array if where is np else jnp.asarray(array)


@pytest.mark.parametrize("where", [np, jnp])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_nan_among_many_values_is_found(dtype: str, where: Any) -> None:
    assert flaws({"good": holding(dtype, 2.0, where), "bad": holding(dtype, np.nan, where)}) == {"bad": "nan"}


@pytest.mark.parametrize("where", [np, jnp])
@pytest.mark.parametrize("dtype", WITH_INF)
def test_an_inf_in_an_array_is_found(dtype: str, where: Any) -> None:
    assert flaws({"up": holding(dtype, np.inf, where), "down": holding(dtype, -np.inf, where)}) == {
        "up": "inf",
        "down": "inf",
    }


@pytest.mark.parametrize("order", ["=", ">"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_are_found_in_every_dtype(dtype: str, order: Any) -> None:
    for value in (np.nan, np.inf):
        array = np.zeros(3, DTYPES[dtype])
        with contextlib.suppress(ValueError, OverflowError), np.errstate(all="ignore"):  # integers and small floats
            array[1] = value
        kept = complex(array[1])
        flaw = "nan" if cmath.isnan(kept) else "inf" if cmath.isinf(kept) else None
        assert flaws({"w": array.astype(array.dtype.newbyteorder(order))}) == ({"w": flaw} if flaw else {})
        if "complex" in dtype:
            assert flaw is not None
            imaginary = np.array([0, complex(0, value)], np.complex64).astype(DTYPES[dtype])
            assert set(flaws({"w": imaginary})) == {"w"}


def test_single_number_may_be_inf_and_not_nan() -> None:
    tree = {
        "best": jnp.float32(np.inf),
        "host": np.float32(-np.inf),
        "python": float("inf"),
        "lost": jnp.float32(np.nan),
        "lost_host": np.float64(np.nan),
        "lost_python": float("nan"),
        "lost_complex": complex(1, float("nan")),
    }
    assert flaws(tree) == dict.fromkeys(("lost", "lost_host", "lost_python", "lost_complex"), "nan")


def test_leaves_without_floats_have_no_flaws() -> None:
    tree = {"n": jnp.arange(3), "b": np.ones(3, bool), "key": jax.random.key(0), "none": None, "i": 3, "empty": {}}
    assert flaws(tree) == {}
    assert flaws({"nothing": jnp.zeros((0, 4)), "host": np.zeros((0, 4))}) == {}


def test_nan_in_one_shard_is_found() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    array = np.ones((8, 8), np.float32)
    array[7, 7] = np.nan
    sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec("x", "y")))
    assert flaws({"w": sharded}) == {"w": "nan"}


def test_arrays_of_many_devices_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "TOGETHER", 3)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    places = [
        jax.devices()[0],
        jax.devices()[5],
        NamedSharding(mesh, PartitionSpec("x")),
        NamedSharding(mesh, PartitionSpec()),
    ]
    tree = {
        f"x{n:02d}": jax.device_put(np.full(8, np.nan if n % 7 == 3 else n, np.float32), places[n % 4])
        for n in range(40)
    }
    assert flaws(tree) == {f"x{n:02d}": "nan" for n in range(40) if n % 7 == 3}


def test_offloaded_arrays_are_checked() -> None:
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    assert flaws({"w": jax.device_put(jnp.full(4, jnp.inf), there), "good": jax.device_put(jnp.ones(4), there)}) == {
        "w": "inf"
    }


def test_a_guard_against_transfers_is_not_tripped(tmp_path: Path) -> None:
    with jax.transfer_guard_device_to_host("disallow"):
        assert flaws({"w": jnp.ones(4)}) == {}


def test_state_with_nan_is_rejected_as_a_step(tmp_path: Path) -> None:
    good = {"params": {"w": jnp.ones(5)}, "best": jnp.float32(np.inf)}
    bad = {"params": {"w": jnp.ones(5).at[3].set(jnp.nan)}, "best": jnp.float32(1.0)}
    with jct.StepManager(tmp_path, settings=REJECT) as manager:
        manager.save(1, {"state": good})
        manager.wait()
        manager.save(2, {"state": bad, "ema": {"w": jnp.full(2, -jnp.inf)}})
        with pytest.raises(jct.NonFiniteError, match=r"\(nan\), .*\(inf\)") as caught:
            manager.wait()
        assert caught.value.leaves == ("state/params/w", "ema/w")
        assert manager.steps == [1]
        assert [event["ok"] for event in manager.history.events() if event["event"] == "save"] == [True, False]
        manager.save(3, {"state": good})
        manager.wait()
        assert manager.steps == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "history.jsonl",
        "step-0000000001",
        "step-0000000003",
    ]


def test_guard_checks_state_of_the_call(tmp_path: Path) -> None:
    step = jax.jit(lambda w: w * jnp.nan, donate_argnums=0)
    state = jnp.ones(100_000)
    pending = jct.save_async(tmp_path / "c", {"w": state}, settings=REJECT)
    state = step(state)
    pending.wait()
    with pytest.raises(jct.NonFiniteError, match=r"'state/w' \(nan\)"):
        jct.save(tmp_path / "d", {"w": state}, settings=REJECT)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("mode", ["auto", "host", "device", "stream"])
def test_every_way_to_take_a_snapshot_is_guarded(mode: Any, tmp_path: Path) -> None:
    chosen = jct.StoreSettings(nonfinite="reject", snapshot=mode)
    with pytest.raises(jct.NonFiniteError):
        jct.save(tmp_path / "c", {"w": jnp.full(10, jnp.nan)}, settings=chosen)
    jct.save(tmp_path / "c", {"w": jnp.ones(10)}, settings=chosen)


def test_a_warning_saves_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = {f"w{n}": np.full(3, np.nan) for n in range(7)}
    jct.save(tmp_path / "c", tree, settings=jct.StoreSettings(nonfinite="warn"))
    (message,) = caplog.messages
    assert "7 leaves" in message
    assert "'state/w0' (nan)" in message
    assert "2 more" in message
    assert np.isnan(jct.load(tmp_path / "c")["w6"]).all()


def test_values_are_not_checked_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.pytree.snapshot.ValueGuard", pytest.fail)
    jct.save(tmp_path / "c", {"w": np.full(3, np.nan)})


def test_diverged_loop_resumes_from_good_step(tmp_path: Path) -> None:
    def train(state: Any, ckpt: jct.CheckpointCallback, poison_at: int) -> int:
        for step in ckpt.steps(6):
            state = {"w": state["w"] + (jnp.nan if step + 1 == poison_at else 1.0)}
            ckpt(state)
        return int(state["w"][0])

    options: dict[str, Any] = {"save_interval_steps": 1, "store": REJECT}
    with pytest.raises(jct.NonFiniteError), jct.CheckpointCallback(tmp_path, **options) as ckpt:
        train(ckpt.resume({"w": jnp.zeros(4)}), ckpt, poison_at=4)
    with jct.CheckpointCallback(tmp_path, **options) as ckpt:
        state = ckpt.resume({"w": jnp.zeros(4)})
        assert ckpt.completed_steps == 3
        assert train(state, ckpt, poison_at=0) == 6

"""What does not change between two saves of a run is not written again."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.pytree import identity
from jaxckpt_train.run.saving import CALL_S
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.buffers import aligned_buffer

MIB = 1 << 20
BASE = 4  # arrays of a MiB


@pytest.fixture(autouse=True, params=[False, True], ids=["on the host", "as on an accelerator"])
def is_on_accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where an array has memory of its own, it is recognised without a look at it."""
    if request.param:
        monkeypatch.setattr(identity, "has_own_memory", lambda: True)
        monkeypatch.setattr(identity, "is_host_memory", lambda sharding: False)
    return bool(request.param)


def base() -> dict[str, jax.Array]:
    return {f"w{number}": jnp.full(MIB // 4, number, jnp.float32) for number in range(BASE)}


def state_of(frozen: dict[str, Any], step: int) -> dict[str, Any]:
    return {"base": frozen, "lora": {"a": jnp.full(5000, step, jnp.float32)}, "step": jnp.asarray(step)}


def written_bytes(manager: jct.StepManager) -> list[int]:
    """The bytes that each save wrote, from the history."""
    return [event["bytes"] - event["taken_bytes"] for event in manager.history.events() if event["event"] == "save"]


def save(manager: jct.StepManager, step: int, state: Any) -> None:
    manager.save(step, {"state": state})
    manager.wait()


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def check(directory: Path, step: int, state: Any) -> None:
    """A step is whole, alone, and its files hold exactly its tensors."""
    path = jct.StepManager(directory).path(step)
    assert jct.verify(path).ok
    assert_same(
        jct.load(path)["state"] if "state" in jct.load(path) else jct.load(path), jax.tree.map(np.asarray, state)
    )
    tensors = [name for file in Path(path).rglob("*.safetensors") for name in load_file(file)]
    assert len(tensors) == len(set(tensors)) == len(jax.tree.leaves(state))


@pytest.mark.parametrize("frozen", [None, "base/**"])
def test_same_arrays_are_written_twice_at_most(tmp_path: Path, frozen: str | None) -> None:
    kept = base()
    with jct.StepManager(tmp_path, frozen=frozen) as manager:
        for step in range(1, 5):
            save(manager, step, state_of(kept, step))
        written = written_bytes(manager)
    full = 1 if frozen else 2
    assert all(each > BASE * MIB for each in written[:full])
    assert all(each < MIB // 10 for each in written[full:])
    for step in range(1, 5):
        check(tmp_path, step, state_of(kept, step))


def test_equal_values_in_new_arrays_are_found_by_their_digests(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        for step in range(1, 6):
            save(manager, step, state_of({name: np.asarray(each) for name, each in base().items()}, step))
        written = written_bytes(manager)
    assert [each > BASE * MIB for each in written] == [True, True, False, False, False]
    check(tmp_path, 5, state_of(base(), 5))


def test_first_save_after_a_resume_takes_over(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        save(manager, 1, state_of(base(), 1))
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        state = manager.restore({"state": state_of(base(), 0)})["state"]
        save(manager, 2, state_of(state["base"], 2))
        assert written_bytes(manager)[-1] < MIB // 10
    check(tmp_path, 2, state_of(base(), 2))


def test_deleted_steps_harm_no_other(tmp_path: Path) -> None:
    kept = base()
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        for step in range(1, 6):
            save(manager, step, state_of(kept, step))
    for step in (1, 5, 3):
        shutil.rmtree(jct.StepManager(tmp_path).path(step))
        for left in jct.StepManager(tmp_path).steps:
            check(tmp_path, left, state_of(kept, left))


def test_array_changed_in_place_is_written(tmp_path: Path) -> None:
    kept = {name: np.array(each) for name, each in base().items()}
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        for step in range(1, 5):
            kept["w1"][step] = -step
            save(manager, step, state_of(kept, step))
            check(tmp_path, step, state_of(kept, step))


def test_donated_and_replaced_array_is_written(tmp_path: Path) -> None:
    kept = base()
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        for step in range(1, 6):
            save(manager, step, state_of(kept, step))
            check(tmp_path, step, state_of(kept, step))
            if step in (2, 3):
                kept = {**kept, "w2": add(kept["w2"])}


@pytest.mark.parametrize("mode", ["auto", "host", "device"])
def test_array_may_be_donated_where_no_file_can_be_taken_over(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is trained in turns with others, on a file system without links."""
    started = threading.Event()

    def clone(*paths: object) -> bool:
        assert started.wait(30)
        return False

    monkeypatch.setattr(LocalBackend, "clone", clone)
    add, kept = jax.jit(lambda x: x + 1, donate_argnums=0), base()
    with jct.StepManager(tmp_path, frozen="base/**", settings=jct.StoreSettings(snapshot=mode)) as manager:
        for step in range(1, 7):
            started.clear()
            expected = state_of({name: np.array(each) for name, each in kept.items()}, step)
            manager.save(step, {"state": state_of(kept, step)})
            if step % 3 == 0:
                kept = {**kept, "w2": add(kept["w2"])}
            started.set()
            manager.wait()
            check(tmp_path, step, expected)


def test_streamed_save_does_not_wait_for_what_is_taken_over(tmp_path: Path) -> None:
    kept = base()
    with jct.StepManager(tmp_path, frozen="base/**", settings=jct.StoreSettings(snapshot="stream")) as manager:
        for step in range(1, 4):
            kept |= {"w1": jnp.array(np.asarray(kept["w1"]))}
            started = time.perf_counter()
            manager.save(step, {"state": state_of(kept, step)})
            assert time.perf_counter() - started < CALL_S / 2
            manager.wait()
            check(tmp_path, step, state_of(kept, step))
        assert all(each < MIB // 10 for each in written_bytes(manager)[1:])


def test_vanished_file_is_written_again(tmp_path: Path) -> None:
    kept = base()
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        save(manager, 1, state_of(kept, 1))
        for file in Path(manager.path(1)).rglob("*.safetensors"):
            os.unlink(file)
        save(manager, 2, state_of(kept, 2))
    check(tmp_path, 2, state_of(kept, 2))


def test_save_fails_if_file_and_array_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_accelerator: bool
) -> None:
    kept, is_donated = base(), threading.Event()
    clone, add = LocalBackend.clone, jax.jit(lambda x: x + 1, donate_argnums=0)

    def waiting(self: LocalBackend, source: str, target: str, size: int) -> bool:
        assert is_donated.wait(30)
        return clone(self, source, target, size)

    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        for step in range(1, 4):
            save(manager, step, state_of(kept, step))
        shutil.rmtree(manager.path(3))
        monkeypatch.setattr(LocalBackend, "clone", waiting)
        expected = state_of({name: np.array(each) for name, each in kept.items()}, 4)
        manager.save(4, {"state": state_of(kept, 4)})
        kept = {**kept, "w1": add(kept["w1"])}
        is_donated.set()
        if is_on_accelerator:
            with pytest.raises(StorageError, match="'base/w1'"):
                manager.wait()
        else:
            manager.wait()
            check(tmp_path, 4, expected)
        save(manager, 5, state_of(kept, 5))
    assert jct.StepManager(tmp_path).steps == ([1, 2, 5] if is_on_accelerator else [1, 2, 4, 5])
    check(tmp_path, 5, state_of(kept, 5))


def test_file_behind_a_symbolic_link_is_written_again(tmp_path: Path) -> None:
    kept, run = base(), tmp_path / "run"
    with jct.StepManager(run, frozen="base/**") as manager:
        save(manager, 1, state_of(kept, 1))
        for file in Path(manager.path(1)).rglob("*.safetensors"):
            os.symlink(file.rename(tmp_path / file.name), file)
        save(manager, 2, state_of(kept, 2))
    check(run, 2, state_of(kept, 2))


def test_damage_is_not_taken_over(tmp_path: Path) -> None:
    kept = base()
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        for step in (1, 2):
            save(manager, step, state_of(kept, step))
    shared = next(file for file in Path(manager.path(2)).rglob("*.safetensors") if file.stat().st_nlink == 2)
    data = bytearray(shared.read_bytes())
    data[-1] ^= 1
    shared.write_bytes(data)
    assert [jct.verify(manager.path(step)).ok for step in (1, 2)] == [False, False]
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        with pytest.raises(jct.CorruptCheckpointError):
            manager.restore({"state": state_of(kept, 0)})
        save(manager, 3, state_of(kept, 3))
    check(tmp_path, 3, state_of(kept, 3))


def test_damage_that_is_found_later_is_not_taken_over(tmp_path: Path) -> None:
    kept = base()
    with jct.StepManager(tmp_path) as manager:
        for step in range(1, 5):
            save(manager, step, state_of(kept, step))
        damaged = manager.path(4)
        for file in Path(damaged).rglob("*.safetensors"):
            if file.stat().st_nlink > 1:
                file.write_bytes(file.read_bytes()[:-1] + b"\1")
        assert not jct.verify(damaged).ok
        assert manager.restore({"state": state_of(kept, 0)})["state"]["step"] < 4
        save(manager, 5, state_of(kept, 5))
        check(tmp_path, 5, state_of(kept, 5))


def test_damage_that_a_load_finds_is_not_taken_over(tmp_path: Path) -> None:
    kept = base()
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        for step in (1, 2):
            save(manager, step, state_of(kept, step))
        for file in Path(manager.path(2)).rglob("*.safetensors"):
            if file.stat().st_nlink == 2:
                file.write_bytes(file.read_bytes()[:-1] + b"\1")
        with pytest.raises(jct.CorruptCheckpointError):
            manager.load()
        save(manager, 3, state_of(kept, 3))
        check(tmp_path, 3, state_of(kept, 3))
        save(manager, 4, state_of(kept, 4))
        assert written_bytes(manager)[-1] < MIB // 10
        check(tmp_path, 4, state_of(kept, 4))


def test_array_that_shares_memory_with_numpy_is_compared(tmp_path: Path, is_on_accelerator: bool) -> None:
    if is_on_accelerator:
        pytest.skip("an accelerator shares no memory with NumPy")
    shared = aligned_buffer(4 * MIB).view(np.float32)
    state = {"base": {"w": jax.dlpack.from_dlpack(shared)}, "step": jnp.asarray(0)}
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        for step in range(1, 4):
            shared[step] = step
            save(manager, step, state)
            assert np.asarray(jct.load(manager.path(step))["base"]["w"]).tobytes() == shared.tobytes()


def test_truncated_file_is_not_taken_over(tmp_path: Path) -> None:
    kept = base()
    with jct.StepManager(tmp_path, frozen="base/**") as manager:
        save(manager, 1, state_of(kept, 1))
        for file in Path(manager.path(1)).rglob("*.safetensors"):
            os.truncate(file, 5000)
        save(manager, 2, state_of(kept, 2))
    check(tmp_path, 2, state_of(kept, 2))

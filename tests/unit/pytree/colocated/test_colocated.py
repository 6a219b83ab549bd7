"""Saving and loading through JAX's Colocated Python on its CPU backend: each device acts as a host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jaxckpt_train as jct
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.pytree import copies, snapshot
from jaxckpt_train.pytree.colocated import transfer
from jaxckpt_train.pytree.colocated.host import (
    Answer,
    WritePlan,
    WrittenArray,
    answer_array,
    decode_answer,
    plan_array,
    room_for_index,
    settings_there,
    write_here,
)
from jaxckpt_train.pytree.colocated.transfer import HostReads, cpu_device_of
from jaxckpt_train.pytree.copies import is_single_controller
from jaxckpt_train.pytree.placing import ArrayLoad, place_array
from jaxckpt_train.pytree.target import LeafRequest
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import open_committed
from tests.support.colocated_states import HOSTS, MIB, PLAIN, abstract, spread, written_by
from tests.support.same_trees import assert_same, raw


@pytest.fixture(autouse=True)
def _cuts_of_a_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small arrays as large ones are cut."""
    monkeypatch.setattr(transfer, "LEAST_CUT_BYTES", MIB)


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 100, shape).astype(dtype)


def everything() -> dict[str, Any]:
    return {
        "grid": spread(numbers(64, 48), (4, 2), "x", "y"),
        "rows": spread(numbers(16, 3), (8,), "x"),
        "half": spread(numbers(1024, 1024), (4, 2), None, "y"),
        "replicated": spread(numbers(1024, 2048), (8,)),
        "some": spread(numbers(12, 4), (2, 2), "y"),  # of four devices
        "one": jax.device_put(numbers(7), jax.devices()[5]),
        "scalar": spread(np.int32(7), (8,)),
        "weak": jnp.asarray(2.5),
        "empty": spread(numbers(0, 4), (2,), "x"),
        "bf16": spread(numbers(32, dtype=jnp.bfloat16), (8,), "x"),
        "int4": spread(jnp.arange(16) % 8, (8,), "x").astype(jnp.int4),
        "bools": spread(numbers(8) > 50, (4,), "x"),
        "keys": spread(jax.random.split(jax.random.key(3), 8), (8,), "x"),
        "numpy": numbers(5, dtype=">i4"),
        "python": [1, "two", None, 2.5, ()],
    }


@pytest.mark.parametrize("loading", [HOSTS, PLAIN], ids=["by hosts", "by this process"])
@pytest.mark.parametrize("saving", [HOSTS, PLAIN], ids=["saved by hosts", "saved by this process"])
def test_all_kinds_of_leaves_come_back(tmp_path: Path, saving: jct.StoreSettings, loading: jct.StoreSettings) -> None:
    tree = everything()
    done = jct.save(tmp_path / "c", tree, settings=saving)
    assert jct.verify(tmp_path / "c").ok
    assert_same(jct.load(tmp_path / "c", like=abstract(tree), settings=loading), tree)
    assert_same(jct.load(tmp_path / "c", settings=loading)["python"], [1, "two", None, 2.5, ()])
    writers = set(written_by(tmp_path / "c"))
    assert writers == (set(range(9)) if saving is HOSTS else {0})
    assert done.bytes == sum(file.stat().st_size for file in (tmp_path / "c" / "state").iterdir())


def test_hosts_store_same_chunks_as_plain_saves(tmp_path: Path) -> None:
    tree = {"a": spread(numbers(64, 1024), (8,), "x"), "b": jax.device_put(numbers(3), jax.devices()[2])}
    found = []
    for name, settings in (("hosts", HOSTS), ("plain", PLAIN)):
        jct.save(tmp_path / name, tree, settings=settings)
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        (part,) = manifest["parts"]
        chunks = [sorted((box, length, digests) for box, _, _, length, digests in a["chunks"]) for a in part["arrays"]]
        found.append(
            (chunks, part["detail"], [(a["name"], a["shape"], a["dtype"], a["sharding"]) for a in part["arrays"]])
        )
    assert found[0] == found[1]


def test_replicas_are_shared_among_the_writers(tmp_path: Path) -> None:
    tree = {
        "a": spread(numbers(4096, 1024), (8,)),
        "b": spread(numbers(4099, 1021), (8,)),
        "c": spread(numbers(7), (8,)),
    }
    jct.save(tmp_path / "c", tree, settings=HOSTS)
    written = written_by(tmp_path / "c")
    total = sum(leaf.nbytes for leaf in tree.values())
    assert sum(written.values()) == total
    assert set(written) == set(range(1, 9))
    assert max(written.values()) <= 0.15 * total


def test_replicas_that_are_small_are_shared_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cut is compiled for each device, which would block the loop at the first save."""
    monkeypatch.undo()
    tree = {str(number): spread(numbers(1024, 1024 + 2 * number), (4, 2), None, "y") for number in range(8)}
    jct.save(tmp_path / "c", tree, settings=HOSTS)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert [len(array["chunks"]) for array in manifest["parts"][0]["arrays"]] == [2] * len(tree)
    written = written_by(tmp_path / "c")
    assert set(written) == set(range(1, 9))
    assert max(written.values()) <= 0.126 * sum(written.values())


def test_box_is_read_once_and_copied_to_replicas(tmp_path: Path) -> None:
    tree = {
        "a": spread(numbers(512, 1024), (8,)),
        "b": spread(numbers(512, 1024), (4, 2), "y"),
        "c": spread(numbers(8), (8,), "x"),
    }
    jct.save(tmp_path / "c", tree, settings=HOSTS)
    read: list[int] = []
    loaded = jct.load(tmp_path / "c", like=abstract(tree), settings=HOSTS, progress=read.append)
    assert_same(loaded, tree)
    assert sum(read) == sum(leaf.nbytes for leaf in tree.values())
    for name, leaf in tree.items():
        for mine, theirs in zip(loaded[name].addressable_shards, leaf.addressable_shards, strict=True):
            assert mine.device == theirs.device
            assert raw(mine.data) == raw(theirs.data)


def test_loads_onto_another_mesh_and_another_dtype(tmp_path: Path) -> None:
    value = numbers(64, 48)
    jct.save(tmp_path / "c", {"w": spread(value, (4, 2), "x", "y")}, settings=HOSTS)
    target = spread(jnp.zeros((64, 48), jnp.bfloat16), (2, 4), "y", "x")
    loaded = jct.load(tmp_path / "c", like={"w": target}, cast=True, settings=HOSTS)
    assert_same(loaded["w"], jax.device_put(value.astype(jnp.bfloat16), target.sharding))
    on_one = jct.load(tmp_path / "c", shardings=SingleDeviceSharding(jax.devices()[6]), settings=HOSTS)
    assert_same(on_one["w"], jax.device_put(value, jax.devices()[6]))


def test_64_bit_types_stay(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        tree = {"i": spread(np.arange(8) << 40, (8,), "x"), "f": spread(np.arange(8.0) / 3, (4,), "x")}
        assert tree["i"].dtype == np.int64
        jct.save(tmp_path / "c", tree, settings=HOSTS)
        assert_same(jct.load(tmp_path / "c", like=abstract(tree), settings=HOSTS), tree)
    with pytest.raises(jct.MismatchError, match="JAX holds 64-bit types only with"):
        jct.load(tmp_path / "c", shardings=SingleDeviceSharding(jax.devices()[1]), settings=HOSTS)


def test_donation_after_save_does_not_change_checkpoint(tmp_path: Path) -> None:
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = {"w": spread(numbers(256, 256), (4, 2), "x"), "r": spread(numbers(1024, 1024), (8,))}
    state = step(state)
    for _ in range(20):
        expected = {name: raw(leaf) for name, leaf in state.items()}
        pending = jct.save_async(tmp_path / "c", state, overwrite=True, settings=HOSTS)
        before, state = state, step(state)
        assert before["w"].is_deleted()
        pending.wait()
        assert {name: raw(leaf) for name, leaf in jct.load(tmp_path / "c").items()} == expected


def test_steps_of_a_run_are_saved_and_restored(tmp_path: Path) -> None:
    state = {"w": spread(numbers(64, 48), (4, 2), "x", "y"), "n": spread(np.int32(0), (8,))}
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=2, store=HOSTS) as ckpt:
        for _ in ckpt.steps(4):
            state = jax.tree.map(lambda leaf: leaf + 1, state)
            ckpt(state)
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=2, store=HOSTS) as ckpt:
        assert_same(ckpt.resume(jax.tree.map(jnp.zeros_like, state)), state)
    assert set(written_by(tmp_path / "run" / "step-0000000004")) == set(range(1, 9))


def test_save_by_hosts_rejects_nan(tmp_path: Path) -> None:
    strict = jct.StoreSettings(colocated=True, nonfinite="reject")
    with pytest.raises(jct.NonFiniteError, match="'state/w'"):
        jct.save(tmp_path / "c", {"w": spread(np.array([1.0, np.nan] * 4, np.float32), (8,), "x")}, settings=strict)
    assert not (tmp_path / "c").exists()


def test_damage_that_host_finds_names_host_and_leaf(tmp_path: Path) -> None:
    tree = {"a": spread(numbers(64, 1024), (8,), "x")}
    jct.save(tmp_path / "c", tree, settings=HOSTS)
    file = tmp_path / "c" / "state" / "p00004-s000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(jct.CorruptCheckpointError, match=r"^host \S+ \(of cpu:3, .*p00004-s000.*leaf 'a'"):
        jct.load(tmp_path / "c", like=abstract(tree), settings=HOSTS)
    jct.load(tmp_path / "c", like=abstract(tree), settings=jct.StoreSettings(colocated=True, verify_on_load=False))


class _MountedElsewhere(LocalBackend):
    """The storage of a controller that the hosts do not share: the checkpoint has another name there."""

    def __init__(self, name: str, real: str) -> None:
        self._name, self._real = name, real

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        return super().open(self._real if directory == self._name else directory, name, direct=direct)


@pytest.mark.parametrize("sees_another", [False, True], ids=["none", "another one"])
def test_checkpoint_invisible_to_host_is_not_damage(tmp_path: Path, sees_another: bool) -> None:
    array = spread(numbers(16), (8,), "x")
    jct.save(tmp_path / "c", {"a": array}, settings=HOSTS)
    if sees_another:
        jct.save(tmp_path / "mounted", {"a": -array}, settings=HOSTS)
    files = _MountedElsewhere(str(tmp_path / "mounted"), str(tmp_path / "c"))
    committed = open_committed(files, str(tmp_path / "mounted"))
    record = committed.manifest.parts[0].arrays[0]
    leaf = ArrayLoad("a", record, LeafRequest("jax"), place_array("a", array.shape, array.sharding), False)
    with pytest.raises(CheckpointError, match=r"host \S+ .*/mounted") as raised:
        HostReads(files, committed, HOSTS, [leaf]).load(None)
    assert type(raised.value) is CheckpointError


def plan_for(directory: Path) -> tuple[WritePlan, int]:
    settings = settings_there(jct.StoreSettings(staging_bytes=MIB, durability="none"))
    plan = WritePlan(str(directory).encode(), "state", 1, settings, (), (), ())
    return plan, room_for_index(plan, [])


def test_host_that_does_not_see_attempt_says_so(tmp_path: Path) -> None:
    plan, _ = plan_for(tmp_path / "not there")
    plan = WritePlan(
        plan.directory, plan.part, 1, plan.settings, (WrittenArray(0, "a", (3,), "float32"),), (0,), (((0, 3),),)
    )
    room = room_for_index(plan, [12])
    (answered,) = write_here(jax.device_put(plan_array(plan, room)), jnp.arange(3.0))
    answer = decode_answer(np.asarray(answered))
    assert answer.index is None
    assert answer.error is not None
    assert b"not there: " in answer.error


def test_a_host_of_another_release_says_so(tmp_path: Path) -> None:
    message = plan_array(*plan_for(tmp_path))
    message[0] += 1
    (answered,) = write_here(jax.device_put(message))
    answer = decode_answer(np.asarray(answered))
    assert answer.error is not None
    assert b"the plan has version 2" in answer.error


def test_long_error_is_cut(tmp_path: Path) -> None:
    plan, room = plan_for(tmp_path)
    plan = WritePlan(plan.directory, plan.part, 1, {**plan.settings, "wrong" * 10_000: 1}, (), (), ())
    (answered,) = write_here(jax.device_put(plan_array(plan, room)))
    assert answered.nbytes == room < 50_000
    answer = decode_answer(np.asarray(answered))
    assert answer.error is not None
    assert b"unexpected keyword argument 'wrong" in answer.error
    with pytest.raises(CheckpointError, match="bytes, expected at most"):
        answer_array(Answer("h", 1, error=b"x" * room), room)


def test_single_controller_runtimes_are_recognised() -> None:
    assert [
        kind for kind in ("pjrt_ifrt", "proxy/pathways", "pathways", "proxy", "") if is_single_controller(kind)
    ] == [
        "proxy/pathways",
        "pathways",
    ]
    assert [cpu_device_of(device) for device in jax.devices("cpu")] == jax.devices("cpu")


def test_single_controller_runtime_uses_hosts_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(copies, "is_single_controller", lambda kind: kind == "pjrt_ifrt")  # as here
    tree = everything()
    jct.save(tmp_path / "c", tree)
    assert set(written_by(tmp_path / "c")) == set(range(9))
    assert_same(jct.load(tmp_path / "c", like=abstract(tree)), tree)
    jct.save(tmp_path / "d", tree, settings=jct.StoreSettings(colocated=False))
    assert set(written_by(tmp_path / "d")) == {0}


def test_controller_arrays_do_not_block_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such a process has two runtimes; here the first device acts as the local one."""
    first, second = jax.devices()[:2]
    monkeypatch.setattr(copies, "is_single_controller", lambda kind: True)
    for module in (snapshot, transfer):
        monkeypatch.setattr(module, "runs_on_hosts", lambda sharding, _: sharding.device_set != {first})
    tree = {"a": jax.device_put(numbers(3), first), "b": jax.device_put(numbers(4), second)}
    jct.save(tmp_path / "c", tree)
    assert written_by(tmp_path / "c") == {0: 12, 1: 16}
    assert_same(jct.load(tmp_path / "c", like=tree), tree)


@pytest.mark.parametrize("value", ["yes", 1, None, "True"])
def test_a_wrong_setting_is_refused(value: Any) -> None:
    with pytest.raises(jct.SettingsError, match=r"StoreSettings\.colocated"):
        jct.StoreSettings(colocated=value)

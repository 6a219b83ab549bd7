"""One checkpoint: save, load and verify, wherever and however they are called."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxckpt_train as jct
from jaxckpt_train.store import transaction
from jaxckpt_train.store.verify import verify_opened
from tests.support.runs import folder_of, remove_the_segment, segment_of
from tests.support.same_trees import assert_same, raw

FAST = jct.StoreSettings(durability="none")


def state(number: int) -> dict[str, Any]:
    return {"w": jnp.arange(12.0).reshape(3, 4) + number, "n": number, "key": jax.random.key(number)}


def test_save_and_load_leave_nothing_else(tmp_path: Path) -> None:
    described = jct.save(tmp_path / "c", state(1))
    assert described.path == str(tmp_path / "c")
    assert_same(jct.load(tmp_path / "c", state(0)), state(1))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    files = sorted(str(path.relative_to(tmp_path / "c")) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["COMMIT", "manifest.json", "state/p00000-s000.safetensors"]


def test_overwriting_replaces_the_whole_checkpoint(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"old": jnp.ones(3), "more": [1, 2]})
    before = (tmp_path / "c").stat().st_ino
    jct.save(tmp_path / "c", state(2), overwrite=True)
    assert_same(jct.load(tmp_path / "c", state(0)), state(2))
    assert (tmp_path / "c").stat().st_ino != before  # another directory, not the old one written over
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    jct.save(tmp_path / "new", state(3), overwrite=True)
    assert jct.load(tmp_path / "new")["n"] == 3


def test_an_overwrite_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", state(1))
    before = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()}
    with pytest.raises(jct.UnsupportedLeafError, match=r"leaf 'x': a builtins.object"):
        jct.save(tmp_path / "c", {"x": object()}, overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_existing_checkpoint_is_not_replaced_without_overwrite(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", state(1))
    with pytest.raises(jct.CheckpointExistsError, match="pass overwrite=True"):
        jct.save(tmp_path / "c", state(2))
    assert jct.load(tmp_path / "c")["n"] == 1


def test_existing_path_is_refused_before_background_work(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", state(1))
    with pytest.raises(jct.CheckpointExistsError, match="pass overwrite=True"):
        jct.save_async(tmp_path / "c", state(2))


def test_concurrent_saves_to_one_path_do_not_mix(tmp_path: Path) -> None:
    pending = [jct.save_async(tmp_path / "c", state(number)) for number in range(2)]
    errors = [error for save in pending if (error := save.outcome()) is not None]
    assert len(errors) == 1
    assert isinstance(errors[0], jct.CheckpointExistsError)
    found = jct.load(tmp_path / "c", state(0))
    assert_same(found, state(found["n"]))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_relative_and_home_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    jct.save("~/runs/a", state(1))
    jct.save("runs/b", state(2))
    pending = jct.save_async(Path("runs/../c"), state(3))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pending.wait()
    assert [jct.load(tmp_path / name)["n"] for name in ("runs/a", "runs/b", "c")] == [1, 2, 3]
    assert jct.load("~/runs/b")["n"] == 2
    assert jct.metadata("../runs/a").path == str(tmp_path / "runs" / "a")
    assert jct.verify(Path("~/c")).ok


def test_save_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    async def loop() -> Any:
        jct.save(tmp_path / "a", state(1))
        pending = jct.save_async(tmp_path / "b", state(2))
        described = await asyncio.wrap_future(pending.committed)
        assert described.path == str(tmp_path / "b")
        return jct.load(tmp_path / "a", state(0)), jct.load(tmp_path / "b", state(0))

    first, second = asyncio.run(loop())
    assert_same(first, state(1))
    assert_same(second, state(2))


def test_background_save_has_two_futures(tmp_path: Path) -> None:
    pending = jct.save_async(tmp_path / "c", state(1))
    assert isinstance(pending.staged, Future)
    assert pending.staged.done()
    described = pending.committed.result(60)
    assert pending.done()
    assert pending.wait() is described
    assert jct.load(tmp_path / "c")["n"] == 1


def test_main_checkpointable_is_state_or_only_one(tmp_path: Path) -> None:
    jct.save_checkpointables(tmp_path / "one", {"params": state(1)})
    assert jct.load(tmp_path / "one")["n"] == 1
    jct.save_checkpointables(tmp_path / "two", {"params": state(1), "state": state(2)})
    assert jct.load(tmp_path / "two")["n"] == 2
    jct.save_checkpointables(tmp_path / "three", {"params": state(1), "ema": state(2)})
    with pytest.raises(jct.MismatchError, match=r"'state'.*'params', 'ema'"):
        jct.load(tmp_path / "three")
    with pytest.raises(jct.MismatchError, match="'opt'; it has 'params', 'ema'"):
        jct.load_checkpointables(tmp_path / "three", {"opt": None})


def test_checkpointables_are_loaded_into_their_targets(tmp_path: Path) -> None:
    given = {"state": state(1), "ema": [jnp.ones(3)], "config": jct.JsonValue({"rate": 0.1}), "none": None, "empty": {}}
    jct.save_checkpointables(tmp_path / "c", given)
    found = jct.load_checkpointables(tmp_path / "c", {"ema": [jnp.zeros(3)], "state": state(0)})
    assert list(found) == ["ema", "state"]
    assert_same(found["state"], state(1))
    everything = jct.load_checkpointables(tmp_path / "c")
    assert list(everything) == list(given)
    assert (everything["none"], everything["empty"], everything["config"]) == (None, {}, given["config"])
    assert jct.load_checkpointables(tmp_path / "c", {}) == {}


@pytest.mark.parametrize(
    "name", ["a/b", "", ".hidden", "-x", "a b", "COMMIT", "manifest.json", "é", "x" * 201, 3, None]
)
def test_name_that_cannot_name_directory_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(jct.SettingsError, match=r"checkpointable name .*: expected letters"):
        jct.save_checkpointables(tmp_path / "c", {name: {}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [
        jct.StoreSettings(durability="file", direct_io=False),
        jct.StoreSettings(digest="sha256", io_threads=1),
        jct.StoreSettings(segment_bytes=1 << 20, staging_bytes=1 << 20, read_budget_bytes=1 << 20, io_threads=4),
        jct.StoreSettings(durability="none", verify_on_load=False),
    ],
    ids=["file", "sha256", "small", "unchecked"],
)
def test_settings_do_not_change_the_loaded_bytes(settings: jct.StoreSettings, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((700, 1000), np.float32)
    tree = {"large": jnp.asarray(values), **{str(n): jnp.asarray(values[n : n + 99]) for n in range(6)}}
    jct.save(tmp_path / "c", tree, settings=settings)
    assert_same(jct.load(tmp_path / "c", tree, settings=settings), tree)
    assert_same(jct.load(tmp_path / "c", tree), tree)
    assert jct.verify(tmp_path / "c", settings=settings).ok
    segments = list((folder_of(tmp_path / "c") / "state").iterdir())
    assert len(segments) == (4 if settings.segment_bytes == 1 << 20 else 1)


def test_progress_counts_the_bytes_of_the_arrays(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"w": np.arange(1 << 20)}, settings=FAST)
    counts: list[int] = []
    jct.load(tmp_path / "c", progress=counts.append)
    assert sum(counts) == 8 << 20
    counts.clear()
    jct.load_checkpointables(tmp_path / "c", progress=counts.append)
    assert sum(counts) == 8 << 20


def sharded() -> dict[str, jax.Array]:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    array = jnp.arange(64.0).reshape(8, 8)
    return {"w": jax.device_put(array, NamedSharding(mesh, PartitionSpec("x", "y"))), "b": jnp.ones(3, jnp.bfloat16)}


def test_a_segment_is_a_safetensors_file(tmp_path: Path) -> None:
    tree = sharded()
    jct.save(tmp_path / "c", tree)
    (segment,) = (tmp_path / "c" / "state").iterdir()
    whole = np.zeros((8, 8), np.float32)
    with safetensors.safe_open(segment, framework="numpy") as file:
        names = set(file.keys())
        assert "b" in names
        assert raw(file.get_tensor("b")) == raw(tree["b"])
        for row in range(0, 8, 2):
            for column in range(0, 8, 4):
                whole[row : row + 2, column : column + 4] = file.get_tensor(
                    f"w@[{row}:{row + 2},{column}:{column + 4}]"
                )
    assert len(names) == 9
    assert raw(whole) == raw(tree["w"])


def test_a_whole_state_opens_with_safetensors_alone(tmp_path: Path) -> None:
    tree = {
        "layer": [
            {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)},
            {"w": np.arange(4, dtype=np.int64)},
        ],
        "a/b": jnp.asarray([True, False]),
        "complex": jnp.ones(2, jnp.complex64),
        "small": jnp.asarray([1, 2], jnp.float8_e4m3fn),
        "zero_d": jnp.float32(3),
    }
    jct.save(tmp_path / "c", tree)
    (segment,) = (tmp_path / "c" / "state").iterdir()
    found = safetensors.numpy.load_file(segment)
    expected = {
        "layer/0/w": tree["layer"][0]["w"],
        "layer/0/b": tree["layer"][0]["b"],
        "layer/1/w": tree["layer"][1]["w"],
        "a~1b": tree["a/b"],
        "complex": tree["complex"],
        "small": tree["small"],
        "zero_d": tree["zero_d"],
    }
    assert {name: raw(leaf) for name, leaf in found.items()} == {name: raw(leaf) for name, leaf in expected.items()}
    assert {name: leaf.shape for name, leaf in found.items()} == {name: leaf.shape for name, leaf in expected.items()}
    assert found["layer/0/w"].dtype == np.float32
    assert found["small"].dtype == np.uint8  # safetensors' numpy reader knows no float8


def test_verify_names_every_damage(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"w": np.arange(1000), "b": np.ones(7)})
    report = jct.verify(tmp_path / "c")
    assert report.ok
    segment = segment_of(folder_of(tmp_path / "c"))
    assert report.checked_bytes == segment.stat().st_size
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    data[4096] ^= 1
    segment.write_bytes(data)
    problems = jct.verify(tmp_path / "c").problems
    assert len(problems) == 2
    assert all("are not what was saved" in problem and str(segment) in problem for problem in problems)


def test_path_may_be_any_path_like(tmp_path: Path) -> None:
    class Place(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(tmp_path / "c")

    jct.save(Place(), state(1))
    assert jct.load(str(tmp_path / "c"))["n"] == 1


class Replacing:
    """An iterator that replaces the checkpoint twice, while it is restored from it."""

    def __init__(self, path: Path) -> None:
        self.path, self.values = path, [1.0, 2.0]

    def get_state(self) -> int:
        return len(self.values)

    def set_state(self, state: int) -> None:
        if self.values:
            new = {"data": self, "state": {"w": np.full(3000, self.values.pop(0))}}
            jct.save_checkpointables(self.path, new, overwrite=True)


def test_checkpoint_replaced_during_read_is_read_again(tmp_path: Path) -> None:
    data = Replacing(tmp_path / "c")
    jct.save_checkpointables(tmp_path / "c", {"data": data, "state": {"w": np.zeros(3000)}})
    found = jct.load_checkpointables(tmp_path / "c", {"data": data, "state": None})
    assert (found["state"]["w"] == 2).all()


def test_checkpoint_replaced_during_verify_is_verified_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jct.save(tmp_path / "c", {"w": np.zeros(3000)})
    swaps = [1.0, 2.0]

    def verify_late(backend: Any, committed: Any, settings: Any) -> Any:
        if swaps:  # as if it had read the one and then the other
            remove_the_segment(folder_of(tmp_path / "c"))
            report = verify_opened(backend, committed, settings)
            assert not report.ok
            jct.save(tmp_path / "c", {"w": np.full(3000, swaps.pop())}, overwrite=True)
            return report
        return verify_opened(backend, committed, settings)

    monkeypatch.setattr("jaxckpt_train.checkpoint.verify_opened", verify_late)
    assert jct.verify(tmp_path / "c").ok


def test_missing_digest_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(jct.SettingsError, match=r'pip install "jaxckpt-train\[blake3\]"'):
        jct.save_async(tmp_path / "a", {"w": np.arange(3)}, settings=jct.StoreSettings(digest="blake3"))
    assert list(tmp_path.iterdir()) == []


def test_path_that_another_process_replaces_is_rechecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save listed the old checkpoint, which another process has replaced and is now emptying."""
    jct.save(tmp_path / "c", state(1))
    answers = iter([False, False, True])
    monkeypatch.setattr(transaction, "is_committed", lambda *_: next(answers))
    jct.save(tmp_path / "c", state(2), overwrite=True)
    assert jct.load(tmp_path / "c")["n"] == 2


def test_every_call_refuses_settings_of_another_type(tmp_path: Path) -> None:
    wrong: Any = {"direct_io": False}
    calls = [
        lambda: jct.save(tmp_path / "c", state(1), settings=wrong),
        lambda: jct.load(tmp_path / "c", settings=wrong),
        lambda: jct.load_checkpointables(tmp_path / "c", settings=wrong),
        lambda: jct.verify(tmp_path / "c", settings=wrong),
        lambda: jct.StepManager(tmp_path / "run", settings=wrong),
    ]
    for call in calls:
        with pytest.raises(jct.SettingsError, match=r"settings: .*found dict"):
            call()
    assert list(tmp_path.iterdir()) == []

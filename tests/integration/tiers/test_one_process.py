"""The fast tier of a single process: a local disk in front of slow storage."""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pending import under_way
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.manifest import COMMIT_NAME, MANIFEST_NAME
from jaxckpt_train.tiers.host_files import LAYOUT_NAME
from tests.support.commands import json_of
from tests.support.fake_backends import HoldingBackend, RefusingBackend, SlowBackend, callback_on
from tests.support.locks import take_over
from tests.support.runs import START
from tests.support.training_loops import Batches


def train(tmp_path: Path, steps: int, fail_at: int | None = None, **options: Any) -> tuple[int, float, list[str]]:
    """Train, and return the restored step, the last value and the reasons of the saves."""
    tier = {"directory": tmp_path / "fast", "interval_steps": 2}
    reasons = list[str]()
    chosen: dict[str, Any] = {"save_interval_steps": 10, "fast_tier": tier, **options}
    with jct.CheckpointCallback(tmp_path / "slow", **chosen) as ckpt:
        state, data = ckpt.resume({"w": np.zeros(1000), "sum": 0.0}, Batches())
        started = ckpt.completed_steps
        for step in ckpt.steps(steps):
            if step == fail_at:
                raise RuntimeError("as planned")
            state = {"w": state["w"] + 1, "sum": state["sum"] + float(next(data)["x"].sum())}
            result = ckpt(state)
            reasons += [result.reason] if result.saved else []
    return started, float(state["w"][0]), reasons


def steps_in(folder: Path) -> list[int]:
    return sorted({int(each.name[5:15]) for each in folder.rglob("step-*") if each.is_dir()})


def test_steps_go_to_both_tiers(tmp_path: Path) -> None:
    assert train(tmp_path, 25)[:2] == (0, 25.0)
    assert steps_in(tmp_path / "slow") == [10, 20, 25]
    assert steps_in(tmp_path / "fast") == [24, 25]
    events = [json.loads(line) for line in (tmp_path / "slow" / "history.jsonl").read_text().splitlines()]
    saves = [each for each in events if each["event"] == "save"]
    assert [each["step"] for each in saves] == [*range(2, 25, 2), 25]
    assert {each["tier"] for each in saves} == {"fast"}
    assert [each["step"] for each in events if each["event"] == "drain"] == [10, 20, 25]


@pytest.mark.parametrize("in_steps", [True, False])
@pytest.mark.parametrize("end", [16, 17])
def test_last_step_of_a_loop_that_ends_early_is_copied(tmp_path: Path, in_steps: bool, end: int) -> None:
    tier = {"directory": tmp_path / "fast", "interval_steps": 2}
    with jct.CheckpointCallback(tmp_path / "slow", save_interval_steps=10, fast_tier=tier) as ckpt:
        state = ckpt.resume({"w": np.zeros(1000)})
        for step in ckpt.steps(100) if in_steps else range(end):
            state = {"w": state["w"] + 1}
            ckpt(state, step=None if in_steps else step + 1)
            if step + 1 == end:
                break
    assert steps_in(tmp_path / "slow") == [10, end]
    assert np.array_equal(jct.load(tmp_path / "slow" / f"step-{end:010}")["w"], np.full(1000, float(end)))


def frozen_state(step: int) -> dict[str, Any]:
    """A state of which only a small part changes."""
    base = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, np.uint32)
    return {"base": base, "lora": np.full(5000, step, np.float32)}


def test_copies_share_what_has_not_changed(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=str(tmp_path / "fast"), interval_steps=1)
    with jct.StepManager(tmp_path / "slow", fast_tier=tier, frozen="base") as manager:
        for step in (1, 2, 3):
            assert manager.save(step, {"state": frozen_state(step)}).saved
            manager.wait()
    steps = sorted((tmp_path / "slow").glob("step-*"))
    files = [{file.stat().st_ino: file.stat().st_size for file in step.rglob("*.safetensors")} for step in steps]
    shared = set(files[0]) & set(files[1]) & set(files[2])
    assert sum(files[0][each] for each in shared) >= 4 << 20
    assert not shared & {file.stat().st_ino for file in (tmp_path / "fast").rglob("*")}
    listed = json_of("ls", tmp_path / "slow")["steps"]
    assert [each["written_bytes"] < 4 << 20 for each in listed] == [False, True, True]
    for step, path in zip((1, 2, 3), steps, strict=True):
        assert jct.verify(path).ok
        with jct.StepManager(tmp_path / "slow") as manager:
            found = manager.load({"state": frozen_state(0)}, step)["state"]
        assert all(np.array_equal(found[name], value) for name, value in frozen_state(step).items())


def test_copies_share_nothing_with_a_run_that_has_damage(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=str(tmp_path / "fast"), interval_steps=1, keep=1)
    options: dict[str, Any] = {"fast_tier": tier, "frozen": "base"}
    with jct.StepManager(tmp_path / "slow", **options) as manager:
        for step in (1, 2):
            manager.save(step, {"state": frozen_state(step)})
    shutil.rmtree(tmp_path / "fast")
    newest = sorted((tmp_path / "slow").glob("step-*"))[-1]
    (small,) = [file for file in newest.rglob("*.safetensors") if file.stat().st_nlink == 1]
    small.write_bytes(bytes(small.stat().st_size))
    with jct.StepManager(tmp_path / "slow", **options) as manager:
        manager.restore({"state": frozen_state(0)})
        assert manager.restored_step == 1
        manager.save(3, {"state": frozen_state(3)})
    newest = sorted((tmp_path / "slow").glob("step-*"))[-1]
    assert all(file.stat().st_nlink == 1 for file in newest.rglob("*.safetensors"))


@pytest.mark.parametrize("damage", ["byte", "sector"])
def test_damage_that_a_copy_finds_is_not_taken_over(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast", interval_steps=1)
    with jct.StepManager(tmp_path / "slow", fast_tier=tier, frozen="base") as manager:
        assert manager.save(1, {"state": frozen_state(1)}, fast_only=True)
        manager.wait()
        (file,) = [each for each in (tmp_path / "fast").rglob("*.safetensors") if each.stat().st_size >= 4 << 20]
        if damage == "byte":
            with file.open("r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"?")
        else:
            refuse_reads(monkeypatch, file.stat().st_ino)
        assert manager.save(2, {"state": frozen_state(2)})
        with pytest.raises(jct.CorruptCheckpointError if damage == "byte" else jct.StorageError):
            manager.wait()
        for step in (3, 4):
            assert manager.save(step, {"state": frozen_state(step)})
            manager.wait()
    assert steps_in(tmp_path / "slow") == [3, 4]
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        found = manager.restore({"state": frozen_state(0)})["state"]
        assert manager.restored_step == 4
    assert all(np.array_equal(found[name], value) for name, value in frozen_state(4).items())


def refuse_reads(monkeypatch: pytest.MonkeyPatch, inode: int) -> None:
    """Make the disk refuse reads of the data of a file."""
    read = os.preadv

    def refusing(descriptor: int, *arguments: Any) -> int:
        if os.fstat(descriptor).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        return read(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", refusing)


def test_copies_are_equal_and_whole(tmp_path: Path) -> None:
    train(tmp_path, 25)
    for step in (10, 20, 25):
        path = tmp_path / "slow" / f"step-00000000{step}"
        assert jct.verify(path).ok
        assert np.array_equal(jct.load(path)["w"], np.full(1000, float(step)))


def test_failed_loop_continues_from_the_fast_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxckpt_train")
    whole = tmp_path / "whole"
    expected = train(whole, 30)
    with pytest.raises(RuntimeError, match="as planned"):
        train(tmp_path, 30, fail_at=17)
    assert steps_in(tmp_path / "slow") == [10]
    found = train(tmp_path, 30)
    assert "step 16 was restored from the fast tier" in caplog.text
    assert found[0] == 16
    assert found[1] == expected[1] == 30.0
    assert 16 in steps_in(tmp_path / "slow")  # what the failed process did not copy
    last, other = (jct.load(each / "slow" / "step-0000000030") for each in (tmp_path, whole))
    assert np.array_equal(last["w"], other["w"])
    assert last["sum"] == other["sum"]


def test_history_says_what_the_fast_tier_saved(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="as planned"):
        train(tmp_path, 30, fail_at=17)
    train(tmp_path, 30)
    events = [json.loads(line) for line in (tmp_path / "slow" / "history.jsonl").read_text().splitlines()]
    (restore,) = [each for each in events if each["event"] == "restore"]
    assert (restore["step"], restore["tier"], restore["ahead_steps"]) == (16, "fast", 6)
    drains = {each["step"]: each for each in events if each["event"] == "drain"}
    assert all(each["lag_s"] >= each["drain_s"] > 0 for each in drains.values())
    assert drains[30]["lag_steps"] == 0


def test_run_without_a_slow_step_continues(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="as planned"):
        train(tmp_path, 30, fail_at=7)
    assert steps_in(tmp_path / "slow") == []
    assert train(tmp_path, 30)[0] == 6


@pytest.mark.parametrize("pattern", [LAYOUT_NAME, "*.safetensors", MANIFEST_NAME])
def test_run_that_has_lost_all_its_steps_starts_from_scratch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pattern: str
) -> None:
    with pytest.raises(RuntimeError, match="as planned"):
        train(tmp_path, 30, fail_at=7)
    for file in [*(tmp_path / "fast").rglob(pattern)]:
        file.unlink()
    with pytest.raises(RuntimeError, match="as planned"):
        train(tmp_path, 30, fail_at=5)
    assert warned_of_lost_step(caplog) == []  # other warnings say more
    assert train(tmp_path, 30)[0] == 4


def test_damaged_record_of_a_run_without_a_slow_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="as planned"):
        train(tmp_path, 30, fail_at=7)
    (record,) = [each for each in (tmp_path / "slow" / "record").iterdir() if each.is_file()]
    whole = record.read_bytes()
    record.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(jct.CorruptCheckpointError, match="record"), run_on(tmp_path, LocalBackend()) as reader:
        reader.restore()
    with pytest.raises(jct.CorruptCheckpointError, match="record"):
        train(tmp_path, 30)
    assert steps_in(tmp_path / "fast") == [4, 6]
    record.write_bytes(whole)
    assert train(tmp_path, 30)[0] == 6


def warned_of_lost_step(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Return the step of each warning about a step that is on no host, and what it says is left."""
    found = [record.args for record in caplog.records if "is on no host" in record.msg]
    caplog.clear()
    return [(args[0], args[2]) for args in found if isinstance(args, tuple)]


@pytest.mark.parametrize(
    ("fail_at", "left", "start"), [(17, "the newest that is left is step 10 in ", 10), (7, "no other step", 0)]
)
def test_lost_disk_falls_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fail_at: int, left: str, start: int
) -> None:
    with pytest.raises(RuntimeError, match="as planned"):
        train(tmp_path, 30, fail_at=fail_at)
    shutil.rmtree(tmp_path / "fast")
    assert train(tmp_path, 30)[:2] == (start, 30.0)
    ((step, found),) = warned_of_lost_step(caplog)
    assert step == fail_at - 1
    assert found.startswith(left)
    assert train(tmp_path, 40)[:2] == (30, 40.0)
    assert warned_of_lost_step(caplog) == []


def test_roll_back_and_retention_do_not_count_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 25)
    with run_on(tmp_path, LocalBackend(), interval_steps=1) as manager:
        manager.restore(step=10, roll_back=True)
        assert manager.save(12, {"x": np.full(10, 12)}, fast_only=True)
    with run_on(tmp_path, LocalBackend()) as manager:
        manager.own()
    assert warned_of_lost_step(caplog) == []
    shutil.rmtree(tmp_path / "fast")
    with run_on(tmp_path, LocalBackend()) as manager:
        manager.own()
    assert [step for step, _ in warned_of_lost_step(caplog)] == [12]
    with jct.StepManager(tmp_path / "slow") as manager:  # a save without a fast tier is the last one then
        manager.restore(step=10, roll_back=True)
        assert manager.save(11, {"x": np.full(10, 11)})
    with run_on(tmp_path, LocalBackend()) as manager:
        manager.own()
    assert warned_of_lost_step(caplog) == []


def test_damaged_fast_step_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="as planned"):
        train(tmp_path, 30, fail_at=17)
    for file in (tmp_path / "fast").rglob("step-0000000016*/**/*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert train(tmp_path, 30)[:2] == (14, 30.0)
    assert "step 16" in caplog.text


@pytest.mark.parametrize("name", [COMMIT_NAME, MANIFEST_NAME, LAYOUT_NAME])
def test_step_with_damaged_metadata_is_removed_after_the_next_save(tmp_path: Path, name: str) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast", keep=5)
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        for step in (1, 2):
            assert manager.save(step, {"x": np.full(10, step)}, fast_only=True)
    (file,) = (tmp_path / "fast").glob(f"run-*/step-*0002.*/{name}")
    file.write_bytes(file.read_bytes()[:-2])
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        assert manager.restore()["x"][0] == 1
        assert steps_in(tmp_path / "fast") == [1, 2]
        assert manager.save(3, {"x": np.full(10, 3)}, fast_only=True)
    assert steps_in(tmp_path / "fast") == [1, 3]


def test_owner_ends_an_interrupted_removal_at_once(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast")
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        for step in (1, 2):
            assert manager.save(step, {"x": np.full(10, step)}, fast_only=True)
    (commit,) = (tmp_path / "fast").glob(f"run-*/step-*0001.*/{COMMIT_NAME}")
    commit.unlink()
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        manager.own()
        assert steps_in(tmp_path / "fast") == [2]
        assert manager.restore()["x"][0] == 2


def test_names_that_are_no_text_are_ignored(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast", keep=1)
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        assert manager.save(1, {"x": np.full(10, 1)}, fast_only=True)
    (step,) = (tmp_path / "fast").glob("run-*/step-*")
    for folder in (os.fsencode(step), os.fsencode(step) + b"\xff"):
        os.makedirs(folder + b"/\xfe")
        Path(os.fsdecode(folder + b"/\xfe/\xfd")).touch()
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        assert manager.restore()["x"][0] == 1
        assert manager.save(2, {"x": np.full(10, 2)}, fast_only=True)
    assert not step.exists()


def test_damaged_step_takes_the_place_of_no_other(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast", keep=2)
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        for step in (1, 2, 3):
            assert manager.save(step, {"x": np.full(10, step)}, fast_only=True)
    for file in (tmp_path / "fast").glob("run-*/step-*0003.*/**/*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        manager.own()
        assert manager.restore()["x"][0] == 2
        assert manager.save(4, {"x": np.full(10, 4)}, fast_only=True)
    assert steps_in(tmp_path / "fast") == [2, 4]


def test_deleted_run_starts_from_scratch(tmp_path: Path) -> None:
    train(tmp_path, 25)
    shutil.rmtree(tmp_path / "slow")
    assert train(tmp_path, 9)[:2] == (0, 9.0)
    assert train(tmp_path, 12)[:2] == (9, 12.0)
    assert steps_in(tmp_path / "fast") == [10, 12]


def test_run_directory_that_is_not_mounted_costs_no_steps(tmp_path: Path) -> None:
    train(tmp_path, 25)
    (tmp_path / "slow").rename(tmp_path / "unmounted")
    with pytest.raises(RuntimeError, match="as planned"):
        train(tmp_path, 9, fail_at=8)
    shutil.rmtree(tmp_path / "slow")
    (tmp_path / "unmounted").rename(tmp_path / "slow")
    assert train(tmp_path, 26)[:2] == (25, 26.0)


def test_step_can_be_copied_before_the_first_save(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast")
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        assert manager.save(1, {"x": np.full(10, 1)}, fast_only=True)
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        assert manager.restore()["x"][0] == 1
        manager.drain_newest()
    assert steps_in(tmp_path / "slow") == [1]


def test_load_finds_fast_steps_and_restores_nothing(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast")
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        for step in (1, 2):
            assert manager.save(step, {"x": np.full(10, step)}, fast_only=step == 2)
    manager = jct.StepManager(tmp_path / "slow", fast_tier=tier)
    assert manager.load()["x"][0] == 2
    assert manager.restored_step is None


def test_slow_storage_does_not_make_saves_more_frequent(tmp_path: Path) -> None:
    now, backend = [START], HoldingBackend("rename", "slow/step-")
    tier = jct.FastTierSettings(directory=tmp_path / "fast", interval_steps=1000)
    policy = jct.EverySecondsPolicy(10)
    with jct.StepManager(
        tmp_path / "slow", fast_tier=tier, save_decision_policy=policy, backend=backend, clock=lambda: now[0]
    ) as manager:
        saved = list[int]()
        for step in range(1, 100):
            now[0] += datetime.timedelta(seconds=1)
            saved += [step] if manager.save(step, {"x": np.full(10, step)}) else []
            manager._save_slot.wait_until_ended()  # not for the copy
        backend.go.set()
    assert saved == [*range(10, 100, 10)]


class TakesOver:
    """An object during whose save another process takes the run over."""

    def __init__(self, run: Path) -> None:
        self.run = run

    async def save(self, directory: Any) -> Any:
        async def write() -> None:
            take_over(self.run)

        return write()

    async def load(self, directory: Any) -> Any: ...


def test_save_of_a_run_that_was_taken_over_fails(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast")
    manager = jct.StepManager(tmp_path / "slow", fast_tier=tier)
    assert manager.save(1, {"x": np.full(10, 1)}, fast_only=True)
    manager.save(2, {"x": np.full(10, 2), "other": TakesOver(tmp_path / "slow")}, fast_only=True)
    with pytest.raises(jct.DirectoryLockedError):
        manager.wait()
    assert steps_in(tmp_path / "fast") == [1]


def test_other_run_has_its_own_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with jct.StepManager(tmp_path / name, fast_tier=jct.FastTierSettings(directory=tmp_path / "fast")) as manager:
            assert manager.save(1, {"x": np.full(10, ord(name))}, fast_only=True)
    for name in ("a", "b"):
        with jct.StepManager(tmp_path / name, fast_tier=jct.FastTierSettings(directory=tmp_path / "fast")) as manager:
            assert manager.restore()["x"][0] == ord(name)


def test_a_step_is_not_saved_twice(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "slow", fast_tier=jct.FastTierSettings(directory=tmp_path / "fast")) as manager:
        assert manager.save(1, {"x": np.zeros(1)}, fast_only=True)
        manager.wait()
        with pytest.raises(jct.CheckpointExistsError):
            manager.save(1, {"x": np.zeros(1)})


def test_unchanged_files_are_taken_over(tmp_path: Path) -> None:
    tier = jct.FastTierSettings(directory=tmp_path / "fast", keep=4)
    base = np.random.default_rng(1).integers(0, 256, 4 << 20, np.uint8)
    with jct.StepManager(tmp_path / "slow", fast_tier=tier) as manager:
        for step in range(1, 5):
            assert manager.save(step, {"x": {"base": base, "small": np.full(10, step)}}, fast_only=True)
            manager.wait()
    links = [
        file.stat().st_nlink for file in (tmp_path / "fast").rglob("*.safetensors") if file.stat().st_size > 4 << 20
    ]
    assert max(links) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"directory": "s3://bucket/fast"},
        {"directory": "/tmp/x", "interval_steps": 0},
        {"directory": "/tmp/x", "redundancy": "raid"},
        {"directory": "/tmp/x", "keep": 0},
        {"directory": "/tmp/x", "address": "0.0.0.0"},
        {"directory": "/tmp/x", "address": "::"},
        {"directory": "/tmp/x", "place": "here"},
        {},
        7,
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(jct.SettingsError, match="fast_tier"):
        jct.CheckpointCallback(tmp_path, fast_tier=wrong)


@pytest.mark.parametrize("directory", ["", "s3://bucket/fast", "file:///tmp/fast", 7])
def test_fast_tier_that_is_no_directory_of_the_host_is_refused(tmp_path: Path, directory: Any) -> None:
    with pytest.raises(jct.SettingsError, match="expected a directory of this host"):
        jct.CheckpointCallback(tmp_path, fast_tier={"directory": directory})


@pytest.mark.parametrize("place", ["slow", "slow/fast"])
def test_fast_tier_in_the_run_directory_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(jct.SettingsError, match="outside"):
        jct.CheckpointCallback(tmp_path / "slow", fast_tier=tmp_path / place)
    with jct.CheckpointCallback(tmp_path / "slow", fast_tier=tmp_path / "slower"):
        pass


def test_failed_start_names_the_fast_tier_and_releases_the_run(tmp_path: Path) -> None:
    (tmp_path / "fast").write_text("")
    with pytest.raises(jct.StorageError, match="fast tier") as raised:  # this keeps the callback alive
        train(tmp_path, 5)
    assert raised.tb is not None
    assert json_of("doctor", tmp_path / "slow", "--size-mib", 0)["owner"] is None
    (tmp_path / "fast").unlink()
    assert train(tmp_path, 5)[1] == 5.0


def run_on(tmp_path: Path, backend: LocalBackend, **tier: Any) -> jct.StepManager:
    settings = jct.FastTierSettings(directory=tmp_path / "fast", **tier)
    policy = jct.FixedIntervalPolicy(10)
    return jct.StepManager(tmp_path / "slow", fast_tier=settings, save_decision_policy=policy, backend=backend)


def test_slow_tier_that_does_not_answer_holds_up_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = HoldingBackend("rename", "slow/step-")
    with run_on(tmp_path, backend, interval_steps=1) as manager:
        for step in range(10, 55):
            assert manager.save(step, {"x": np.full(10, step)})
            if step == 10:
                assert backend.reached.wait(60)
        while manager.is_saving_in_progress():
            manager.fast_steps  # noqa: B018  # the save that is running ends without the slow tier
        assert {53, 54} <= {*manager.fast_steps}
        assert manager.steps == []
        backend.go.set()
        manager.wait()
        assert manager.steps == [10, 20]  # 30 and later ones were due while two copies had not ended
        assert manager.save(60, {"x": np.full(10, 60)}, force=True)
    assert steps_in(tmp_path / "slow") == [10, 20, 60]
    assert "step 30 stays on the fast tier" in caplog.text


def test_slow_tier_that_refuses_is_reported_and_tried_again(tmp_path: Path) -> None:
    backend = RefusingBackend("rename", "slow/.step-0000000010", errno.EIO, 1)
    with run_on(tmp_path, backend, interval_steps=1) as manager:
        assert manager.save(10, {"x": np.full(10, 10)})
        with pytest.raises(jct.StorageError):
            manager.wait()
        assert manager.save(11, {"x": np.full(10, 11)})
        assert manager.save(20, {"x": np.full(10, 20)})
    assert steps_in(tmp_path / "slow") == [20]
    assert not [each for each in (tmp_path / "slow").iterdir() if ".tmp-" in each.name]


class SlowlyRefusing(SlowBackend):
    """Limits the rate of writes, and refuses one kind of operation on matching paths."""

    def _pass(self, operation: str, path: str) -> None:
        if operation == self._operation and self._part in path:
            raise jct.StorageError(errno.EIO, "refused", path)


def test_close_waits_for_all_copies_and_reports_the_first_error(tmp_path: Path) -> None:
    backend = SlowlyRefusing(10_000, "rename", "slow/step-0000000010")
    manager = run_on(tmp_path, backend, interval_steps=1)
    for step in (10, 20):
        assert manager.save(step, {"x": np.full(10, step)})
    with pytest.raises(jct.StorageError):
        manager.close()
    assert steps_in(tmp_path / "slow") == [20]


class Unwritable:
    """An object that writes its own files, and fails."""

    async def save(self, directory: Path) -> Any:
        async def write() -> None:
            raise RuntimeError("as planned")

        return write()

    load = save


def test_close_waits_for_copies_after_a_failed_save(tmp_path: Path) -> None:
    manager = run_on(tmp_path, SlowBackend(10_000), interval_steps=1)
    assert manager.save(10, {"x": np.full(10, 10)})
    assert manager.save(11, {"x": np.full(10, 11), "object": Unwritable()})
    with pytest.raises(RuntimeError, match="as planned"):
        manager.close()
    assert steps_in(tmp_path / "slow") == [10]


def test_copies_that_all_fail_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend, before = RefusingBackend("rename", "slow/.step-", errno.EIO, 10), {*under_way}
    with run_on(tmp_path, backend, interval_steps=1) as manager:
        for step in range(10, 110, 10):
            assert manager.save(step, {"x": np.full(10, step)})
            while caplog.text.count("was not drained") < step // 10:
                manager.fast_steps  # noqa: B018  # the copy fails in the background
        assert len(under_way - before) <= 3
        with pytest.raises(jct.StorageError) as failed:
            manager.wait()
        assert "step-0000000010" in str(failed.value)
        manager.wait()
    assert steps_in(tmp_path / "slow") == []


def test_steps_that_take_too_much_are_not_kept(tmp_path: Path) -> None:
    with run_on(tmp_path, LocalBackend(), interval_steps=1, keep=10, max_bytes=3 << 20) as manager:
        for step in range(1, 6):
            assert manager.save(step, {"x": np.full(1 << 17, step)})  # 1 MiB
    assert steps_in(tmp_path / "fast") == [4, 5]
    with run_on(tmp_path, LocalBackend(), interval_steps=1, keep=10, max_bytes=1) as manager:
        assert manager.restore()["x"][0] == 5
        assert manager.save(6, {"x": np.full(1 << 17, 6)})
    assert steps_in(tmp_path / "fast") == [6]


def test_budget_decides_when_to_save_fast(tmp_path: Path) -> None:
    with run_on(tmp_path, LocalBackend(), max_fraction=0.5) as manager:
        policy = manager.decide(7)
        assert not policy.save
        assert manager.decide(10).save
        assert not manager.decide(10).fast


def leave(tmp_path: Path, backend: LocalBackend, grace_period_s: float) -> tuple[int, int | None]:
    """Train until a SIGTERM at step 15; return the exit code and the step of the shutdown."""
    ckpt = callback_on(
        backend,
        tmp_path / "slow",
        save_interval_steps=10,
        fast_tier={"directory": tmp_path / "fast", "interval_steps": 1},
        grace_period_s=grace_period_s,
        on_preemption="raise",
    )
    with pytest.raises(jct.Preempted) as preempted, ckpt:
        state = ckpt.resume({"w": np.zeros(1000)})
        for step in ckpt.steps(100):
            state = {"w": state["w"] + 1}
            if step == 14:
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt(state)
    return preempted.value.exit_code, preempted.value.step


def test_last_step_before_a_preemption_reaches_the_slow_tier(tmp_path: Path) -> None:
    assert leave(tmp_path, LocalBackend(), 60.0) == (75, 15)
    assert steps_in(tmp_path / "slow") == [10, 15]


def test_without_time_for_a_save_the_plan_keeps_the_newest_step_of_both_tiers(tmp_path: Path) -> None:
    with run_on(tmp_path, LocalBackend(), interval_steps=1) as manager:
        for step in (10, 11):
            assert manager.save(step, {"x": np.full(10, step)})
        manager.wait()
        plan = manager.plan_to_leave(12, 0.0)
    assert not plan.saves
    assert "keeping step 11" in plan.why


def test_without_time_for_a_copy_the_last_step_stays_on_the_fast_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = HoldingBackend("rename", "slow/step-0000000015")
    assert leave(tmp_path, backend, 2.0) == (75, 15)
    assert "stays on the fast tier" in caplog.text
    backend.go.set()
    with run_on(tmp_path, LocalBackend()) as manager:
        assert manager.restore()["state"]["w"][0] == 15


def test_directory_that_vanishes_ends_no_load(tmp_path: Path) -> None:
    with run_on(tmp_path, LocalBackend(), interval_steps=1) as manager:
        for step in (10, 11):
            assert manager.save(step, {"x": np.full(10, step)})
        manager.wait()
        shutil.rmtree(tmp_path / "fast")
        assert manager.load()["x"][0] == 10


def test_running_copy_does_not_cost_the_last_save(tmp_path: Path) -> None:
    backend = HoldingBackend("rename", "slow/step-0000000010")
    assert leave(tmp_path, backend, 4.0) == (75, 15)
    backend.go.set()
    with run_on(tmp_path, LocalBackend()) as manager:
        assert manager.restore()["state"]["w"][0] == 15


def test_job_that_owns_before_it_restores_continues_the_order(tmp_path: Path) -> None:
    with run_on(tmp_path, LocalBackend(), interval_steps=1, keep=10) as manager:
        for step in range(1, 6):
            assert manager.save(step, {"x": np.full(10, step)})
    with run_on(tmp_path, LocalBackend(), interval_steps=1, keep=10) as manager:
        manager.own()
        assert manager.restore()["x"][0] == 5
        for step in (6, 7):
            assert manager.save(step, {"x": np.full(10, step)})
            manager.wait()
    with run_on(tmp_path, LocalBackend(), interval_steps=1, keep=10) as manager:
        assert manager.restore()["x"][0] == 7

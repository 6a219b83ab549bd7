"""One damaged or foreign entry of a run directory affects no other step, no pin and no file elsewhere."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import AnyPreservationPolicy, BestN, LatestN
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.fake_backends import RefusingBackend
from tests.support.locks import is_owned, replace_lock
from tests.support.runs import made_run, save_steps, state_of, step_of, step_path

CODES = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EACCES)


def replace_in_manifest(step: Path, old: bytes, new: bytes) -> None:
    data = (step / "manifest.json").read_bytes()
    assert data.count(old) == 1
    assert len(old) == len(new)
    (step / "manifest.json").write_bytes(data.replace(old, new))


def test_step_with_flipped_metric_is_not_best(tmp_path: Path) -> None:
    policy = AnyPreservationPolicy([LatestN(1), BestN("acc", 1, mode="max")])
    with StepManager(tmp_path) as manager:
        for step, acc in ((100, 0.11), (200, 0.83), (300, 0.60)):
            save_steps(manager, step, metrics={"acc": acc})
    replace_in_manifest(step_path(tmp_path, 100), b'"acc":0.11', b'"acc":0.91')
    assert StepManager(tmp_path).best("acc", "max") == 200
    with StepManager(tmp_path, preservation_policy=policy) as manager:
        assert step_of(manager.restore()) == 300
        save_steps(manager, 400, metrics={"acc": 0.3})
    assert step_path(tmp_path, 200).exists(), "the best"
    assert step_path(tmp_path, 100).exists(), "its metrics are unknown, so it is kept"
    assert not step_path(tmp_path, 300).exists()


def test_a_flipped_sequence_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path, 100, 200, 300)
    replace_in_manifest(step_path(run, 100), b'"sequence":0', b'"sequence":8')
    with StepManager(run) as manager:
        assert step_of(manager.restore()) == 300
        save_steps(manager, 400)
        assert manager.damaged == [100]
    assert "step 100 cannot be restored" in caplog.text
    assert (StepManager(run).steps, StepManager(run).latest) == ([200, 300, 400], 400)


def test_branch_survives_damage_to_its_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path, 10, 20, 30)
    with StepManager(run) as manager:
        manager.restore(step=10)
        save_steps(manager, 15)
    replace_in_manifest(step_path(run, 15), b'"dtype":"float32"', b'"dtype":"gloat32"')
    with StepManager(run, preservation_policy=LatestN(3)) as manager:
        assert manager.latest == 15
        assert step_of(manager.restore()) == 10
        assert "step 15 cannot be restored" in caplog.text
        save_steps(manager, 16, 17)
    assert step_path(run, 10).exists()
    assert StepManager(run).latest == 17


def overwrite(step: Path) -> None:
    (step / "manifest.json").write_bytes(b"nothing that was saved")


def forget_one(step: Path) -> None:
    replace_in_manifest(step, b'"step-0000000030"', b'"step-0000000031"')


def make_it_older(step: Path) -> None:
    replace_in_manifest(step, b'"sequence":3', b'"sequence":1')


@pytest.mark.parametrize("damage", [overwrite, forget_one, make_it_older])
@pytest.mark.parametrize("last", [15, 16])
def test_abandoned_branch_stays_without_manifest(tmp_path: Path, last: int, damage: Any) -> None:
    run = made_run(tmp_path, 10, 20, 30)
    with StepManager(run, preservation_policy=LatestN(2)) as manager:
        manager.restore(step=10)
        save_steps(manager, *range(15, last + 1))
    if last == 15 or damage is overwrite:
        damage(step_path(run, last))
    with StepManager(run, preservation_policy=LatestN(2)) as manager:
        assert step_of(manager.restore()) == (15 if last == 16 and damage is overwrite else 10 if last == 15 else 16)
        save_steps(manager, 17)
    reader = StepManager(run)
    assert (reader.latest, step_of(reader.restore())) == (17, 17)


def test_roll_back_past_unreadable_steps_persists(tmp_path: Path) -> None:
    run = made_run(tmp_path, 10, 20, 30)

    class TwoUnreadable(LocalBackend):
        def open(self, directory: str, name: str, *, direct: Any) -> Any:
            if directory in (str(step_path(run, 20)), str(step_path(run, 30))):
                raise StorageError(errno.EIO, "refused", directory)
            return super().open(directory, name, direct=direct)

    with StepManager(run, backend=TwoUnreadable()) as manager:
        assert step_of(manager.restore()) == 10
        save_steps(manager, 15)
    reader = StepManager(run)
    assert (reader.latest, step_of(reader.restore())) == (15, 15)


def test_failed_listing_does_not_stop_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path, 1)
    manager = StepManager(run)
    listing, record_damage = manager._run.backend.list, manager._run.record_damage

    def refusing(path: str) -> Any:
        raise StorageError(errno.EIO, "refused", path)

    def record(*given: Any) -> None:
        monkeypatch.setattr(manager._run.backend, "list", refusing)
        record_damage(*given)
        monkeypatch.setattr(manager._run.backend, "list", listing)

    monkeypatch.setattr(manager._run, "record_damage", record)
    assert step_of(manager.restore()) == 1


def test_unreadable_step_is_not_counted_by_policy(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    replace_in_manifest(step_path(run, 2), b'"sequence":1', b'"sequence":7')
    with StepManager(run, preservation_policy=LatestN(2)) as manager:
        save_steps(manager, 4)
    assert StepManager(run).steps == [2, 3, 4], "steps 3 and 4 are the two that can be restored"


class Unreadable(LocalBackend):
    """Refuses to list one directory and to open its files."""

    def __init__(self, directory: Path, code: int) -> None:
        self._directory, self._code = str(directory), code

    def _refuse(self, path: str) -> None:
        if path == self._directory:
            raise StorageError(self._code, os.strerror(self._code), path)

    def list(self, path: str) -> Any:
        self._refuse(path)
        return super().list(path)

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        self._refuse(directory)
        return super().open(directory, name, direct=direct)


@pytest.mark.parametrize("code", CODES)
def test_unreadable_old_step_costs_no_other(tmp_path: Path, code: int) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    backend = Unreadable(step_path(run, 1), code)
    assert StepManager(run, backend=backend).steps == [1, 2, 3]
    with StepManager(run, backend=backend, preservation_policy=LatestN(1)) as manager:
        assert step_of(manager.restore()) == 3
        save_steps(manager, 4)
    assert StepManager(run).steps == [1, 4]


@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN, errno.EBADMSG])
def test_unreadable_newest_step_is_skipped(tmp_path: Path, code: int) -> None:
    run = made_run(tmp_path, 1, 2)
    with StepManager(run, backend=Unreadable(step_path(run, 2), code)) as manager:
        assert step_of(manager.restore()) == 1


@pytest.mark.parametrize("code", CODES)
def test_undeletable_attempt_does_not_stop_job(tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path, 1)
    attempt = run / ".step-0000000002.tmp-00000000-00000000-1-1-0"
    attempt.mkdir()
    with StepManager(run, backend=RefusingBackend("remove", ".tmp-", code, 1)) as manager:
        manager.own()
        save_steps(manager, 2)
    assert "deleting .step-0000000002.tmp-" in caplog.text
    with StepManager(run) as manager:
        manager.own()
    assert not attempt.exists()


@pytest.mark.parametrize("token", ["x/../../outside/pwned", "", "a\0b", "x" * 300, ".."])
def test_lock_with_any_token_is_taken_over(tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.run.lock.SILENCE_S", 0.2)
    run = made_run(tmp_path / "run", 1)
    owner = {"process": {"host": "elsewhere", "pid": 1, "start": "1"}, "token": token}
    replace_lock(run, json.dumps(owner).encode())
    for _ in range(2):
        with StepManager(run) as manager:
            manager.own()
    assert os.listdir(tmp_path) == ["run"]
    assert not is_owned(run)


def test_history_that_is_link_is_not_written_through(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 1)
    (tmp_path / "precious").write_text("precious\n")
    (run / "history.jsonl").unlink()
    (run / "history.jsonl").symlink_to(tmp_path / "precious")
    with StepManager(run) as manager:
        manager.restore()
        save_steps(manager, 2)
    assert (tmp_path / "precious").read_text() == "precious\n"
    assert StepManager(run).steps == [1, 2]


@pytest.mark.parametrize("name", ["history.jsonl", "notes.jsonl", "record"])
def test_pipe_in_place_of_file_blocks_nobody(tmp_path: Path, name: str) -> None:
    run = made_run(tmp_path, 1)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)

    def work() -> None:
        with StepManager(run) as manager:
            manager.restore()
            manager.save(2, {"state": state_of(2)})
        done.set()

    done = threading.Event()
    threading.Thread(target=work, daemon=True).start()
    assert done.wait(60)
    assert StepManager(run).steps == [1, 2]


def test_wait_for_stuck_save_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.pending.LAST_PATIENCE_S", 0.2)
    go = threading.Event()

    class Stuck(LocalBackend):
        def create(self, path: str, *, direct: Any) -> Any:
            go.wait(60)
            return super().create(path, direct=direct)

    monkeypatch.setattr("jaxckpt_train.checkpoint.backend_for", lambda _: Stuck())
    pending = jct.save_async(tmp_path / "c", state_of(1))
    try:
        with pytest.raises(jct.CheckpointTimeoutError, match="the save continues"):
            pending.wait()
    finally:
        go.set()
    pending.wait(60)


def test_step_without_commit_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path, 1, 2)
    (step_path(run, 2) / "COMMIT").unlink()
    with StepManager(run) as manager:
        for _ in range(2):
            assert step_of(manager.restore()) == 1
    assert caplog.text.count("step-0000000002: ignored") == 1


def test_renumbered_step_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path, 1, 3)
    StepManager(run).restore()
    assert "was saved as" not in caplog.text
    step_path(run, 3).rename(step_path(run, 7))
    assert step_of(StepManager(run).restore()) == 3
    assert "step 7 was saved as step 3" in caplog.text


def test_quarantine_and_deletion_exclude_each_other(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1, 2, 3)
    with StepManager(run, preservation_policy=LatestN(2)) as manager:
        manager.own()
        first = manager._run.entries()[0]
        manager._run._going.add(first.name)
        manager._run.set_aside(first, "torn")
        assert [event for event in manager.history.events() if event["event"] == "set_aside"] == []
        manager._run._going.discard(first.name)
        annotate = manager._run.annotate

        def meanwhile(*given: Any) -> None:
            manager._run.retain()  # as a commit on another thread
            annotate(*given)

        manager._run.annotate = meanwhile  # type: ignore[method-assign]
        manager._run.set_aside(first, "torn")
        assert manager.damaged == [1]
    assert step_path(run, 1).exists()


def test_hung_disk_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxckpt_train.store.threads.GIVE_UP_S", 0.2)
    run, go = made_run(tmp_path, 1), threading.Event()

    class Frozen(LocalBackend):
        def create(self, path: str, *, direct: Any) -> Any:
            go.wait(60)
            return super().create(path, direct=direct)

    try:
        with pytest.raises(jct.CheckpointTimeoutError, match="no progress for"):
            StepManager(run, backend=Frozen()).own()
    finally:
        go.set()


def test_link_in_place_of_step_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path / "run", 1, 2)
    step_path(run, 2).rename(tmp_path / "elsewhere")
    step_path(run, 2).symlink_to(tmp_path / "elsewhere")
    with StepManager(run) as manager:
        for _ in range(2):
            assert step_of(manager.restore()) == 1
    assert caplog.text.count("step-0000000002: ignored") == 1


def test_fallback_to_abandoned_step_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path / "run", 1, 4)
    with StepManager(run) as manager:
        manager.own()
        manager.restore(step=1)
        save_steps(manager, 2, 3)
        assert manager.best("loss") is None
    assert "left behind" not in caplog.text
    for step in (1, 2, 3):
        (step_path(run, step) / "manifest.json").write_bytes(b"x")
    assert step_of(StepManager(run).restore()) == 4
    assert "step 4 was left behind" in caplog.text


def test_a_step_of_nothing_is_refused(tmp_path: Path) -> None:
    with StepManager(tmp_path / "run") as manager, pytest.raises(jct.SettingsError, match="found none"):
        manager.save(1, {})
    with pytest.raises(jct.SettingsError, match="checkpointables: expected values by name"):
        jct.save_checkpointables(tmp_path / "c", {})
    assert not (tmp_path / "c").exists()

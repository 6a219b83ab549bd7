"""A run directory: which entries its owner removes or leaves alone, and how it names new steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.run import job
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.history import utc_now
from jaxckpt_train.run.job import JobSync
from jaxckpt_train.run.record import Annotation
from jaxckpt_train.store.backends.base import StoredRecord
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.locks import remove_lock
from tests.support.runs import made_run, save_steps, state_of, step_of, step_path


def names(directory: Path, part: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if part in name)


def opened(directory: Path) -> RunDirectory:
    return RunDirectory(LocalBackend(), str(directory), None, utc_now)


def test_foreign_entries_are_left_alone(tmp_path: Path) -> None:
    run = made_run(tmp_path, 1)
    (run / "config.yaml").write_text("mine")
    (run / "step-1").mkdir()
    (run / "step-0000000009").mkdir()
    (run / "step-0000000009" / "half").write_text("an incomplete copy")
    with jct.StepManager(run, preservation_policy=jct.LatestN(1)) as owner:
        save_steps(owner, 2, 3)
        assert owner.steps == [3]
    assert (run / "config.yaml").read_text() == "mine"
    assert (run / "step-0000000009" / "half").exists()
    assert (run / "step-1").exists()


def test_step_is_saved_next_to_broken_copy(tmp_path: Path) -> None:
    step_path(tmp_path, 5).mkdir()
    with jct.StepManager(tmp_path) as owner:
        save_steps(owner, 5)
        assert owner.steps == [5]
    assert names(tmp_path, "step-") == ["step-0000000005", "step-0000000005.g1"]


def test_foreign_highest_generation_refuses_save(tmp_path: Path) -> None:
    (tmp_path / "step-0000000005.g999999").mkdir()
    with jct.StepManager(tmp_path) as owner:
        with pytest.raises(jct.CheckpointExistsError, match="g999999"):
            save_steps(owner, 5)
        save_steps(owner, 6)
    assert jct.StepManager(tmp_path).steps == [6]


def test_names_of_new_saves(tmp_path: Path) -> None:
    run = opened(made_run(tmp_path, 1, 2))
    run.own()
    try:
        assert run.next_step_name(3) == "step-0000000003"
        assert run.next_step_name(2) == "step-0000000002.g1"
        run.refuse(3)
        with pytest.raises(jct.CheckpointExistsError, match="step 2 is committed already"):
            run.refuse(2)
        assert run.lineage(3)["sequence"] == 2
    finally:
        run.close()


def test_owner_asks_disk_once_and_reader_each_time(tmp_path: Path) -> None:
    owner, reader = opened(tmp_path), opened(tmp_path)
    owner.own()
    assert (owner.entries(), reader.entries()) == ([], [])
    made_run(tmp_path / "other", 1)
    step_path(tmp_path / "other", 1).rename(step_path(tmp_path, 1))
    assert owner.entries() == []
    assert [entry.step for entry in reader.entries()] == [1]
    owner.close()
    assert [entry.step for entry in owner.entries()] == [1]


def test_steps_that_policies_see_are_not_built_twice(tmp_path: Path) -> None:
    run = opened(made_run(tmp_path, 1, 2))
    run.own()
    assert run.infos() is run.infos()
    run.annotate(run.entries()[0], Annotation(pin=True))
    assert [info.pinned for info in run.infos()] == [True, False]
    run.close()


def test_first_save_creates_directory_and_parents(tmp_path: Path) -> None:
    run = tmp_path / "a" / "b"
    manager = jct.StepManager(run)
    assert manager.steps == []
    assert not (tmp_path / "a").exists()
    manager.save(1, {"state": state_of(1)})
    manager.close()
    assert manager.steps == [1]


def test_file_in_place_of_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(jct.StorageError, match="a directory is expected"):
        jct.StepManager(tmp_path / "run").own()


def test_lock_that_somebody_removed_does_not_fail_close(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as owner:
        save_steps(owner, 1)
        remove_lock(tmp_path)
    assert jct.StepManager(tmp_path).steps == [1]


def test_owner_that_lost_its_lock_saves_nothing_more(tmp_path: Path) -> None:
    manager = jct.StepManager(tmp_path)
    save_steps(manager, 1)
    remove_lock(tmp_path)
    with jct.StepManager(tmp_path) as other:
        other.restore({"state": state_of(0)})
        save_steps(other, 2)
        for at in (2, 3):
            assert manager.save(at, {"state": state_of(99)}).saved
            with pytest.raises(jct.DirectoryLockedError, match="this job owned it"):
                manager.wait()
    assert manager.save(2, {"state": state_of(99)}).saved
    with pytest.raises(jct.DirectoryLockedError, match="this job owned it"):
        manager.close()
    reader = jct.StepManager(tmp_path)
    assert reader.steps == [1, 2]
    assert step_of(reader.restore({"state": state_of(0)})) == 2


def test_reader_sees_later_commits(tmp_path: Path) -> None:
    reader = jct.StepManager(tmp_path)
    assert not reader.is_committed(1)
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(1)) as owner:
        save_steps(owner, 1)
        assert reader.is_committed(1)
        save_steps(owner, 2)
    assert (reader.is_committed(1), reader.is_committed(2)) == (False, True)


def test_replica_lists_what_the_primary_sends(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as owner:
        save_steps(owner, 1, 2, 3)
        first, second, third = owner._run.entries()
    replica = RunDirectory(LocalBackend(), str(tmp_path), None, utc_now)
    assert len(replica.entries()) == 3  # until the primary has sent something, it reads the disk
    replica.receive([first, second], (), ())
    assert [entry.step for entry in replica.newest()] == [1, 2]
    replica.receive([third, dataclasses.replace(second, pinned=True)], [first.name], [second.name])
    assert [(entry.step, entry.pinned) for entry in replica.newest()] == [(2, True), (3, False)]
    assert (replica.is_committed(1), replica.is_committed(2), replica.is_committed(3)) == (False, False, True)
    replica.receive([dataclasses.replace(third, damaged="torn")], (), ())
    assert (replica.newest()[-1].step, replica.damaged()[0].step) == (2, 3)


class OfTwo(Coordinator):
    """The process 0 of two, or the other one, which receives what process 0 has sent last."""

    processes, sent = 2, b""

    def __init__(self, primary: OfTwo | None = None) -> None:
        self.process, self._primary = 0 if primary is None else 1, primary

    def broadcast(self, doing: str, act: Callable[[], bytes], moved: Any = None) -> bytes:
        self.sent = act() if self._primary is None else self._primary.sent
        return self.sent


def test_step_that_could_not_be_deleted_is_listed_in_all_processes(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path, preservation_policy=jct.LatestN(2)) as manager:
        save_steps(manager, 1, 2)
        owner, replica = manager._run, RunDirectory(LocalBackend(), str(tmp_path), None, utc_now)
        primary = JobSync(OfTwo(), 1.0, owner)
        other = JobSync(OfTwo(primary.job), 1.0, replica)  # type: ignore[arg-type]

        def updated() -> list[int]:
            for job_sync in (primary, other):
                job_sync.on_primary("looking", lambda: None)
            return [entry.step for entry in replica.newest()]

        assert (updated(), primary.take_deleted()) == ([1, 2], [])
        owner._policy = jct.LatestN(1)
        names, _ = owner.plan_deletions()
        replica.receive([], primary.take_deleted(), ())  # with the commit that they expire at
        assert [entry.step for entry in replica.newest()] == [2]
        owner.not_deleted(names)
        assert [entry.step for entry in owner.newest()] == updated() == [1, 2]


def test_lock_hidden_by_a_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client may not know a new name until it opens the directories on the way to it."""
    monkeypatch.setattr(job, "POLL_S", 0.001)

    opened = list[str]()

    class Cached(LocalBackend):
        def open(self, directory: str, name: str, *, direct: Any) -> Any:
            opened.append(directory)
            return super().open(directory, name, direct=direct)

        def read_record(self, path: str) -> StoredRecord | None:
            return super().read_record(path) if str(tmp_path) in opened else None

    with jct.StepManager(tmp_path) as manager:
        manager.own()
        primary = JobSync(OfTwo(), 1.0, manager._run)
        replica = RunDirectory(Cached(), str(tmp_path), None, utc_now)
        other = JobSync(OfTwo(primary.job), 1.0, replica)  # type: ignore[arg-type]
        lock = primary._lock_there()
        assert lock
        other._look_for(lock)
    assert opened[0] == "/"
    assert opened.index(str(tmp_path.parent)) < opened.index(str(tmp_path))

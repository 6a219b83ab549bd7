"""Lost, refused and late requests of saves to an object store; retention and its readers there."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import CheckpointExistsError, SettingsError, StepNotFoundError, StorageError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from tests.support.objects.faults import Fail, Faults, LoseResponse, Refuse, Request
from tests.support.objects.runs import RECORD, At, Held, abandoned, bury_owner, keys, settings_of, state_of
from tests.support.objects.stand_in import StandIn

LONG_S = 60.0


def opened(cloud: StandIn, keep: int | None = None, **options: Any) -> StepManager:
    policy = None if keep is None else LatestN(keep)
    return StepManager(cloud.url("run"), settings=settings_of(cloud, **options), preservation_policy=policy)


def save(manager: StepManager, step: int) -> None:
    manager.save(step, state_of(step))
    manager.wait(LONG_S)
    manager._run._deleter.wait(LONG_S)


def restored(cloud: StandIn) -> int:
    """The newest step as another process restores it, after a check of all listed steps."""
    reader = opened(cloud)
    for step in reader.steps:
        assert reader.load(step=step)["state"]["w"].tolist() == state_of(step)["state"]["w"].tolist()
    reader.restore()
    return reader.restored_step or 0


class NoReads(Faults):
    """After a write to an object whose response is lost, its reads fail, too, until `faults` is replaced."""

    def __init__(self, part: str) -> None:
        self.part, self.is_lost = part, False

    def decide(self, request: Request) -> Fail | LoseResponse | None:
        if self.part not in request.key:
            return None
        if request.kind in ("put_create", "put_update") and not self.is_lost:
            self.is_lost = True
            return LoseResponse()
        return Fail(500) if self.is_lost and request.kind == "get" else None


@pytest.mark.parametrize("part", [RECORD, "/COMMIT", ".lock.json", "/manifest"])
def test_lost_response_of_write_is_no_failure(cloud: StandIn, part: str) -> None:
    with opened(cloud) as manager:
        cloud.faults = fault = At(LoseResponse(), part, "put_create", "put_update")
        save(manager, 1)
        assert fault.hit is not None
        cloud.faults = fault = At(LoseResponse(), part, "put_create", "put_update")
        save(manager, 2)
        assert restored(cloud) == 2


def test_step_in_doubt_is_never_half(cloud: StandIn) -> None:
    with opened(cloud) as manager:
        save(manager, 1)
        cloud.faults = NoReads(RECORD)
        with pytest.raises(StorageError):
            save(manager, 2)
        cloud.faults = None
        assert restored(cloud) == 2  # whole, because its response was lost after the effect
        save(manager, 3)
        assert manager.steps == [1, 3]
        assert restored(cloud) == 3
        assert not [key for key in keys(cloud.objects, "run") if key.startswith("step-0000000002")]


def test_late_commit_of_step_has_all_its_objects(cloud: StandIn) -> None:
    with opened(cloud, request_timeout_s=1.0) as manager:
        save(manager, 1)
        cloud.faults = held = Held(lambda request: request.kind == "put_update" and RECORD in request.key)
        with pytest.raises(StorageError):
            save(manager, 2)
        held.release.set()
        cloud.faults = None
        for _ in range(1000):
            if restored(cloud) == 2:
                break
        assert opened(cloud).steps == [1, 2]


def test_late_commit_after_next_save_has_no_effect(cloud: StandIn) -> None:
    with opened(cloud, request_timeout_s=1.0) as manager:
        save(manager, 1)
        cloud.faults = held = Held(lambda request: request.kind == "put_update" and RECORD in request.key)
        with pytest.raises(StorageError):
            save(manager, 2)
        cloud.faults = None
        save(manager, 3)
        held.release.set()
        save(manager, 4)
        assert opened(cloud).steps == [1, 3, 4]
        assert restored(cloud) == 4


def test_late_commit_of_checkpoint_has_all_its_objects(cloud: StandIn) -> None:
    url, settings = cloud.url("one"), settings_of(cloud, request_timeout_s=1.0)
    jct.save(url, state_of(1), settings=settings)
    cloud.faults = held = Held(lambda request: request.kind == "put_update" and request.key == "one/COMMIT")
    with pytest.raises(StorageError):
        jct.save(url, state_of(2), settings=settings, overwrite=True)
    cloud.faults = None
    assert jct.load(url, settings=settings)["state"]["step"] == 1
    late, found = threading.Thread(target=held.release.set), {1}
    late.start()
    while found == {1}:
        found.add(jct.load(url, settings=settings)["state"]["step"])
    late.join()
    assert found == {1, 2}
    jct.save(url, state_of(3), settings=settings, overwrite=True)
    assert jct.load(url, settings=settings)["state"]["step"] == 3
    assert len({key.partition("/")[0] for key in keys(cloud.objects, "one")}) == 2  # COMMIT and one folder


@pytest.mark.parametrize("action", [Refuse(), Fail(500)])
def test_refused_commit_leaves_older_checkpoint(cloud: StandIn, action: Refuse | Fail) -> None:
    url, settings = cloud.url("one"), settings_of(cloud)
    jct.save(url, state_of(1), settings=settings)
    cloud.faults = At(action, "one/COMMIT", "put_update")
    with pytest.raises(StorageError):
        jct.save(url, state_of(2), settings=settings, overwrite=True)
    assert jct.load(url, settings=settings)["state"]["step"] == 1


def test_slower_of_two_saves_is_refused(cloud: StandIn) -> None:
    url, settings = cloud.url("one"), settings_of(cloud)
    jct.save(url, state_of(1), settings=settings)
    cloud.faults = held = Held(lambda request: request.kind == "put_update" and request.key == "one/COMMIT")
    slow = jct.save_async(url, state_of(2), settings=settings, overwrite=True)
    assert held.reached.wait(LONG_S)
    jct.save(url, state_of(3), settings=settings, overwrite=True)
    held.release.set()
    with pytest.raises(CheckpointExistsError):
        slow.wait()
    assert jct.load(url, settings=settings)["state"]["step"] == 3


def test_step_pinned_after_failed_deletion_stays(cloud: StandIn) -> None:
    with opened(cloud, keep=1) as manager:
        save(manager, 1)
        cloud.faults = At(Fail(500), RECORD, "put_update", skip=1)  # after that of the commit
        save(manager, 2)
        cloud.faults = None
        assert manager.steps == [1, 2]
        manager.pin(1)
        save(manager, 3)
        assert manager.steps == [1, 3]
    assert restored(cloud) == 3
    assert opened(cloud).steps == [1, 3]


def test_dropped_manager_deletes_nothing_that_is_listed(cloud: StandIn) -> None:
    manager = opened(cloud, keep=1)
    save(manager, 1)
    released = threading.Event()
    manager._run._deleter._jobs.put(lambda: released.wait(LONG_S) and None)
    manager.save(2, state_of(2))
    manager.wait(LONG_S)  # its deletion of step 1 waits
    deleter = manager._run._deleter
    del manager
    gc.collect()
    released.set()
    assert deleter.wait(LONG_S)
    assert restored(cloud) == 2
    assert opened(cloud).steps == [1, 2]


def test_objects_of_dead_save_are_removed(cloud: StandIn) -> None:
    manager = opened(cloud)
    with abandoned(manager):
        save(manager, 1)
        cloud.faults = At(Refuse(), RECORD, "put_update")
        with pytest.raises(StorageError):
            save(manager, 2)
    cloud.faults = None
    cloud.objects.put("bucket/run/.jaxckpt-now-0123456789abcdef", b"of a probe")
    bury_owner(cloud.objects)
    with opened(cloud) as manager:
        manager.own()
        manager._run._deleter.look_back()
        assert manager._run._deleter.wait(LONG_S)
        manager._run._deleter.remove_due()
        assert manager._run._deleter.wait(LONG_S)
        assert {key.partition(".")[0] for key in keys(cloud.objects, "run") if "history/" not in key} == {
            "", "record", "step-0000000001"
        }  # fmt: skip


def test_live_save_survives_sweep(cloud: StandIn) -> None:
    manager = opened(cloud)
    cloud.faults = held = Held(lambda request: request.kind == "put_update" and RECORD in request.key)
    manager.own()
    pending = manager.save(1, state_of(1)).pending
    assert pending is not None
    assert held.reached.wait(LONG_S)
    manager._run._deleter.look_back()
    assert manager._run._deleter.wait(LONG_S)
    manager._run._deleter.remove_due()
    assert manager._run._deleter.wait(LONG_S)
    held.release.set()
    pending.wait()
    assert restored(cloud) == 1
    manager.close()


def test_orphan_stays_for_grace_period(cloud: StandIn) -> None:
    cloud.objects.put("bucket/run/step-0000000007.0123456789abcdef/d/p00000", b"half")
    with opened(cloud, delete_grace_s=600.0) as manager:
        save(manager, 1)
        manager._run._deleter.look_back()
        manager._run._deleter.remove_due()
        assert manager._run._deleter.wait(LONG_S)
    assert any("step-0000000007" in key for key in keys(cloud.objects, "run"))


def test_first_save_that_died_does_not_refuse_next_start(cloud: StandIn) -> None:
    with abandoned(manager := opened(cloud)):
        cloud.faults = At(Refuse(), RECORD, "put_update")
        with pytest.raises(StorageError):
            save(manager, 1)
    cloud.faults = None
    bury_owner(cloud.objects)
    with opened(cloud) as manager:
        with pytest.raises(StepNotFoundError):
            manager.restore()
        manager.check_fresh()
        save(manager, 1)


@pytest.mark.parametrize("verified", [True, False])
def test_reader_of_deleted_step_finishes(cloud: StandIn, verified: bool) -> None:
    with opened(cloud, keep=1, delete_grace_s=600.0) as manager:
        save(manager, 1)
        settings = settings_of(cloud)
        reader = StepManager(
            cloud.url("run"),
            settings=jct.StoreSettings(object_store=settings.object_store, verify_on_load=verified),
        )
        name = manager.path(1).rpartition("/")[2]
        cloud.faults = held = Held(lambda request: request.kind in ("get", "head") and f"{name}/state" in request.key)
        found: list[Any] = []
        reading = threading.Thread(target=lambda: found.append(reader.load(step=1)))
        reading.start()
        assert held.reached.wait(LONG_S)
        save(manager, 2)
        assert opened(cloud).steps == [2]
        held.release.set()
        reading.join(LONG_S)
        np.testing.assert_array_equal(found[0]["state"]["w"], state_of(1)["state"]["w"])


def test_reader_goes_on_without_step_that_was_removed_by_hand(cloud: StandIn) -> None:
    with opened(cloud) as manager:
        for step in (1, 2):
            save(manager, step)
        name = manager.path(2).rpartition("/")[2]
    for key in keys(cloud.objects, "run"):
        if key.startswith(name):
            cloud.objects.delete(f"bucket/run/{key}")
    assert restored_only(cloud) == 1
    with opened(cloud) as manager:
        manager.restore()
        assert manager.restored_step == 1
        save(manager, 2)
    assert restored(cloud) == 2


def restored_only(cloud: StandIn) -> int:
    reader = opened(cloud)
    reader.restore()
    return reader.restored_step or 0


def test_run_in_single_checkpoint_is_refused(cloud: StandIn) -> None:
    jct.save(cloud.url("run"), state_of(1), settings=settings_of(cloud))
    with opened(cloud) as manager, contextlib.suppress(StorageError), pytest.raises(jct.SettingsError):
        manager.own()


@pytest.mark.parametrize("kind", ["put_create", "put_update"])
def test_probe_whose_request_is_repeated_succeeds(cloud: StandIn, kind: str) -> None:
    cloud.faults = fault = At(LoseResponse(), ".jaxckpt-now-", kind)
    with opened(cloud, check_conditions=True, retries=1) as manager:
        save(manager, 1)
    assert fault.hit is not None
    assert restored(cloud) == 1


def test_event_whose_write_is_in_doubt_is_recorded_once(cloud: StandIn) -> None:
    with opened(cloud) as manager:
        manager.own()
        cloud.faults = NoReads("history/")
        save(manager, 1)
        cloud.faults = None
        save(manager, 2)
        saves = [event["step"] for event in manager.history.events() if event["event"] == "save"]
    assert saves == [1, 2]


class LateArrival(Faults):
    """Delay the first update of COMMIT until it is repeated, and let it arrive before its repetition."""

    def __init__(self, cloud: StandIn) -> None:
        self.cloud, self.held = cloud, threading.Event()
        self.release = threading.Event()

    def decide(self, request: Request) -> None:
        if request.key != "one/COMMIT" or request.kind != "put_update":
            return
        if not self.held.is_set():
            self.held.set()
            self.release.wait(LONG_S)
            return
        before = self.cloud.objects.get("bucket/one/COMMIT")
        self.release.set()
        while self.cloud.objects.get("bucket/one/COMMIT") is before:
            pass


def test_commit_that_arrives_before_its_repetition_is_own(cloud: StandIn) -> None:
    url, settings = cloud.url("one"), settings_of(cloud, request_timeout_s=1.0, retries=1)
    jct.save(url, state_of(1), settings=settings)
    cloud.faults = LateArrival(cloud)
    jct.save(url, state_of(2), settings=settings, overwrite=True)
    assert jct.load(url, settings=settings)["state"]["step"] == 2


def test_checkpoint_with_name_of_step_is_refused(cloud: StandIn) -> None:
    """The record of a run there would not have it, so the run would remove it."""
    for name in ("step-0000000007", "step-0000000007.0123456789abcdef"):
        with pytest.raises(SettingsError, match=name):
            jct.save(cloud.url(f"run/{name}"), {"w": 1})
    assert cloud.objects.content == {}

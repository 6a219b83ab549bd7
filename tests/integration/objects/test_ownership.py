"""Owners of a run on an object store: take-over, former owners, and a record that is lost, damaged or newer."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import msgspec
import pytest

from jaxckpt_train.errors import DirectoryLockedError, FormatVersionError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.record import seal_record
from tests.support.objects.faults import LoseResponse, Request
from tests.support.objects.runs import (
    LOCK,
    RECORD,
    At,
    Held,
    abandoned,
    bury_owner,
    keys,
    settings_of,
    state_of,
)
from tests.support.objects.stand_in import StandIn

LONG_S = 60.0


def opened(cloud: StandIn, keep: int | None = None) -> StepManager:
    policy = None if keep is None else LatestN(keep)
    return StepManager(cloud.url("run"), settings=settings_of(cloud), preservation_policy=policy)


def save(manager: StepManager, step: int) -> None:
    manager.save(step, state_of(step))
    manager.wait(LONG_S)
    manager._run._deleter.wait(LONG_S)


def test_second_owner_is_refused(cloud: StandIn) -> None:
    with opened(cloud) as first, opened(cloud) as second:
        save(first, 1)
        with pytest.raises(DirectoryLockedError):
            save(second, 2)
        assert opened(cloud).steps == [1]


def test_dead_process_is_succeeded(cloud: StandIn) -> None:
    program = (
        "import os, numpy, sys, jaxckpt_train as jct\n"
        "manager = jct.StepManager(sys.argv[1])\n"
        "manager.save(1, {'state': {'w': numpy.arange(40), 'step': 1}})\n"
        "manager.wait()\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program, cloud.url("run")], check=True, timeout=120)
    with opened(cloud) as manager:
        assert manager.restore()["state"]["step"] == 1
        save(manager, 2)
        assert opened(cloud).steps == [1, 2]


def test_former_owner_commits_nothing(cloud: StandIn) -> None:
    first = opened(cloud)
    with abandoned(first):
        save(first, 1)
        cloud.faults = held = Held(lambda request: request.kind == "put_update" and RECORD in request.key)
        pending = first.save(2, state_of(2)).pending
        assert pending is not None
        assert held.reached.wait(LONG_S)
        bury_owner(cloud.objects)
        with opened(cloud) as second:
            second.restore()
            save(second, 3)
            held.release.set()
            with pytest.raises(DirectoryLockedError):
                first.wait(LONG_S)
            with pytest.raises(DirectoryLockedError):
                save(first, 4)
            save(second, 5)
            assert opened(cloud).steps == [1, 3, 5]


def test_former_owner_deletes_nothing(cloud: StandIn) -> None:
    first = opened(cloud, keep=1)
    with abandoned(first):
        save(first, 1)
        cloud.faults = held = Held(
            lambda request: request.kind == "put_update" and RECORD in request.key and len(opened_steps()) == 2
        )

        def opened_steps() -> list[str]:
            record = cloud.objects.get(f"bucket/run/{RECORD}")
            assert record is not None
            return msgspec.json.decode(record.data.partition(b"\n")[2])["record"]["steps"]  # type: ignore[no-any-return]

        first.save(2, state_of(2))
        first.wait(LONG_S)
        assert held.reached.wait(LONG_S)  # step 1 is about to leave the record
        bury_owner(cloud.objects)
        with opened(cloud) as second:
            second.pin(1)
            held.release.set()
            assert first._run._deleter.wait(LONG_S)
            assert second.load(step=1)["state"]["step"] == 1
            assert opened(cloud).steps == [1, 2]


def test_lost_response_of_take_over_is_no_failure(cloud: StandIn) -> None:
    with abandoned(first := opened(cloud)):
        save(first, 1)
    for part in (LOCK, RECORD):
        bury_owner(cloud.objects)
        cloud.faults = fault = At(LoseResponse(), part, "put_update")
        second = opened(cloud)
        with abandoned(second):
            second.own()
            assert fault.hit is not None
            assert second.steps == [1]


@pytest.mark.parametrize(
    "damage", [None, b"", b"{}\nnothing", b'{"version":1,"nonce":"a"}\n{"xxh3_64":"0","record":{}}']
)
def test_steps_are_found_without_record(cloud: StandIn, damage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    with opened(cloud) as manager:
        save(manager, 1)
        save(manager, 2)
        manager.pin(1)
    if damage is None:
        cloud.objects.delete(f"bucket/run/{RECORD}")
    else:
        cloud.objects.put(f"bucket/run/{RECORD}", damage)
    assert opened(cloud).steps == [1, 2]
    with opened(cloud, keep=1) as manager, caplog.at_level(logging.WARNING):
        assert manager.restore()["state"]["step"] == 2
        save(manager, 3)
        assert manager.steps == [1, 2, 3]  # one of them may be pinned
    assert "may be pinned" in caplog.text
    assert opened(cloud).steps == [1, 2, 3]


def test_record_of_newer_format_is_refused_and_kept(cloud: StandIn) -> None:
    with opened(cloud) as manager:
        save(manager, 1)
    name = f"bucket/run/{RECORD}"
    stored = cloud.objects.get(name)
    assert stored is not None
    head = stored.data.partition(b"\n")[0]
    newer = head + b"\n" + seal_record(b'{"format":2}')
    cloud.objects.put(name, newer)
    with opened(cloud) as manager, pytest.raises(FormatVersionError):
        save(manager, 2)
    kept = cloud.objects.get(name)
    assert kept is not None
    assert kept.data == newer


def test_heartbeat_does_not_bring_back_lost_lock(cloud: StandIn) -> None:
    with opened(cloud) as manager:
        save(manager, 1)
        cloud.objects.delete(f"bucket/run/{LOCK}")
        manager._run._lock._beat_once()
        assert LOCK not in keys(cloud.objects, "run")
        with pytest.raises(DirectoryLockedError):
            save(manager, 2)


def test_heartbeat_does_not_take_lock_back(cloud: StandIn) -> None:
    with abandoned(first := opened(cloud)):
        save(first, 1)
        cloud.faults = held = Held(lambda request: request.kind == "put_update" and LOCK in request.key)
        beat = first._run._lock._beat_once
        beating = threading.Thread(target=beat)
        beating.start()
        assert held.reached.wait(LONG_S)
        bury_owner(cloud.objects)
        with opened(cloud) as second:
            second.own()
            held.release.set()
            beating.join(LONG_S)
            second.own()
            save(second, 2)
            assert not first._run._lock.is_own()


class Crossing:
    """Serves the first replacement of the lock once the second has come, and then the second."""

    def __init__(self, server: StandIn) -> None:
        self._server, self._guard, self._number = server, threading.Lock(), 0
        self.first, self._second = threading.Event(), threading.Event()

    def decide(self, request: Request) -> None:
        if request.kind != "put_update" or LOCK not in request.key:
            return
        with self._guard:
            self._number += 1
            number, before = self._number, self._server.objects.get(f"bucket/run/{LOCK}")
        if number == 1:
            self.first.set()
            self._second.wait(LONG_S)
        elif number == 2:
            self._second.set()
            while self._server.objects.get(f"bucket/run/{LOCK}") == before:
                pass  # ends when the first is served; else pytest's time limit ends it


def test_release_during_heartbeat_frees_the_run(cloud: StandIn) -> None:
    with opened(cloud) as manager:
        save(manager, 1)
        cloud.faults = crossing = Crossing(cloud)
        beating = threading.Thread(target=manager._run._lock._beat_once)
        beating.start()
        assert crossing.first.wait(LONG_S)
    beating.join(LONG_S)
    with opened(cloud) as next_owner:
        save(next_owner, 2)

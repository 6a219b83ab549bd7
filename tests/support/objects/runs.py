"""Runs on a stand-in server: settings, small states, and faults at chosen requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from jaxckpt_train.manager import StepManager
from jaxckpt_train.settings import ObjectStoreSettings, StoreSettings
from tests.support.objects.faults import Action, Request
from tests.support.objects.object_map import BUCKET, ObjectMap
from tests.support.objects.stand_in import StandIn

DEAD_PID = 2**22 + 1  # above the largest process number of Linux
LOCK = ".lock.json"
RECORD = "record.json"


def state_of(step: int) -> dict[str, Any]:
    """Return a small state that differs for each number."""
    return {"state": {"w": np.arange(40, dtype=np.int64) * step, "step": step}}


def settings_of(server: StandIn, **options: Any) -> StoreSettings:
    """Return settings without retries that reach the server, and no grace period unless the options have one."""
    chosen: dict[str, Any] = {
        "endpoint": server.endpoint,
        "retries": 0,
        "delete_grace_s": 0.0,
        "check_conditions": False,
        "options": {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"},
    }
    return StoreSettings(object_store=ObjectStoreSettings(**(chosen | options)), staging_bytes=1 << 20)


class At:
    """Answer the first request of these kinds, to a key with this part, with a fault; serve all others."""

    def __init__(self, action: Action, part: str, *kinds: str, skip: int = 0) -> None:
        self.action, self.part, self.kinds, self.skip = action, part, kinds, skip
        self.hit: Request | None = None
        self._lock = threading.Lock()

    def decide(self, request: Request) -> Action | None:
        with self._lock:
            if self.hit is not None or not self._matches(request):
                return None
            self.skip -= 1
            if self.skip >= 0:
                return None
            self.hit = request
            return self.action

    def _matches(self, request: Request) -> bool:
        return self.part in request.key and (not self.kinds or request.kind in self.kinds)


class Held:
    """Hold the first request that matches until `release`; its effect comes then, even if the client has left."""

    def __init__(self, matches: Callable[[Request], bool]) -> None:
        self._matches = matches
        self.reached, self.release = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def decide(self, request: Request) -> Action | None:
        with self._lock:
            if self.reached.is_set() or not self._matches(request):
                return None
            self.reached.set()
        self.release.wait(60)
        return None


def bury_owner(objects: ObjectMap, run: str = "run") -> None:
    """Make the owner of a run a dead process of this machine, so that the next one takes over at once."""
    name = f"{BUCKET}/{run}/{LOCK}"
    stored = objects.get(name)
    if stored is None:
        return
    head, _, body = stored.data.partition(b"\n")
    lock = json.loads(body)
    lock["process"] |= {"pid": DEAD_PID, "nonce": ""}
    objects.put(name, head + b"\n" + msgspec.json.encode(lock))


def keys(objects: ObjectMap, folder: str) -> list[str]:
    """Return the keys below a folder of the bucket, in order."""
    prefix = f"{BUCKET}/{folder}/"
    return sorted(name[len(prefix) :] for name in objects.content if name.startswith(prefix))


@contextlib.contextmanager
def abandoned(manager: StepManager) -> Iterator[None]:
    """Stop the heartbeat of a manager that ends without a release, as if its process had died."""
    try:
        yield
    finally:
        manager._run._lock._stop.open()
        manager._run._lock._tried = False

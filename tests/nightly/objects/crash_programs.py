"""Programs that save to a stand-in server, for a campaign of crashes: processes with their promises."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxckpt_train import checkpoint
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.policies.preservation import LatestN
from jaxckpt_train.run.maintenance import owned_run
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.by_path import ByPath
from tests.nightly.crash.facts import Facts, state_of, token_of
from tests.nightly.crash.programs import process
from tests.support.objects.calls import Answer, Call, RejectedError
from tests.support.objects.faults import Action, Request
from tests.support.objects.object_map import ObjectMap
from tests.support.objects.runs import settings_of
from tests.support.objects.stand_in import StandIn

LONGEST_S = 60.0
WRITES = {"put", "put_create", "put_update", "delete", "delete_many", "part", "create_upload", "complete", "copy"}
_pids = itertools.count(1000)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What is stored at one moment: before or after the effect of a request."""

    number: int
    is_after: bool
    objects: ObjectMap

    @property
    def key(self) -> tuple[tuple[str, int], ...]:
        """What distinguishes the content from that of other moments of the same recording."""
        return tuple(sorted((name, stored.generation) for name, stored in self.objects.content.items()))


class Recorder(StandIn):
    """A stand-in that copies its objects before and after each write, and can serve one request later or again.

    Attributes:
        snapshots: the copies, while `records` is set.
        deferred: the number of the request to serve by `deliver`.
    """

    def __init__(self) -> None:
        super().__init__("s3")
        self.snapshots: list[Snapshot] = []
        self.records = False
        self.deferred = 0
        self._call: tuple[Request, Call] | None = None

    def restart(self, objects: ObjectMap) -> None:
        """Start with these objects, which are not changed."""
        copied = objects.copy()
        self.objects.content, self.objects.uploads = copied.content, copied.uploads
        self.objects._generation = max(self.objects._generation, copied._generation)
        self.requests.clear()
        self.snapshots, self.faults, self.deferred, self._call = [], None, 0, None

    def _answer(self, request: Request, call: Call, action: Action | None) -> Answer | None:
        if request.number == self.deferred:
            self._call = request, call
        if not self.records:
            return super()._answer(request, call, action)
        self.snapshots.append(Snapshot(request.number, False, self.objects.copy()))
        answer = super()._answer(request, call, action)
        if request.kind in WRITES:
            self.snapshots.append(Snapshot(request.number, True, self.objects.copy()))
        return answer

    def deliver(self) -> None:
        """Serve the deferred request now, without a response."""
        if self._call is not None:
            with contextlib.suppress(RejectedError):
                self._dialect.serve(self._call[0].kind, self._call[1])
            self._call = None


class World:
    """A server, the settings of all processes, and the promises made to them.

    Attributes:
        errors: those of operations, if `goes_on`: else they are raised.
    """

    def __init__(self, server: Recorder, keep: int | None, retries: int = 0) -> None:
        self.server, self.facts, self.retries = server, Facts(keep), retries
        self.errors: list[CheckpointError] = []

    def settings(self, grace_s: float = 0.0) -> StoreSettings:
        """Return settings with this grace period."""
        return settings_of(self.server, delete_grace_s=grace_s, retries=self.retries)

    def now(self) -> int:
        """Return the number of requests so far."""
        return len(self.server.requests)

    @contextlib.contextmanager
    def tolerant(self) -> Iterator[None]:
        """Keep the error of an operation, so that the process continues."""
        try:
            yield
        except CheckpointError as error:
            self.errors.append(error)


def opened(world: World, keep: int | None = None, grace_s: float = 0.0) -> StepManager:
    """Open the run as a new process, with a backend of its own."""
    settings = world.settings(grace_s)
    policy = None if keep is None else LatestN(keep)
    backend = ByPath(settings.object_store)
    return StepManager(world.server.url("run"), settings=settings, preservation_policy=policy, backend=backend)


class Life:
    """One process that saves to a run, until it closes its manager or dies."""

    def __init__(self, world: World, keep: int | None = None, grace_s: float = 0.0) -> None:
        self.world, self.facts = world, world.facts
        self.manager = opened(world, keep, grace_s)
        self._tip = 0

    def save(self, step: int, **options: Any) -> None:
        """Save a step, and wait for retention."""
        with self.world.tolerant():
            promise = self.facts.begin(step, self.world.now(), self._tip)
            self.manager.save(step, state_of(promise.token), **options)
            self.manager.wait(LONGEST_S)
            self.facts.acknowledge(promise, self.world.now())
            self._tip = promise.token
        self.manager._run._deleter.remove_due()
        self.manager._run._deleter.wait(LONGEST_S)

    def pin(self, step: int) -> None:
        """Pin a step."""
        with self.world.tolerant():
            self.manager.pin(step)
            self.facts.pins.setdefault(step, self.world.now())

    def restore(self, step: int | None = None) -> None:
        """Restore a step, and continue from there."""
        with self.world.tolerant():
            self.facts.rolled_back = self.facts.rolled_back or step is not None
            self._tip = token_of(self.manager.restore(step=step, roll_back=True))

    def close(self) -> None:
        """End in order."""
        with self.world.tolerant():
            self.manager.close()
        self.die()

    def die(self) -> None:
        """End as SIGKILL does: the heartbeat stops, and nothing is released."""
        self.manager._run._lock._stop.open()
        self.manager._run._lock._tried = False


@contextlib.contextmanager
def living(world: World, *, dies: bool = False, **options: Any) -> Iterator[Life]:
    """Act as a new process; all earlier ones are dead."""
    with process(next(_pids)):
        life = Life(world, **options)
        try:
            yield life
        finally:
            (life.die if dies else life.close)()


def saves(world: World) -> None:
    """Save three steps, and one again."""
    with living(world) as life:
        for step in (1, 2, 3):
            life.save(step)
        life.save(3, overwrite=True)


def retention(world: World, grace_s: float = 0.0) -> None:
    """Keep one step of four; a pinned one stays."""
    with living(world, keep=1, grace_s=grace_s) as life:
        life.save(1)
        life.pin(1)
        for step in (2, 3, 4):
            life.save(step)


def late_retention(world: World) -> None:
    """The same, with a grace period."""
    retention(world, grace_s=600.0)


def roll_back(world: World) -> None:
    """Go back to an older step, and save the later ones again."""
    with living(world) as life:
        for step in (1, 2, 3):
            life.save(step)
        life.restore(1)
        life.save(2)
        life.save(3)


def take_over(world: World) -> None:
    """Continue what a dead process has left; the new one dies, too, and a third one prunes."""
    with living(world, dies=True) as life:
        life.save(1)
        life.save(2)
    with living(world, dies=True) as life:
        life.restore()
        life.pin(1)
        life.save(3)
    with living(world) as life:
        life.restore()
        life.save(4)


def handed_over(world: World) -> None:
    """Two processes in turn, both of which end in order, with retention."""
    for steps in ((1, 2), (3, 4)):
        with living(world, keep=2) as life:
            if steps[0] > 1:
                life.restore()
            for step in steps:
                life.save(step)


def prune(world: World) -> None:
    """Prune a run by the command's way, after a pin."""
    with living(world) as life:
        for step in (1, 2, 3):
            life.save(step)
        life.pin(1)
    with process(next(_pids)), world.tolerant():
        backend = ByPath(world.settings().object_store)
        with owned_run(backend, world.server.url("run"), LatestN(1)) as run:
            run.retain_now()
            run._deleter.wait(LONGEST_S)


def single(world: World) -> None:
    """Save a single checkpoint, and replace it twice."""
    with process(next(_pids)):
        for _ in range(3):
            with on_single(world), world.tolerant():
                promise = world.facts.begin(0, world.now())
                checkpoint.save_checkpointables(
                    world.server.url("one"), state_of(promise.token), overwrite=True, settings=world.settings()
                )
                world.facts.acknowledge(promise, world.now())


@contextlib.contextmanager
def on_single(world: World) -> Iterator[None]:
    """Let functions for single checkpoints use a new backend."""
    backend = ByPath(world.settings().object_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "backend_for", lambda _: backend)
        yield


@dataclasses.dataclass(frozen=True)
class Program:
    """What runs, and how many steps a check afterwards keeps (None: all)."""

    run: Callable[[World], None]
    keep: int | None = None


PROGRAMS = {
    "saves": Program(saves),
    "retention": Program(retention, 1),
    "late retention": Program(late_retention, 1),
    "roll-back": Program(roll_back),
    "take-over": Program(take_over),
    "handed over": Program(handed_over, 2),
    "prune": Program(prune, 1),
    "single": Program(single),
}

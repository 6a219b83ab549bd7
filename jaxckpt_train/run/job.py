"""One run directory shared by the processes of a job.

`JobSync` runs directory operations in the primary process, and sends the results and the changes of the run to the
others. The functions below it say which decisions to save all processes take alike on their own, and where they have to
ask the primary.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from jaxckpt_train._validation import is_url, shown
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.errors import CheckpointError, OtherProcessError, StorageError
from jaxckpt_train.pending import call_within
from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, SavePolicy, policy_name
from jaxckpt_train.policies.save import (
    AllSavePolicy,
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    EverySecondsPolicy,
    FixedIntervalPolicy,
    InitialSavePolicy,
    OverheadBudgetPolicy,
    PreemptionCheckpointingPolicy,
    SpecificStepsPolicy,
    TemporarySavePolicy,
    YoungDalyPolicy,
)
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.run.lock import LOCK_NAME
from jaxckpt_train.store.backends.base import GONE
from jaxckpt_train.store.threads import Latch

T = TypeVar("T")
LEAVING_S = 2.0  # seconds to notify the others; the primary, which has to receive it, may be stopped
# A network file system may hide a name for up to a minute after another machine has created it.
SEEN_WITHIN_S, POLL_S = 90.0, 0.5
# They decide by the step and by facts that all processes have. A subclass may decide otherwise.
_BY_STEPS: frozenset[type] = frozenset({FixedIntervalPolicy, SpecificStepsPolicy, PreemptionCheckpointingPolicy})
# They become due as time passes, so a few steps later are as good.
_BY_TIME: frozenset[type] = frozenset(
    {EverySecondsPolicy, ContinuousCheckpointingPolicy, OverheadBudgetPolicy, YoungDalyPolicy}
)


class RunDelta(msgspec.Struct, array_like=True):
    """The changes of a run since the previous delta."""

    entries: tuple[Entry, ...]  # new or changed
    gone: tuple[str, ...]
    left: tuple[str, ...]  # the names of all entries that a roll-back has left behind


class _PrimaryResult(msgspec.Struct, array_like=True):
    result: Any
    delta: RunDelta | None


class _JobSettings(msgspec.Struct, array_like=True):
    path: bytes
    decides: str


class JobSync:
    """The run directory of a job, shared by its processes. The primary owns it; the others read it.

    All processes call the same methods in the same order, each on the thread of its loop. A single process is a job of
    size one. A process without a sign of life for `timeout_s` seconds is considered lost.
    """

    def __init__(self, coordinator: Coordinator, timeout_s: float, run: RunDirectory) -> None:
        self._coordinator, self._timeout_s, self._channel = coordinator, timeout_s, list[Coordinator]()
        self._run, self._backend, self._directory = run, run.backend, run.directory
        self.is_primary, self.is_single_process = coordinator.process == 0, coordinator.processes == 1
        # In the primary: what the others know by deltas, and the names that they no longer list since.
        self._sent, self._deleted = dict[str, Entry](), set[str]()
        self._is_taken = False
        self.decides = ""  # describes what each process decides on its own, which must be the same in all

    @property
    def job(self) -> Coordinator:
        """The channel of all collective calls. Opened by the first call: not every process may make this object."""
        if not self._channel:
            self._channel.append(self._coordinator.within("run", self._timeout_s))
        return self._channel[0]

    def channel(self, name: str, timeout_s: float) -> Coordinator:
        """A coordinator with a separate order of calls, for another thread; see `Coordinator.within`."""
        return self._coordinator if self.is_single_process else self.job.within(name, timeout_s)

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self._coordinator.processes

    def leave(self) -> None:
        """Take no further part in collective calls; processes that wait for this one are notified."""
        for channel in self._channel:
            leave_channel(channel)

    def on_primary(self, doing: str, act: Callable[[], Any], moved: Callable[[], object] | None = None) -> Any:
        """Run `act` in the primary and return its result, plain data, in all processes; its error is raised in all.

        `moved` returns another value whenever `act` makes progress; None: `act` is quick.
        """
        if self.is_single_process:
            return act()
        done: list[Any] = []

        def say() -> bytes:
            done.append(act())
            delta = self._next_delta() if self._run.is_owner else None  # else each process reads the disk
            return msgspec.msgpack.encode(_PrimaryResult(done[0], delta))

        sent = self.job.broadcast(doing, say, moved)
        if self.is_primary:
            return done[0]
        received = msgspec.msgpack.decode(sent, type=_PrimaryResult)
        if received.delta is not None:
            self._run.receive(received.delta.entries, received.delta.gone, received.delta.left)
        return received.result

    def _next_delta(self) -> RunDelta:
        """In the primary: the changes since the last call. The caller must send them."""
        now = {entry.name: entry for entry in [*self._run.entries(), *self._run.damaged()]}
        deleted, self._deleted = self._deleted, set()  # steps whose deletion fails are listed again
        changed = tuple(entry for name, entry in now.items() if name in deleted or self._sent.get(name) != entry)
        gone = tuple(name for name in self._sent if name not in now)
        self._sent = now
        return RunDelta(changed, gone, tuple(sorted(self._run.left())))

    def take_deleted(self) -> list[str]:
        """In the primary: the names that are no longer listed since the last call. The caller must send them."""
        deleted = [] if self.is_single_process else self._run.take_deleted()
        self._deleted.update(deleted)
        return deleted

    def on_all(self, doing: str, act: Callable[[], T]) -> T:
        """Run `act` in every process; the error of one process, the first of several, is raised in all."""
        done: list[T] = []

        def give() -> bytes:
            done.append(act())
            return b""

        self.job.exchange(doing, give, moved=time.monotonic)
        return done[0]

    def own(self) -> None:
        """Make the primary the owner of the directory, as `RunDirectory.own` does.

        The processes first check that all have the same directory, take the same decisions, and see the same storage,
        and raise OtherProcessError otherwise.
        """
        if self.is_single_process or self._is_taken:
            self.on_primary(f"taking {self._directory}", self._run.own, time.monotonic)
            return
        mine = msgspec.msgpack.encode(_JobSettings(os.fsencode(self._directory), self.decides))
        self.job.exchange(f"taking {self._directory}", lambda: mine, _refuse_others)
        lock = self.on_primary(f"taking {self._directory}", self._take, time.monotonic)
        self.job.exchange(f"looking at {self._directory}", lambda: self._look_for(lock), moved=time.monotonic)
        self._is_taken = True

    def hold(self) -> None:
        """Like `own`, but if the directory is already owned, accesses neither the disk nor other processes."""
        if self.is_single_process:
            self._run.hold()
        elif not self._is_taken:
            self.own()
        elif self.is_primary:
            self._run.hold()

    def retain(self) -> None:
        """Make the primary delete expired steps."""
        self.hold()
        self.on_primary(f"deleting steps of {self._directory}", self._run.retain_now, time.monotonic)

    def _take(self) -> bytes:
        self._run.own()
        return self._lock_there() or b""

    def _lock_there(self) -> bytes | None:
        found = self._backend.read_record(f"{self._directory}/{LOCK_NAME}")
        return None if found is None else found.data

    def _look_for(self, lock: bytes) -> bytes:
        """Raise OtherProcessError if this process does not see the primary's lock: it has different storage."""
        waiting, until_s = Latch(), time.monotonic() + SEEN_WITHIN_S
        while not self.is_primary and self._seen() != lock:
            if time.monotonic() >= until_s:
                raise OtherProcessError(
                    f"{self._directory}: process 0 owns this directory, but process {self._coordinator.process} does "
                    f"not see its lock, {LOCK_NAME}: all processes of a job must save to one directory on shared "
                    "storage; choose one that is not local to each machine"
                )
            waiting.wait(POLL_S)
        return b""

    def _seen(self) -> bytes | None:
        try:
            found = self._lock_there()
        except StorageError as error:
            if error.errno not in {*GONE, errno.ENOTDIR}:
                raise
            found = None
        if found is None:
            self._look_anew()
        return found

    def _look_anew(self) -> None:
        """Open the directory and all its parents, top down, which makes an NFS client ask its server for new names."""
        if is_url(self._directory):
            return
        folders = [self._directory]
        while (folder := os.path.dirname(folders[-1])) != folders[-1]:
            folders.append(folder)
        for folder in reversed(folders):
            with contextlib.suppress(StorageError):  # usually: there is no such file
                self._backend.open(folder, LOCK_NAME, direct=False).close()


def leave_channel(channel: Coordinator) -> None:
    """Leave a channel; processes that wait in it are notified, unless that takes too long."""

    def leave() -> None:
        with contextlib.suppress(CheckpointError):  # then they notice it by a timeout
            channel.leave()

    call_within(leave, LEAVING_S)


def _refuse_others(sent: Sequence[bytes]) -> bytes:
    first, *others = (msgspec.msgpack.decode(each, type=_JobSettings) for each in sent)
    for process, other in enumerate(others, 1):
        if other.path != first.path:
            raise OtherProcessError(
                f"process {process} saves to {os.fsdecode(other.path)}, but process 0 to {os.fsdecode(first.path)}: "
                "all processes of a job must have the same directory. If its name contains the time, make it in one "
                "process and pass it to the others; in a Hydra multirun, which names it by the overrides, give all "
                "processes the same overrides"
            )
        if other.decides != first.decides:
            raise OtherProcessError(
                f"process {process} decides what to save by {shown(other.decides)}, but process 0 by "
                f"{shown(first.decides)}: all processes of a job must have the same save policy"
            )
    return b""


def may_save(
    policy: SavePolicy, step: CheckpointInfo, context: DecisionContext, *, is_polled: bool, has_steps: bool
) -> bool:
    """Whether the primary has to be asked about a step; the same in all processes.

    Of `context`, only what is the same in all processes is used. `is_polled`: policies by time are asked now.
    `has_steps`: whether the run is known to have steps.
    """
    kind, parts = type(policy), _parts(policy)
    # The policies by time of an AllSavePolicy have to be asked about the steps that the others accept.
    if kind is AllSavePolicy and not all(
        may_save(each, step, context, is_polled=True, has_steps=has_steps) for each in parts
    ):
        return False
    if parts:
        return any(may_save(each, step, context, is_polled=is_polled, has_steps=has_steps) for each in parts)
    if kind in _BY_STEPS:
        return policy.should_save(step, (), context=context)
    if kind is InitialSavePolicy:
        return not has_steps
    return is_polled or kind not in _BY_TIME


def decided_locally(policy: SavePolicy | None) -> str:
    """Describe what each process decides on its own; equal policies have equal texts in all processes."""
    parts, name = _parts(policy), "no save policy" if policy is None else type(policy).__name__
    if parts:
        return f"{name}({', '.join(map(decided_locally, parts))})"
    return policy_name(policy) if type(policy) in _BY_STEPS else name


def _parts(policy: SavePolicy | None) -> Sequence[SavePolicy]:
    """The policies that a policy of this package is composed of. A subclass may decide otherwise."""
    if type(policy) is TemporarySavePolicy:
        return (policy.policy,)
    if type(policy) is AnySavePolicy or type(policy) is AllSavePolicy:
        return policy.policies
    return ()


def depends_on_step(policy: SavePolicy) -> bool:
    """Whether all processes can evaluate a policy on their own."""
    parts = _parts(policy)
    return all(map(depends_on_step, parts)) if parts else type(policy) in _BY_STEPS

"""Decisions to save in a job of many processes: all decide alike, and ask process 0 only where they have to.

What the processes of a job do together with one run directory: process 0 does it, and tells the others.

A run directory as the processes of a job know it that do not own it: by what process 0 tells them.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from jaxckpt_train.distributed.coordinator import Coordinator, PollSchedule
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, OtherProcessError, StorageError
from jaxckpt_train.pending import call_within
from jaxckpt_train.policies.context import (
    NOT_DUE,
    CheckpointInfo,
    Decision,
    DecisionContext,
    SavePolicy,
    policy_name,
    saves_temporarily,
)
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
    has_temporary,
)
from jaxckpt_train.run.catalog import step_not_found
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry, check_step, line_last, newest_generations
from jaxckpt_train.run.lock import LOCK_NAME, MAX_LOCK_BYTES
from jaxckpt_train.store.backends.base import GONE, Backend
from jaxckpt_train.store.files import read_or_none
from jaxckpt_train.store.threads import Latch

T = TypeVar("T")
MOST_SHOWN = 300  # characters of a policy, in a message
LEAVING_S = 2.0  # to tell the others; process 0, which takes it, may be stopped
# A network file system may say for up to a minute that a name is not there which another machine has made since.
SEEN_WITHIN_S, LOOK_S, QUIET_S = 90.0, 0.5, 5.0
_log = logging.getLogger("jaxckpt_train")
# They decide by the step, and by what all processes know. What is made of them may decide otherwise.
_BY_STEPS: frozenset[type] = frozenset({FixedIntervalPolicy, SpecificStepsPolicy, PreemptionCheckpointingPolicy})
# They become due in the course of time, so some steps later is as good.
_BY_TIME: frozenset[type] = frozenset(
    {EverySecondsPolicy, ContinuousCheckpointingPolicy, OverheadBudgetPolicy, YoungDalyPolicy}
)


class KnownRun(Protocol):
    """What a process may ask of a run without a word to the others."""

    def newest(self) -> list[Entry]:
        """The last generation of each step, in the order of the saves; what a roll-back has left behind first."""

    def damaged(self) -> list[Entry]:
        """What was set aside since it is damaged, in the order of the saves."""

    def is_committed(self, step: int) -> bool:
        """Whether the line that the run descends from has this step."""

    def candidates(self, step: int | None) -> list[Entry]:
        """The generations of a step, or of all, the newest first; StepNotFoundError: there is none."""


class News(msgspec.Struct, array_like=True):
    """What has changed in a run since process 0 has told of it last.

    Attributes:
        entries: that are new, or not as before.
        gone: names of those that are not there any more.
        left: names of those that a roll-back has left behind.
    """

    entries: tuple[Entry, ...]
    gone: tuple[str, ...]
    left: tuple[str, ...]


class Newsroom:
    """In process 0: what the others know of its run, and so what is news to them."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._told: dict[str, Entry] = {}

    def news(self) -> News:
        """What they do not know yet; they do once this was sent."""
        now = {entry.name: entry for entry in [*self._run.entries(), *self._run.damaged()]}
        changed = tuple(entry for name, entry in now.items() if self._told.get(name) != entry)
        gone = tuple(name for name in self._told if name not in now)
        self._told = now
        return News(changed, gone, tuple(sorted(self._run.left())))


class RunReplica:
    """What process 0 has told. As long as that is nothing, this looks at the disk as any reader does.

    Args:
        reader: of the same directory.
        directory: its path.
    """

    def __init__(self, reader: RunDirectory, directory: str) -> None:
        self._reader = reader
        self._entries: dict[str, Entry] | None = None
        self._left: frozenset[str] = frozenset()
        self._directory, self._guard = directory, threading.Lock()

    def hear(self, news: News) -> None:
        """Take note of what process 0 has told."""
        with self._guard:
            known = {} if self._entries is None else self._entries
            known = {name: entry for name, entry in known.items() if name not in news.gone}
            self._entries = known | {entry.name: entry for entry in news.entries}
            self._left = frozenset(news.left)

    def committed(self, entry: Entry, gone: Sequence[str]) -> None:
        """Take note of a save that was committed, of which no news have come yet, and of what nobody keeps since."""
        with self._guard:
            there = {name: each for name, each in (self._entries or {}).items() if name not in gone}
            self._entries = there | {entry.name: entry}
            self._left = frozenset(entry.left_behind) - {entry.name}

    def _known(self) -> list[Entry] | None:
        """All that are whole, in order."""
        with self._guard:
            if self._entries is None:
                return None
            return line_last([each for each in self._entries.values() if each.damaged is None], self._left)

    def newest(self) -> list[Entry]:
        """As `KnownRun` says."""
        known = self._known()
        return self._reader.newest() if known is None else newest_generations(known)

    def damaged(self) -> list[Entry]:
        """As `KnownRun` says."""
        with self._guard:
            entries = self._entries
        if entries is None:
            return self._reader.damaged()
        return sorted((each for each in entries.values() if each.damaged is not None), key=lambda each: each.order)

    def is_committed(self, step: int) -> bool:
        """As `KnownRun` says."""
        known = self._known()
        if known is None:
            return self._reader.is_committed(step)
        return any(entry.step == step and entry.name not in self._left for entry in known)

    def candidates(self, step: int | None) -> list[Entry]:
        """As `KnownRun` says."""
        known = self._known()
        if known is None:
            return self._reader.candidates(step)
        wanted = None if step is None else check_step(step)
        found = [entry for entry in reversed(known) if wanted in (None, entry.step)]
        if not found:
            raise step_not_found(self._directory, step, known)
        return found


class _Led(msgspec.Struct, array_like=True):
    result: Any
    news: News | None


class _Meant(msgspec.Struct, array_like=True):
    path: bytes
    decides: str


class JobSync:
    """One run of a job. All processes call the same, in the same order, each on the thread of its loop.

    Args:
        everyone: the processes; one alone agrees with itself.
        timeout_s: seconds without a sign of life after which a process is not waited for any more.
        run: the directory, as process 0 owns it, and the others read it.
        backend, directory: where that is.

    Attributes:
        is_alone: whether there is no other process.
        leads: whether this process does what is done with the directory.
        followed: what a process knows that does not lead.
        known: what may be asked of the run without a word to the others.
    """

    def __init__(
        self, everyone: Coordinator, timeout_s: float, run: RunDirectory, backend: Backend, directory: str
    ) -> None:
        self._everyone, self._timeout_s, self._order = everyone, timeout_s, list[Coordinator]()
        self._run, self._backend, self._directory = run, backend, directory
        self.leads, self.is_alone = everyone.process == 0, everyone.processes == 1
        self._newsroom, self.followed = Newsroom(run), RunReplica(run, directory)
        self.known: KnownRun = run if self.leads else self.followed
        self._is_taken, self._decides = False, ""

    @property
    def job(self) -> Coordinator:
        """The order of what all do here; begun by the first of it, as one process may make what the others do not."""
        if not self._order:
            self._order.append(self._everyone.within("run", self._timeout_s))
        return self._order[0]

    @property
    def processes(self) -> int:
        """How many there are."""
        return self._everyone.processes

    def decides(self, what: str) -> None:
        """Say what each process decides alone, before the directory is taken: it must be the same in all."""
        self._decides = what

    def leave(self) -> None:
        """This process does nothing more together with the others, which are told if they wait for it."""
        for order in self._order:
            leave_order(order)

    def led(self, doing: str, act: Callable[[], Any], moved: Callable[[], object] | None = None) -> Any:
        """What `act` gives in process 0, in all of them.

        Args:
            doing: what, for messages.
            act: called in process 0; gives plain data.
            moved: gives another value whenever that gets further; None: it is quick.

        Raises:
            What `act` raised, in process 0; the same class of error in the others.
        """
        if self.is_alone:
            return act()
        done: list[Any] = []

        def say() -> bytes:
            done.append(act())
            news = self._newsroom.news() if self._run.is_owner else None  # else each looks at the disk
            return msgspec.msgpack.encode(_Led(done[0], news))

        said = self.job.broadcast(doing, say, moved)
        if self.leads:
            return done[0]
        heard = msgspec.msgpack.decode(said, type=_Led)
        if heard.news is not None:
            self.followed.hear(heard.news)
        return heard.result

    def all_do(self, doing: str, act: Callable[[], T]) -> T:
        """Do something in every process.

        Raises:
            What `act` raised in one, in all of them; of several the first one's.
        """
        done: list[T] = []

        def give() -> bytes:
            done.append(act())
            return b""

        self.job.exchange(doing, give, moved=time.monotonic)
        return done[0]

    def own(self) -> None:
        """Have process 0 own the directory, once it is certain that all mean the same one, decide alike, and see it.

        Raises:
            OtherProcessError: they do not.
            What `RunDirectory.own` raises.
        """
        if self.is_alone:
            self._run.own()
            return
        if self._is_taken:
            self.led(f"taking {self._directory}", self._run.own, time.monotonic)
            return
        mine = msgspec.msgpack.encode(_Meant(os.fsencode(self._directory), self._decides))
        self.job.exchange(f"taking {self._directory}", lambda: mine, _refuse_others)
        lock = self.led(f"taking {self._directory}", self._take, time.monotonic)
        self.job.exchange(f"looking at {self._directory}", lambda: self._look_for(lock), moved=time.monotonic)
        self._is_taken = True

    def hold(self) -> None:
        """As `own`, but whoever has it already asks no disk, and no other process."""
        if self.is_alone:
            self._run.hold()
        elif not self._is_taken:
            self.own()
        elif self.leads:
            self._run.hold()

    def retain(self, *, is_durable: bool) -> None:
        """Have process 0 let go of what the policy does not keep; `is_durable`: whether the newest step surely is."""
        self.hold()
        let_go = functools.partial(self._run.retain, is_durable=is_durable)
        self.led(f"letting steps of {self._directory} go", let_go, time.monotonic)

    def _take(self) -> bytes:
        self._run.own()
        return self._lock_there() or b""

    def _lock_there(self) -> bytes | None:
        found = read_or_none(self._backend, self._directory, LOCK_NAME, MAX_LOCK_BYTES)
        return None if found is None else bytes(found)

    def _look_for(self, lock: bytes) -> bytes:
        """Raise OtherProcessError if this process does not see the lock of process 0: it has another disk."""
        waiting, began_s, is_quiet = Latch(), time.monotonic(), True
        while not self.leads and self._seen() != lock:
            waited_s = time.monotonic() - began_s
            if is_quiet and waited_s >= QUIET_S:
                is_quiet = False
                _log.warning(
                    "%s: process %d does not see the lock of process 0 yet; waiting up to %.0f s for the file system",
                    self._directory, self._everyone.process, SEEN_WITHIN_S,
                )  # fmt: skip
            if waited_s >= SEEN_WITHIN_S:
                raise OtherProcessError(
                    f"{self._directory}: process 0 owns this directory, but process {self._everyone.process} does not "
                    f"see its lock, {LOCK_NAME}: all processes of a job save to one directory, on storage that all of "
                    "them share; choose one that is not local to each machine"
                )
            waiting.wait(LOOK_S)
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
        """Open the directories above, the highest first: an NFS client asks its server then which names are new."""
        above, folder = list[str](), self._directory
        while (folder := os.path.dirname(folder)) not in above:
            above.append(folder)
        for folder in reversed(above):
            with contextlib.suppress(StorageError, CorruptCheckpointError):
                read_or_none(self._backend, folder, LOCK_NAME, MAX_LOCK_BYTES)


def leave_order(order: Coordinator) -> None:
    """Leave an order of calls; whoever waits in it is told, unless that takes long."""

    def leave() -> None:
        with contextlib.suppress(CheckpointError):  # then they find out by themselves
            order.leave()

    call_within(leave, LEAVING_S)


def _refuse_others(told: Sequence[bytes]) -> bytes:
    first, *others = (msgspec.msgpack.decode(each, type=_Meant) for each in told)
    for process, other in enumerate(others, 1):
        if other.path != first.path:
            raise OtherProcessError(
                f"process {process} saves to {os.fsdecode(other.path)}, but process 0 to {os.fsdecode(first.path)}: "
                "all processes of a job are given the same directory; one with the time in its name is made in one of "
                "them and told to the others, and in a Hydra multirun, which names it by the overrides, all are given "
                "the same ones"
            )
        if other.decides != first.decides:
            raise OtherProcessError(
                f"process {process} decides what to save by {_short(other.decides)}, but process 0 by "
                f"{_short(first.decides)}: all processes of a job are given the same save policy"
            )
    return b""


def _short(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class Outlook(enum.IntEnum):
    """What every process of a job knows of a decision by itself."""

    NO = 0
    SOME_TIME = 1  # process 0 is asked at the next tick
    NOW = 2  # process 0 must be asked about this very step
    YES = 3


class _Answer(msgspec.Struct, array_like=True):
    save: bool
    reason: str
    temporary: bool
    has_steps: bool
    is_over: bool  # whether the save before has ended, as all find out now
    next: int


class JobDecisions:
    """What a policy decides in a job. All processes ask about the same steps, in the same order.

    A policy by steps is decided by each process alone. One by time is asked in process 0, about once a second, which
    tells the others; every other policy, such as a user's, at every step, since nobody knows what it goes by.

    Args:
        together: the processes.
        policy: what decides.
    """

    def __init__(self, job_sync: JobSync, policy: SavePolicy) -> None:
        self._job_sync, self._policy = job_sync, policy
        self._poll_schedule = PollSchedule(job_sync.processes)
        self._has_steps = False

    def decide(
        self,
        step: CheckpointInfo,
        context: DecisionContext,
        ask: Callable[[], tuple[Decision, bool]],
        is_over: Callable[[], bool],
        settle: Callable[[], object],
    ) -> Decision:
        """Whether to save a step.

        Args:
            step: the step.
            context: everything else.
            ask: in process 0: what the policy decides, and whether there are steps already.
            is_over: in process 0: whether the save before has ended.
            settle: takes note of how it has ended; called in all processes at the same step.
        """
        found = outlook(self._policy, step, context, has_steps=self._has_steps)
        if found is Outlook.YES:
            known = _known_deciding(self._policy, step, context)
            return Decision(True, " and ".join(map(policy_name, known)), any(map(saves_temporarily, known)))
        if found is Outlook.NO or (found is Outlook.SOME_TIME and not self._poll_schedule.is_due()):
            return NOT_DUE

        def say() -> bytes:
            decision, has_steps = ask()
            following = self._poll_schedule.next() if found is Outlook.SOME_TIME else 0
            decided = (decision.save, decision.reason, decision.temporary)
            return msgspec.msgpack.encode(_Answer(*decided, has_steps, is_over(), following))

        said = self._job_sync.job.broadcast(f"deciding whether to save step {step.step}", say)
        answer = msgspec.msgpack.decode(said, type=_Answer)
        self._has_steps = self._has_steps or answer.has_steps or answer.save
        if found is Outlook.SOME_TIME:
            self._poll_schedule.set_next(answer.next)
        if answer.is_over:
            settle()
        return Decision(answer.save, answer.reason, answer.temporary)


def outlook(policy: SavePolicy, step: CheckpointInfo, context: DecisionContext, *, has_steps: bool) -> Outlook:
    """What is known of the decision about a step, the same in all processes.

    Args:
        policy: what decides.
        step: the step.
        context: of which only what all processes have alike is looked at.
        has_steps: whether it is known that the run has steps.
    """
    kind = type(policy)
    if kind in _BY_STEPS:
        return Outlook.YES if policy.should_save(step, (), context=context) else Outlook.NO
    if kind in _BY_TIME:
        return Outlook.SOME_TIME
    if kind is InitialSavePolicy:
        return Outlook.NO if has_steps else Outlook.NOW
    if kind is TemporarySavePolicy and isinstance(policy, TemporarySavePolicy):
        return outlook(policy.policy, step, context, has_steps=has_steps)
    if isinstance(policy, AnySavePolicy | AllSavePolicy) and kind in (AnySavePolicy, AllSavePolicy):
        found = [outlook(child, step, context, has_steps=has_steps) for child in policy.policies]
        return _of_any(policy.policies, found) if kind is AnySavePolicy else _of_all(found)
    return Outlook.NOW


def decided_locally(policy: SavePolicy | None) -> str:
    """What each process of a job decides without the others, as text: where that differs, they save other steps."""
    kind = type(policy)
    if policy is None:
        return "no save policy"
    if kind in _BY_STEPS:
        return policy_name(policy)
    if kind in _BY_TIME:
        return "a policy by time"
    if kind is InitialSavePolicy:
        return "InitialSavePolicy()"
    if kind is TemporarySavePolicy and isinstance(policy, TemporarySavePolicy):
        return f"TemporarySavePolicy({decided_locally(policy.policy)})"
    if isinstance(policy, AnySavePolicy | AllSavePolicy) and kind in (AnySavePolicy, AllSavePolicy):
        return f"{kind.__name__}({', '.join(map(decided_locally, policy.policies))})"
    return "a policy that process 0 is asked about at every step"


def _known_deciding(policy: SavePolicy, step: CheckpointInfo, context: DecisionContext) -> list[SavePolicy]:
    """Of a policy whose outlook is YES: what in it asks for the save by itself."""
    if not isinstance(policy, AnySavePolicy | AllSavePolicy):
        return [policy]
    sure = [each for each in policy.policies if outlook(each, step, context, has_steps=True) is Outlook.YES]
    if isinstance(policy, AnySavePolicy):  # the first that asks for a step that stays
        sure = sorted(sure, key=has_temporary)[:1]
    return [inner for each in sure for inner in _known_deciding(each, step, context)]


def _of_any(policies: Sequence[SavePolicy], found: Sequence[Outlook]) -> Outlook:
    """What saves for sure decides; where that saves a step that goes, the others are asked whether it is to stay."""
    if max(found) is not Outlook.YES:
        return max(found)
    each = list(zip(policies, found, strict=True))
    goes = all(has_temporary(policy) for policy, sure in each if sure is Outlook.YES)
    may_stay = any(maybe in (Outlook.SOME_TIME, Outlook.NOW) for policy, maybe in each if not saves_temporarily(policy))
    return Outlook.NOW if goes and may_stay else Outlook.YES


def _of_all(found: Sequence[Outlook]) -> Outlook:
    """Where some know it of this very step, the others are asked about this one, too."""
    if Outlook.NO in found or len(set(found)) == 1:
        return min(found)
    return Outlook.NOW

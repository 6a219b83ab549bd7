"""What the processes of a job do together with one run directory: process 0 does it, and tells the others."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, OtherProcessError, StorageError
from jaxckpt_train.jobs.coordinator import Coordinator
from jaxckpt_train.pending import call_within
from jaxckpt_train.steps.followed_run import FollowedRun, KnownRun, News, Newsroom
from jaxckpt_train.steps.lock import LOCK_NAME, MAX_LOCK_BYTES
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.store.backend import GONE, Backend
from jaxckpt_train.store.latch import Latch
from jaxckpt_train.store.plain_files import read_or_none

T = TypeVar("T")
MOST_SHOWN = 300  # characters of a policy, in a message
LEAVING_S = 2.0  # to tell the others; process 0, which takes it, may be stopped
# A network file system may say for up to a minute that a name is not there which another machine has made since.
SEEN_WITHIN_S, LOOK_S, QUIET_S = 90.0, 0.5, 5.0
_log = logging.getLogger("jaxckpt_train")


class _Led(msgspec.Struct, array_like=True):
    result: Any
    news: News | None


class _Meant(msgspec.Struct, array_like=True):
    path: bytes
    decides: str


class Together:
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
        self._newsroom, self.followed = Newsroom(run), FollowedRun(run, directory)
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

"""The owner's lock of a run directory: one job saves there, and a dead one is recognised.

No clock of another machine, or of the storage, decides: a live owner changes the modification time of its lock every
`HEARTBEAT_S`, and a process that wants the lock compares successive looks at it, for `SILENCE_S` of its own time.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, DirectoryLockedError, StorageError
from jaxckpt_train.store.backends.base import GONE, HALF_MADE, Backend
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.manifest import NOT_JSON
from jaxckpt_train.store.process_identity import MOST_PID, ProcessIdentity, is_dead, this_process
from jaxckpt_train.store.threads import Latch, free_in_child

LOCK_NAME = ".owner"
HEARTBEAT_S = 10.0
SILENCE_S = 60.0
LOOK_S = 0.5
MAX_LOCK_BYTES = 1 << 16
_DEAD = ".dead-"
_TRIES = 10
_ENDING_LOOK_S = 0.02
_ending: set[str] = set()  # tokens of locks of this process that are about to be released
_unreleased: set[str] = set()  # of those that the disk refused to release
_log = logging.getLogger("jaxckpt_train")
_UNKNOWN = ProcessIdentity(host="", pid=0, start="")  # of which only the heartbeat tells whether it lives


os.register_at_fork(after_in_child=_ending.clear)  # the threads that would release them are not in the child


class _Record(msgspec.Struct, frozen=True):
    process: ProcessIdentity
    token: Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z_-]{1,64}\Z")]  # becomes part of a name

    def __str__(self) -> str:
        if self.process == _UNKNOWN:
            return "a process that it does not tell (it is damaged)"
        return f"process {self.process.pid} on {self.process.host}"


class Owner(NamedTuple):
    """Who holds a lock, as text; whether it lives, as far as is known; and seconds since its last heartbeat.

    The seconds are by the clock of this machine, and so is what they say of an owner elsewhere: good enough to show.
    """

    name: str
    is_alive: bool
    silent_s: float


def try_to_write(backend: Backend, directory: str) -> None:
    """Do what taking a directory begins with: make it, and a file in it that goes at once.

    Raises:
        StorageError: the file system refused.
    """
    backend.make_directory(directory, parents=True, sync=True)
    probe = f"{directory}/{HALF_MADE[1]}{secrets.token_hex(8)}"
    backend.create(probe, direct=False).abandon()
    backend.remove(probe)


class OwnerLock:
    """Holds `<directory>/.owner` while a job saves there.

    An owner on this machine is known to be dead at once. One on another machine, or that cannot be seen from here, or
    whose lock is damaged or empty, is dead once its lock has not changed for `SILENCE_S`, for which `acquire` waits.

    Args:
        backend, directory: where the run is.
        beaten: called after each heartbeat, on its thread.

    Attributes:
        path: of the lock's file.
    """

    def __init__(self, backend: Backend, directory: str, beaten: Callable[[], None] = lambda: None) -> None:
        self._backend, self._directory, self._beaten = backend, directory, beaten
        self.path = f"{directory}/{LOCK_NAME}"
        self._record = _Record(this_process(), uuid.uuid4().hex)  # until it is acquired, by a forked child perhaps
        self._stop = Latch()
        self._tried = self._held = False
        self._left, self._left_seen_s = list[str](), 0.0  # what the dead left, and when that was seen
        self._guard = threading.RLock()
        free_in_child(self)
        self._beating: threading.Thread | None = None
        self._is_without_heartbeat = False

    def acquire(self) -> ProcessIdentity | None:
        """Become the owner.

        Returns:
            The dead owner whose lock was taken over, if there was one.

        Raises:
            DirectoryLockedError: a live process owns the directory, or took it over from this one.
        """
        with self._guard:
            if self._held:
                self.check()  # whoever could not go on then comes again: another may have taken over meanwhile
                return None
            if not self._tried:
                self._record = _Record(this_process(), self._record.token)
            self._look_for_left()  # now: a dead owner's lock may be one file with what it was made of
            self._tried = True  # from now on the file may be there, whatever interrupts this
            dead = self._acquire()
            self._keep_beating()
            self._held = True
        return dead

    @property
    def may_be_held(self) -> bool:
        """Whether there may be something to release."""
        return self._tried

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's lock, and holds nothing."""
        mine, here = self._record.process, this_process()
        return self._tried and (mine.pid, mine.nonce) != (here.pid, here.nonce)

    def _keep_beating(self) -> None:
        """Have a thread for the heartbeat; where the system has none for it now, beat once until the next look."""
        if self._beating is not None and self._beating.is_alive():
            return
        thread = threading.Thread(target=self._beat, name="jaxckpt-heartbeat", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._is_without_heartbeat:  # once: each look tries again
                _log.warning("%s: no heartbeat for now: %s", self.path, error)
            self._is_without_heartbeat = True
            self._backend.touch(self.path)
        else:
            self._beating = thread

    def check(self) -> None:
        """Raise DirectoryLockedError if the lock that this process holds is not its own any more.

        After `SILENCE_S` without a heartbeat (a machine that slept, storage that did not answer) another may have it.
        """
        self.refuse_child()
        other = self._read()
        if other is None:  # out of sight for a moment, as on a network file system?
            self._stop.wait(LOOK_S)
            other = self._read()
        if other is not None and other.token == self._record.token:
            self._keep_beating()
            return
        if other is None and self._is_directory_gone():
            raise DirectoryLockedError(
                f"{self._directory}: is not there any more; was it removed or moved under this job? Nothing more is "
                "saved by it. Move it back, or start the job again where its steps are"
            )
        found = "is gone" if other is None else f"is held by {other}"
        raise DirectoryLockedError(
            f"{self._directory}: this job owned it, and its lock {found}: it was taken for dead (was this machine "
            "asleep, or the storage away, for a minute?). Nothing more is saved by it, since another may have gone "
            "on from its last step; start it again to go on from what is there now"
        )

    def is_own(self) -> bool:
        """Whether it is still held, as far as the disk tells."""
        try:
            found = self._read()
        except StorageError:
            return False
        return found is not None and found.token == self._record.token

    def is_anybodys(self) -> bool:
        """Whether anybody who lives, as far as is known, holds the lock; asks the disk, and waits for nobody."""
        try:
            found = self._read()
            return found is not None and self._shown(found).is_alive
        except StorageError:
            return False

    def owner(self, *, watches: bool = False) -> Owner | None:
        """Who holds the lock.

        Args:
            watches: whether to wait for a heartbeat of an owner that cannot be asked, up to `SILENCE_S`.

        Raises:
            StorageError: the disk refused to say.
        """
        while (found := self._read()) is not None:
            shown = self._shown(found)
            if not watches or is_dead(found.process) is not None:
                return shown
            seen = self._sign()
            if seen is not None and seen[0] == found.token:
                return shown._replace(is_alive=not self._stays(seen))
        return None

    def _shown(self, found: _Record) -> Owner:
        """To look at, not to decide by: it compares the clock of this machine with that of the lock."""
        sign, dead = self._sign(), is_dead(found.process)
        if sign is None:  # it has gone since
            return Owner(str(found), False, 0.0)
        silent_s = time.time() - sign[1] / 1e9
        return Owner(str(found), not dead and (dead is False or silent_s <= SILENCE_S), silent_s)

    def _is_directory_gone(self) -> bool:
        try:
            self._backend.list(self._directory)
        except StorageError as error:
            return error.errno in GONE
        return False

    def refuse_child(self) -> None:
        """Raise DirectoryLockedError in a forked child, which has no lock: its parent goes on."""
        if self.is_inherited:
            raise DirectoryLockedError(
                f"{self._directory}: owned by process {self._record.process.pid}, of which this is a forked child. Two "
                "processes cannot save to one directory: save in the parent, or to another directory"
            )

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S) and self._beat_once():
            pass

    def _beat_once(self) -> bool:
        """Tell that the owner lives; False once the lock is another's, whose death must not be hidden."""
        try:
            other = self._read()
            if other is not None and other.token != self._record.token and other.process != _UNKNOWN:
                _log.error("%s: the lock of this job was taken over; its next save will be refused", self._directory)
                return False
            self._backend.touch(self.path)
        except StorageError as error:
            _log.warning("%s: heartbeat failed: %s", self.path, error)
        else:
            self.clean()
            self._beaten()
        return True

    def _acquire(self) -> ProcessIdentity | None:
        dead, collected = None, False
        for _ in range(_TRIES):
            if self._backend.write_new(self.path, msgspec.json.encode(self._record)):
                return dead
            other = self._read()
            if other is None:
                continue
            if other.token == self._record.token:
                return dead  # an interrupt came when it had just been taken
            if other.process == self._record.process and not collected:
                gc.collect()  # a manager that was dropped without close() lets go when it is freed
                collected = True
                continue
            if self._was_ending(other):
                continue
            aside = self._name_of_dead(other)
            if aside is None:
                continue
            if other.token in _unreleased:
                self._remove_dead(other, aside)
                continue
            if self._is_alive(other):
                continue  # it has changed: another has it now, or it is whole now
            if self._remove_dead(other, aside):
                dead = other.process
                _log.warning("%s: took over from %s, which is dead", self._directory, other)
        raise CheckpointError(f"{self.path}: other processes keep taking this lock; is the job started many times?")

    def _was_ending(self, other: _Record) -> bool:
        """Wait for a lock of this process that is released as soon as deletions are done; not for ever."""
        until = time.monotonic() + SILENCE_S
        is_ending = other.token in _ending
        while other.token in _ending and time.monotonic() < until:
            self._stop.wait(_ENDING_LOOK_S)
        return is_ending and other.token not in _ending

    def end(self) -> None:
        """Say that it is about to be released: whoever wants it in this process waits for that."""
        if self._tried:
            _ending.add(self._record.token)

    def _read(self, name: str = LOCK_NAME) -> _Record | None:
        """Who holds the lock, or held the one that has this name now; None if nobody does any more."""
        try:
            data = read_whole(self._backend, self._directory, name, limit=MAX_LOCK_BYTES).tobytes()
            found = msgspec.json.decode(data, type=_Record)
            return found if 0 < found.process.pid < MOST_PID else _Record(_UNKNOWN, f"damaged-{found.token[:32]}")
        except StorageError as error:
            if error.errno in GONE:
                return None
            raise
        except (CorruptCheckpointError, *NOT_JSON) as error:  # too large, or no lock of ours
            told = data if isinstance(error, NOT_JSON) else str(error).partition(name)[2].encode()
            return _Record(_UNKNOWN, f"damaged-{hashlib.sha256(told).hexdigest()[:32]}")

    def _is_alive(self, other: _Record) -> bool:
        """Whether an owner may be alive whose lock has changed since: look again. One that surely is, is refused.

        Raises:
            DirectoryLockedError: it lives.
        """
        dead, seen = is_dead(other.process), self._sign()
        if dead:
            return False
        if seen is None or seen[0] != other.token:
            return True
        if dead is None:
            _log.warning(
                "%s: owned by %s, which cannot be seen from here; waiting up to %.0f s for a sign of life",
                self._directory, other, SILENCE_S,
            )  # fmt: skip
            if self._stays(seen):
                return False
            now = self._sign()
            if now is None or now[0] != other.token:
                return True
        is_own = other.process == this_process()
        who = "this very process (call close() of the manager or callback that has it)" if is_own else str(other)
        raise DirectoryLockedError(
            f"{self._directory}: owned by {who}, which is alive. Two jobs cannot save to "
            "one directory: stop the other one, close its manager, or choose another directory; if both are processes "
            "of one job, join them by jax.distributed.initialize first; if this is a copy of "
            f"its directory, in which nobody saves, remove {self.path}"
        )

    def _sign(self) -> tuple[str, int] | None:
        """What a heartbeat of the owner changes, as it is now; None: the lock is gone."""
        try:
            modified_ns, found = self._backend.modified_ns(self.path), self._read()
        except StorageError as error:
            if error.errno in GONE:
                return None
            raise
        return None if found is None else (found.token, modified_ns)

    def _stays(self, seen: tuple[str, int]) -> bool:
        """Watch the lock; whether it stays as it was seen for `SILENCE_S` of this process's own time.

        What a single look takes counts for little: where the storage does not answer, or this machine sleeps, the owner
        may not have been able to beat either.
        """
        silent_s, looked_s = 0.0, time.monotonic()
        while silent_s < SILENCE_S:
            self._stop.wait(LOOK_S)
            if self._sign() != seen:
                return False
            now_s = time.monotonic()
            silent_s, looked_s = silent_s + min(now_s - looked_s, HEARTBEAT_S), now_s
        return True

    def _name_of_dead(self, other: _Record) -> str | None:
        """The path that its lock gets if it is dead; None: it was taken out of the way meanwhile.

        A damaged lock may be like one of before, whose name is taken: it gets another one. That it is not that very
        one, which somebody was quicker to take, the second look tells: it comes after the look at the names.
        """
        name = f"{LOCK_NAME}{_DEAD}{other.token}"
        if other.process == _UNKNOWN:
            taken = {entry.name for entry in self._backend.list(self._directory)}
            others = (f"{name}-{number}" for number in itertools.count(1))
            name = next(each for each in itertools.chain([name], others) if each not in taken)
            if self._read() != other:
                return None
        return f"{self._directory}/{name}"

    def _remove_dead(self, other: _Record, aside: str) -> bool:
        """Take a dead owner's lock out of the way; of several that try, one succeeds.

        The name it gets is that of the dead, and stays taken for a while: whoever comes late, with the dead owner
        still in mind, fails to rename and so cannot take away the lock of who was quicker.
        """
        try:
            self._backend.rename(self.path, aside)
        except StorageError:
            return False  # somebody else was quicker
        taken = self._read(aside.rpartition("/")[2])
        if taken is None:
            return False
        if taken.token != other.token:
            self._backend.rename(aside, self.path)  # it was a new, live owner's: put it back
            return False
        self._backend.touch(aside)
        return True

    def _look_for_left(self) -> None:
        """Take note of the locks of dead owners, and of what crashes left of new ones, or what others make just now."""
        left = (f"{LOCK_NAME}{_DEAD}", *HALF_MADE)
        try:
            names = [entry.name for entry in self._backend.list(self._directory) if entry.kind == "file"]
        except StorageError as error:
            self._tell_what_stays(error)
            names = []
        self._left = [f"{self._directory}/{name}" for name in names if name.startswith(left)]
        self._left_seen_s = time.monotonic()

    def clean(self) -> None:
        """Remove what dead owners left, as an owner, once it was seen long enough ago. What stays does no harm."""
        if not self._left or time.monotonic() - self._left_seen_s < SILENCE_S:
            return
        left, self._left = self._left, []
        try:
            for path in left:
                self._backend.remove(path)
        except StorageError as error:
            self._tell_what_stays(error)

    def _tell_what_stays(self, error: StorageError) -> None:
        _log.warning("%s: what dead owners left was not removed: %s", self._directory, error)

    def release(self) -> None:
        """Give the directory free, if this lock holds it."""
        with self._guard:
            if self._tried and not self.is_inherited:
                self._release()

    def _release(self) -> None:
        self._held = False
        self._stop.open()
        try:
            self._remove_own()
            self._tried = False  # last: an interrupt before leaves it to the next release
        except StorageError:
            _unreleased.add(self._record.token)
            raise
        finally:
            _ending.discard(self._record.token)

    def _remove_own(self) -> None:
        self.clean()
        other = self._read()  # last: a disk that does not answer for a while may have let another take over
        if other is not None and other.token == self._record.token:
            self._backend.remove(self.path)

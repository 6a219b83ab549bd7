"""The owner's lock of a run directory: one job saves there, and the lock of a dead owner is taken over.

The lock is a record that is changed by compare-and-swap, so of several processes that see the same dead owner, one
takes over. It stays when it is released, unless the disk is full: a late process must never take a new lock for the
one that it has seen.

No decision compares clocks of different machines. A live owner refreshes its lock every `HEARTBEAT_S` seconds. A
process that wants the lock watches it for `SILENCE_S` seconds of its own time.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import logging
import os
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import CheckpointError, DirectoryLockedError, StorageError
from jaxckpt_train.store.backends.base import TEMPORARY_PREFIXES, Backend, StoredRecord
from jaxckpt_train.store.manifest import NOT_JSON
from jaxckpt_train.store.process_identity import PID_LIMIT, ProcessIdentity, is_dead, this_process
from jaxckpt_train.store.threads import Latch, free_in_child

LOCK_NAME = ".lock"
_FORMER_NAME = ".owner"  # a file, with which earlier versions locked a directory
HEARTBEAT_S = 10.0
SILENCE_S = 60.0
POLL_S = 0.5
_TRIES = 10
_ENDING_LOOK_S = 0.02
_ending: set[str] = set()  # tokens of this process's locks that are about to be released
_unreleased: set[str] = set()  # tokens of this process's locks that the disk refused to release
_log = logging.getLogger("jaxckpt_train")
_UNKNOWN = ProcessIdentity(host="", pid=0, start="")  # only the heartbeat shows whether it is alive


os.register_at_fork(after_in_child=_ending.clear)  # the threads that would release them are not in the child


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    process: ProcessIdentity
    token: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # of one lock object: no other lock has it
    is_released: bool = False

    def __str__(self) -> str:
        if self.process == _UNKNOWN:
            return "an unknown process (its lock is damaged)"
        return f"process {self.process.pid} on {self.process.host}"


class _Seen(NamedTuple):
    """The lock at one look. It has changed if a later look differs in anything."""

    owner: _Record | None  # None: nobody holds it
    version: int | None  # None: there has been no lock yet
    refreshed_ns: int

    def has_token(self, token: str) -> bool:
        """Whether the lock with this token holds the directory."""
        return self.owner is not None and self.owner.token == token


class Owner(NamedTuple):
    """The owner of a lock, for display."""

    name: str
    is_alive: bool  # as far as is known
    silent_s: float  # since its last heartbeat; approximate: it compares the clocks of two machines


def try_to_write(backend: Backend, directory: str) -> None:
    """Check that the directory is writable: create it, then create and remove a file in it."""
    backend.make_directory(directory, parents=True, sync=True)
    probe = f"{directory}/{TEMPORARY_PREFIXES[1]}{secrets.token_hex(8)}"
    backend.create(probe, direct=False).abandon()
    backend.remove(probe)


class OwnerLock:
    """Holds the record `<directory>/.lock` while a job saves there; `beaten` is called after each heartbeat.

    The death of an owner on this machine is detected at once. An owner on another machine, in another PID namespace, or
    with a damaged lock counts as dead when its lock has not changed for `SILENCE_S`; `acquire` waits for that.
    """

    def __init__(self, backend: Backend, directory: str, beaten: Callable[[], None] | None = None) -> None:
        self._backend, self._directory, self._beaten = backend, directory, beaten
        self.path = f"{directory}/{LOCK_NAME}"
        self._record = _Record(this_process(), uuid.uuid4().hex)  # renewed on acquire: that may be in a forked child
        self._version = 0  # of the record, while this lock holds the directory
        self._stop = Latch()
        self._tried = self._held = False
        self._left, self._left_seen_s = list[str](), 0.0  # files of dead processes, and when they were seen
        self._guard = threading.RLock()
        free_in_child(self)
        self._beating: threading.Thread | None = None
        self._is_without_heartbeat = False

    def acquire(self) -> ProcessIdentity | None:
        """Become the owner; return the dead owner whose lock was taken over, if there was one.

        Raises DirectoryLockedError if a live process owns the directory, or took it over from this one.
        """
        with self._guard:
            if self._held:
                self.check()  # after an interrupted attempt, another process may have taken over
                return None
            if not self._tried:
                self._record = _Record(this_process(), self._record.token)
            self._find_leftovers()
            self._tried = True  # from now on this lock may hold the directory, even after an interrupt
            dead = self._acquire()
            self._keep_beating()
            self._held = True
        return dead

    @property
    def may_be_held(self) -> bool:
        """Whether there may be a lock to release."""
        return self._tried

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's lock. It holds nothing."""
        mine, here = self._record.process, this_process()
        return self._tried and (mine.pid, mine.nonce) != (here.pid, here.nonce)

    def _keep_beating(self) -> None:
        """Start the heartbeat thread. If the system cannot start one, beat once; the next check tries again."""
        if self._beating is not None and self._beating.is_alive():
            return
        thread = threading.Thread(target=self._beat, name="jaxckpt-heartbeat", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._is_without_heartbeat:  # warn once
                _log.warning(
                    "%s: cannot start the thread of the heartbeat, so only saves refresh the lock: %s", self.path, error
                )
            self._is_without_heartbeat = True
            self._backend.refresh_record(self.path, self._version)
        else:
            self._beating = thread

    def check(self) -> None:
        """Raise DirectoryLockedError if this process no longer holds the lock.

        After `SILENCE_S` without a heartbeat, because the machine slept or the storage did not answer, another process
        may have taken it over.
        """
        self.refuse_child()
        seen = self._look()
        if seen.owner is None:  # a network file system may hide it for a moment
            self._stop.wait(POLL_S)
            seen = self._look()
        if seen.has_token(self._record.token):
            self._keep_beating()
            return
        found = "is gone" if seen.owner is None else f"is held by {seen.owner}"
        raise DirectoryLockedError(
            f"{self._directory}: this job owned it, but its lock {found}: the directory was removed or moved, or the "
            "job was considered dead (was this machine asleep, or the storage unreachable, for a minute?). This job "
            "saves nothing more, because another one may have continued from its last step: start it again to continue "
            "from the current state"
        )

    def is_own(self) -> bool:
        """Whether this process still holds the lock, as far as the disk shows."""
        try:
            return self._look().has_token(self._record.token)
        except CheckpointError:  # also if the settings of an object store no longer fit
            return False

    def has_live_owner(self) -> bool:
        """Whether any live process holds the lock, as far as is known. Reads the disk and does not wait."""
        try:
            owner = self.owner()
        except StorageError:
            return False
        return owner is not None and owner.is_alive

    def owner(self, *, watches: bool = False) -> Owner | None:
        """Return the current owner; None: nobody holds the lock.

        `watches`: wait up to `SILENCE_S` for a heartbeat if the owner's death cannot be detected otherwise.
        """
        seen = self._look()
        while (owner := seen.owner) is not None:
            dead, silent_s = is_dead(owner.process), time.time() - seen.refreshed_ns / 1e9
            if dead is not None or not watches:
                # The silence is for display only: it compares the clocks of two machines.
                return Owner(str(owner), not dead and (dead is False or silent_s <= SILENCE_S), silent_s)
            if self._stays(seen):
                return Owner(str(owner), False, silent_s)
            seen = self._look()
            if seen.has_token(owner.token):
                return Owner(str(owner), True, silent_s)
        return None

    def refuse_child(self) -> None:
        """Raise DirectoryLockedError in a forked child, which does not own the lock of its parent."""
        if self.is_inherited:
            raise DirectoryLockedError(
                f"{self._directory}: owned by process {self._record.process.pid}, and this is a forked child of it. "
                "Two processes cannot save to one directory: save in the parent, or to another directory"
            )

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S) and self._beat_once():
            pass

    def _beat_once(self) -> bool:
        """Refresh the lock; False if another process took it over, whose death must not be hidden."""
        try:
            seen = self._look()
            other = seen.owner
            if other is not None and other.token != self._record.token and other.process != _UNKNOWN:
                _log.error("%s: the lock of this job was taken over; its next save will be refused", self._directory)
                return False
            if other is None and (seen.version or 0) > self._version:
                return False  # released by this process, or by another that had taken it over
            self._backend.refresh_record(self.path, self._version)
        except StorageError as error:
            _log.warning("%s: heartbeat failed: %s", self.path, error)
        else:
            self.clean()
            if self._beaten is not None:
                self._beaten()
        return True

    def _acquire(self) -> ProcessIdentity | None:
        collected = False
        for _ in range(_TRIES):
            seen = self._look()
            other = seen.owner
            if seen.version is not None and seen.has_token(self._record.token):
                self._version = seen.version  # an interrupt came right after the lock was taken
                return None
            if other is not None and other.process == self._record.process and not collected:
                gc.collect()  # releases the lock of a manager that was dropped without close()
                collected = True
                continue
            if other is not None and self._was_ending(other):
                continue
            is_free = other is None or other.token in _unreleased
            if not is_free and self._is_alive(seen):
                continue  # the lock has changed: read it again
            version = self._backend.swap_record(self.path, msgspec.json.encode(self._record), seen.version)
            if version is None:
                continue  # another process was faster
            self._version = version
            if is_free or other is None:
                return None
            _log.warning("%s: took over from %s, which is dead", self._directory, other)
            return other.process
        raise CheckpointError(f"{self.path}: other processes keep taking this lock; was the job started several times?")

    def _was_ending(self, other: _Record) -> bool:
        """Wait, at most `SILENCE_S`, for a lock of this process that is released once its deletions are finished."""
        until = time.monotonic() + SILENCE_S
        is_ending = other.token in _ending
        while other.token in _ending and time.monotonic() < until:
            self._stop.wait(_ENDING_LOOK_S)
        return is_ending and other.token not in _ending

    def end(self) -> None:
        """Announce that the lock is about to be released; other managers in this process wait for that."""
        if self._tried:
            _ending.add(self._record.token)

    def _look(self) -> _Seen:
        found = self._backend.read_record(self.path)
        if found is None:
            return _Seen(None, None, 0)
        if found.refreshed_ns is None:  # it is not known whether the owner beats
            raise StorageError(errno.EIO, f"cannot read the lock: {found.problem}", self.path)
        owner = _decode(found)
        return _Seen(None if owner.is_released else owner, found.version, found.refreshed_ns)

    def _is_alive(self, seen: _Seen) -> bool:
        """Whether the lock has changed and must be read again; False: its owner is dead. Raises if it is alive."""
        assert seen.owner is not None
        dead = is_dead(seen.owner.process)
        if dead:
            return False
        if dead is None:
            _log.warning(
                "%s: owned by %s, which cannot be seen from here; waiting up to %.0f s for a heartbeat",
                self._directory, seen.owner, SILENCE_S,
            )  # fmt: skip
            if self._stays(seen):
                return False
        if not self._look().has_token(seen.owner.token):  # released or taken over meanwhile
            return True
        is_own = seen.owner.process == this_process()
        close = "call close() of the manager or callback that has it, or restart the kernel of a notebook"
        who = f"this process ({close})" if is_own else str(seen.owner)
        raise DirectoryLockedError(
            f"{self._directory}: owned by {who}, which is alive. Two jobs cannot save to one directory: stop the other "
            "one, close its manager, or choose another directory. If both are processes of one job, call "
            "jax.distributed.initialize first. If this is a copy of its directory that no job uses, remove "
            f"{self.path}{'.json' if is_url(self._directory) else ''}"
        )

    def _stays(self, seen: _Seen) -> bool:
        """Watch the lock; True if it does not change for `SILENCE_S` of this process's own time.

        A single look counts for at most one heartbeat interval: if it takes longer, because the storage does not answer
        or this machine sleeps, the owner may have been unable to beat, too.
        """
        silent_s, looked_s = 0.0, time.monotonic()
        while silent_s < SILENCE_S:
            self._stop.wait(POLL_S)
            if self._look() != seen:
                return False
            now_s = time.monotonic()
            silent_s, looked_s = silent_s + min(now_s - looked_s, HEARTBEAT_S), now_s
        return True

    def _find_leftovers(self) -> None:
        """Collect the files that crashes left, which may also include files that others create now."""
        if is_url(self._directory):  # where none are left
            return
        left = (f"{_FORMER_NAME}.dead-", *TEMPORARY_PREFIXES)
        names = [entry.name for entry in self._backend.list(self._directory) if entry.kind == "file"]
        self._left = [f"{self._directory}/{name}" for name in names if name == _FORMER_NAME or name.startswith(left)]
        self._left_seen_s = time.monotonic()

    def clean(self) -> None:
        """As the owner, remove what dead processes left, once it is old enough. Leftover files do no harm."""
        if not self._left or time.monotonic() - self._left_seen_s < SILENCE_S:
            return
        left, self._left = self._left, []
        try:
            for path in left:
                self._backend.remove(path)
        except StorageError as error:
            _log.warning("%s: the files of dead processes were not removed: %s", self._directory, error)

    def release(self) -> None:
        """Release the directory, if this lock holds it."""
        with self._guard:
            if self._tried and not self.is_inherited:
                self._release()

    def _release(self) -> None:
        self._held = False
        self._stop.open()
        try:
            self.clean()
            for _ in range(_TRIES):
                seen = self._look()  # last: if the disk did not answer for a while, another process may have taken over
                if not seen.has_token(self._record.token) or self._give_up(seen):
                    break  # else the last heartbeat has refreshed it in between
            self._tried = False  # last: after an interrupt, the next call releases the lock
        except CheckpointError:
            _unreleased.add(self._record.token)
            raise
        finally:
            _ending.discard(self._record.token)

    def _give_up(self, seen: _Seen) -> bool:
        """Mark the lock as released; False: it has changed since this look."""
        released = msgspec.structs.replace(self._record, is_released=True)
        try:
            return self._backend.swap_record(self.path, msgspec.json.encode(released), seen.version) is not None
        except StorageError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.is_own():
                raise
            self._backend.remove(self.path)  # a full disk must not lock the run while this process lives
            return True


def _decode(found: StoredRecord) -> _Record:
    """The content of a lock. A damaged one has a token that stays the same while its content does."""
    content = found.data if found.problem is None else found.problem.encode()
    try:
        record = msgspec.json.decode(found.data, type=_Record)
        if 0 < record.process.pid < PID_LIMIT:
            return record
    except NOT_JSON:
        pass  # not a lock
    return _Record(_UNKNOWN, f"damaged-{hashlib.sha256(content).hexdigest()[:32]}")

"""The scrubber: reads committed steps again in the background, at a byte rate, and has damaged ones set aside."""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from jaxckpt_train.errors import CheckpointError, NotACheckpointError
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.committed import is_gone
from jaxckpt_train.store.threads import Latch
from jaxckpt_train.store.verify import first_damage

IDLE_S = 1.0
JOIN_S = 5.0
LEAST_READ = 1 << 16  # counted for each look at a step, however little was read
NEIGHBOURS_BYTES_PER_S = 64 << 20  # where no rate is set: a fraction of what a disk for checkpoints gives
_log = logging.getLogger("jaxckpt_train")
_Identity = tuple[str, datetime.datetime]


class Run(Protocol):
    """What a scrubber asks of a run directory."""

    is_owner: bool

    def entries(self) -> list[Entry]:
        """The committed generations of all steps that are not set aside, in order."""

    def set_aside(self, entry: Entry, problem: str) -> None:
        """A step is proven to be damaged, and another one is whole."""


class _SetAside(NamedTuple):
    """A step that was set aside, and the saves that were compared when that was found."""

    entry: Entry
    compared: Collection[_Identity]


class _EndedError(Exception):
    """The scrubber is asked to end."""


class Scrubber:
    """Verifies one step after the other, and all of them again and again; neighbours of a damaged one first.

    What is found is read twice, and set aside only once another step was found to be whole after that. A run in which
    none is whole stays as it is. Retention is not held up: a step that goes while it is read is not damaged.

    Args:
        backend: where.
        directory: of the run.
        bytes_per_s: how much it reads at most; 0: only the neighbours of damaged steps, once, on a thread that ends
            then, `NEIGHBOURS_BYTES_PER_S` at most.
        run: a weak reference to the run directory, which this must not keep alive.
    """

    def __init__(self, backend: Backend, directory: str, bytes_per_s: int, run: Callable[[], Run | None]) -> None:
        self._backend, self._directory, self._run = backend, directory, run
        self._reads_all, self._rate = bytes_per_s > 0, bytes_per_s or NEIGHBOURS_BYTES_PER_S
        self._stop = Latch()
        self._guard = threading.Lock()  # of the next three
        self._is_on = self._works = False
        self._set_aside: list[_SetAside] = []
        self._thread: threading.Thread | None = None
        self._verified: dict[str, None] = {}  # names, the latest last
        self._suspects: list[str] = []
        self._damaged: dict[str, tuple[Entry, str]] = {}  # what is wrong with each, until another is found to be whole
        self._found: set[_Identity] = set()  # whose neighbours are suspects by that
        self._warned: set[tuple[str, str]] = set()
        self._due_s = 0.0

    def start(self) -> None:
        """Begin, now that the run has its owner."""
        with self._guard:
            self._is_on = True
            self._ensure_thread()

    def look_around(self, damaged: Sequence[Entry], compared: Collection[_Identity]) -> None:
        """Verify the neighbours of steps that were set aside next, but none that whoever found it has `compared`."""
        new = [_SetAside(entry, compared) for entry in damaged if entry.identity not in self._found]
        with self._guard:
            self._set_aside += new
            self._ensure_thread()

    def _ensure_thread(self) -> None:
        """Have a thread if there is something to do; where the system has none for it now, that is not done."""
        if self._works or not self._is_on or not (self._reads_all or self._set_aside) or self._stop.is_open():
            return
        thread = threading.Thread(target=self._work, name="jaxckpt-scrub", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("%s: steps are not verified in the background: %s", self._directory, error)
        else:
            self._thread, self._works = thread, True

    def end(self) -> None:
        """Ask it to end."""
        self._stop.open()

    def join(self) -> None:
        """Wait until it has, as long as its disk answers; not on its own thread."""
        self.end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)  # after that it only reads: the run takes no verdict that is not the owner's

    def _work(self) -> None:
        self._due_s = time.monotonic()
        try:
            with contextlib.suppress(_EndedError, CheckpointError):  # of who looks at the disk, being the owner no more
                while self._verify_next():
                    pass
        finally:
            with self._guard:
                self._works = self._works and self._thread is not threading.current_thread()

    def _verify_next(self) -> bool:
        """Verify one step; False once there is none, or the run directory is gone."""
        run = self._run()
        if run is None or not run.is_owner:
            return False
        entries = run.entries()
        del run  # a manager that was dropped must not be kept by a slow reading
        entry = self._next(entries)
        if entry is not None:
            self._look_at(entry, entries)
        elif self._reads_all:
            self._wait(IDLE_S)
        else:
            return not self._is_done()
        return True

    def _is_done(self) -> bool:
        with self._guard:
            self._works = bool(self._set_aside)
            return not self._works

    def _look_at(self, entry: Entry, entries: Sequence[Entry]) -> None:
        self._verified.pop(entry.name, None)
        try:
            problem = self._damage(entry) and self._damage(entry)  # a bit may have flipped on its way
            if problem is None or not is_gone(self._backend, f"{self._directory}/{entry.name}"):
                self._judge(entry, problem, entries)
        except _EndedError:
            raise
        except NotACheckpointError:
            pass  # it is gone: a step whose COMMIT is missing is found by the next restore
        except Exception as error:  # noqa: BLE001  # a thread's edge: one bad moment must not end it for good
            self._warn(entry, error)
        self._verified[entry.name] = None

    def _warn(self, entry: Entry, error: Exception) -> None:
        """Once for each step and kind of error, not at every look."""
        kind = (entry.name, type(error).__name__)
        if kind not in self._warned:
            self._warned.add(kind)
            trace = None if isinstance(error, CheckpointError) else error
            _log.warning("step %d was not verified: %s", entry.step, error, exc_info=trace)

    def _damage(self, entry: Entry) -> str | None:
        self._pace(LEAST_READ)
        return first_damage(self._backend, f"{self._directory}/{entry.name}", self._pace)

    def _judge(self, entry: Entry, problem: str | None, entries: Sequence[Entry]) -> None:
        if problem is not None:
            if entry.name not in self._damaged:
                _log.error("step %d is damaged: %s", entry.step, problem)
            self._damaged[entry.name] = (entry, problem)
            self._found.add(entry.identity)
            self._suspect(_neighbours(entry, entries))
            return
        self._damaged.pop(entry.name, None)
        run = self._run()
        while run is not None and self._damaged:
            run.set_aside(*self._damaged.pop(next(iter(self._damaged))))

    def _suspect(self, entries: Sequence[Entry]) -> None:
        self._suspects += [entry.name for entry in entries if entry.name not in self._suspects]

    def _next(self, entries: Sequence[Entry]) -> Entry | None:
        """A neighbour of a damaged step, else, if all are read, the one never verified or verified the longest ago."""
        with self._guard:
            set_aside, self._set_aside = self._set_aside, []
        for found, compared in set_aside:
            self._suspect([each for each in _neighbours(found, entries) if each.identity not in compared])
        by_name = {entry.name: entry for entry in entries}
        self._verified = {name: None for name in self._verified if name in by_name}
        self._warned = {kind for kind in self._warned if kind[0] in by_name}
        there = {entry.identity for entry in entries}
        self._damaged = {name: found for name, found in self._damaged.items() if found[0].identity in there}
        while self._suspects:
            suspect = by_name.get(self._suspects.pop(0))
            if suspect is not None and suspect.name not in self._damaged:
                return suspect
        if not self._reads_all:
            return None
        for entry in reversed(entries):  # the newest
            if entry.name not in self._verified:
                return entry
        return by_name[next(iter(self._verified))] if self._verified else None

    def _pace(self, nbytes: int) -> None:
        """Wait until so many bytes more may be read."""
        now = time.monotonic()
        self._due_s = max(self._due_s, now - IDLE_S) + nbytes / self._rate
        self._wait(self._due_s - now)

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(max(0.0, seconds)):
            raise _EndedError


def _neighbours(entry: Entry, entries: Sequence[Entry]) -> list[Entry]:
    """Of these, the one that was saved right after it, and the one right before."""
    others = sorted((each for each in entries if each.name != entry.name), key=lambda each: each.order)
    at = sum(each.order < entry.order for each in others)
    return [*others[at : at + 1], *others[max(at - 1, 0) : at]]

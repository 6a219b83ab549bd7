"""The scrubber: verifies committed steps again in the background, at a limited rate, and sets damaged ones aside."""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxckpt_train.errors import CheckpointError, NotACheckpointError
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.committed import is_gone
from jaxckpt_train.store.threads import Latch
from jaxckpt_train.store.verify import IntactFiles, first_damage

IDLE_S = 1.0
JOIN_S = 5.0
LEAST_READ = 1 << 16  # bytes counted at least for each verification
NEIGHBOURS_BYTES_PER_S = 64 << 20  # if no rate is set: a fraction of the bandwidth of a disk for checkpoints
_log = logging.getLogger("jaxckpt_train")


class Run(Protocol):
    """The part of a run directory that the scrubber uses."""

    is_owner: bool

    def entries(self) -> list[Entry]:
        """The committed generations of all steps that are not set aside, in order."""

    def saw_damage(self, entry: Entry) -> None:
        """Let the next save write everything: files of this damaged step may be those of all others, too."""

    def set_aside(self, entry: Entry, problem: str) -> None:
        """Set aside a step that is proven to be damaged, while another one is intact."""


class _EndedError(Exception):
    """The scrubber has to end."""


class Scrubber:
    """Verifies steps in a cycle, starting with the neighbours of damaged ones.

    A damaged step is read twice, and set aside only when another step is found to be intact afterwards, so a run
    without intact steps stays as it is. Retention does not wait: a step that is deleted during its verification is not
    damaged. A file that several steps share is read once in each pass. With a rate of 0, only neighbours of damaged
    steps are verified, once, on a thread that ends afterwards.
    """

    def __init__(self, backend: Backend, directory: str, bytes_per_s: int, run: Callable[[], Run | None]) -> None:
        self._backend, self._directory, self._run = backend, directory, run
        self._reads_all, self._rate = bytes_per_s > 0, bytes_per_s or NEIGHBOURS_BYTES_PER_S
        self._stop = Latch()
        self._guard = threading.Lock()  # of the next three
        self._is_on = self._works = False
        self._set_aside: list[Entry] = []  # their neighbours become suspects
        self._thread: threading.Thread | None = None
        self._verified: dict[str, None] = {}  # names, the last verified one last
        self._suspects: list[str] = []
        self._damaged: dict[str, tuple[Entry, str]] = {}  # damaged steps, until another step is found to be intact
        self._found: set[tuple[str, datetime.datetime]] = set()  # damaged saves whose neighbours are already suspects
        self._warned: set[tuple[str, str]] = set()
        self._intact, self._left_of_pass = IntactFiles(), 0
        self._due_s = 0.0

    def start(self) -> None:
        """Start, after the run has its owner."""
        with self._guard:
            self._is_on = True
            self._ensure_thread()

    def verify_neighbours(self, damaged: Sequence[Entry]) -> None:
        """Verify the neighbours of steps that were set aside next."""
        with self._guard:
            self._set_aside += [entry for entry in damaged if entry.identity not in self._found]
            self._ensure_thread()

    def _ensure_thread(self) -> None:
        """Start a thread if there is something to do; if the system cannot start one, warn."""
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
        """Ask the thread to end, without waiting."""
        self._stop.open()

    def join(self) -> None:
        """Wait for the end of the thread, unless the disk does not answer; no-op on that thread."""
        self.end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)  # a longer read does no harm: the run accepts findings only from its owner

    def _work(self) -> None:
        self._due_s = time.monotonic()
        try:
            with contextlib.suppress(_EndedError, CheckpointError):  # such as after the loss of the ownership
                while self._verify_next():
                    pass
        finally:
            with self._guard:
                self._works = self._works and self._thread is not threading.current_thread()

    def _verify_next(self) -> bool:
        """Verify one step; False: nothing is left to do, or the run directory was dropped."""
        run = self._run()
        if run is None or not run.is_owner:
            return False
        entries = run.entries()
        del run  # a slow read must not keep a dropped manager alive
        entry = self._next(entries)
        if entry is not None:
            self._look_at(entry, entries)
        elif self._reads_all:
            self._wait(IDLE_S)
        else:
            with self._guard:
                self._works = bool(self._set_aside)
                return self._works
        return True

    def _look_at(self, entry: Entry, entries: Sequence[Entry]) -> None:
        self._verified.pop(entry.name, None)
        if self._left_of_pass <= 0:  # also if steps are replaced before their turn comes again
            self._intact.clear()
            self._left_of_pass = len(entries)
        self._left_of_pass -= 1
        try:
            problem = self._damage(entry) and self._damage(entry)  # read twice: a bit may have flipped on its way
            if problem is None or not is_gone(self._backend, f"{self._directory}/{entry.name}"):
                self._judge(entry, problem, entries)
        except _EndedError:
            raise
        except NotACheckpointError:
            pass  # the step was deleted; if only its COMMIT is missing, the next restore warns
        except Exception as error:  # noqa: BLE001  # an unexpected error must not end the scrubber
            kind = (entry.name, type(error).__name__)
            if kind not in self._warned:
                self._warned.add(kind)
                trace = None if isinstance(error, CheckpointError) else error
                _log.warning("step %d was not verified: %s", entry.step, error, exc_info=trace)
        self._verified[entry.name] = None

    def _damage(self, entry: Entry) -> str | None:
        self._pace(LEAST_READ)
        return first_damage(self._backend, f"{self._directory}/{entry.name}", self._pace, self._intact)

    def _judge(self, entry: Entry, problem: str | None, entries: Sequence[Entry]) -> None:
        run = self._run()
        if problem is not None:
            if run is not None:
                run.saw_damage(entry)
            self._left_of_pass = 0  # other files of this disk may have been damaged since they were read
            if entry.name not in self._damaged:
                _log.error("step %d is damaged: %s", entry.step, problem)
            self._damaged[entry.name] = (entry, problem)
            self._found.add(entry.identity)
            self._suspect(_neighbours(entry, entries))
            return
        self._damaged.pop(entry.name, None)
        while run is not None and self._damaged:
            run.set_aside(*self._damaged.pop(next(iter(self._damaged))))

    def _suspect(self, entries: Sequence[Entry]) -> None:
        self._suspects += [entry.name for entry in entries if entry.name not in self._suspects]

    def _next(self, entries: Sequence[Entry]) -> Entry | None:
        """The next step to verify: a neighbour of a damaged step, else one never verified, else the oldest result."""
        with self._guard:
            set_aside, self._set_aside = self._set_aside, []
        if set_aside:
            self._left_of_pass = 0
        for found in set_aside:
            self._suspect(_neighbours(found, entries))
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
        """Wait until `nbytes` more may be read."""
        now = time.monotonic()
        self._due_s = max(self._due_s, now - IDLE_S) + nbytes / self._rate
        self._wait(self._due_s - now)

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(max(0.0, seconds)):
            raise _EndedError


def _neighbours(entry: Entry, entries: Sequence[Entry]) -> list[Entry]:
    """The entries saved right after and right before `entry`."""
    others = sorted((each for each in entries if each.name != entry.name), key=lambda each: each.order)
    at = sum(each.order < entry.order for each in others)
    return [*others[at : at + 1], *others[max(at - 1, 0) : at]]

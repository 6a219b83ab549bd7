"""The state of a run directory as its owner, or a reader, sees it: entries, generations, notes, retention, the lock.

Takes a run directory for this process: makes it, takes its lock, removes what dead owners left half done.

Lets go of a run directory: the scrubber ends, deletions that were begun are finished, then the lock goes.

What the manifest of the next save says of its place in the run: which run, the how manieth save, what it leaves.

What a process goes on from, until it has saved: what others have saved since is not left behind unasked.

Which steps of a run are being read: retention leaves them alone meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxckpt_train.errors import CorruptCheckpointError, DirectoryLockedError, StorageError
from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, PreservationPolicy
from jaxckpt_train.run.annotations import DamageReports, NoteBook, noted
from jaxckpt_train.run.catalog import (
    Seen,
    begun_deletions,
    refuse_again_or_below,
    refuse_checkpoint,
    refuse_uncommitted,
    refuse_unseen,
    remove_attempts,
    scan_with_notes,
    seen_of,
    shown_name,
    step_not_found,
    tell_of_uncommitted,
    unseen_steps,
)
from jaxckpt_train.run.entry import (
    Entry,
    Restored,
    RollBack,
    StepVanishedError,
    check_step,
    entry_from_manifest,
    free_step_name,
    home_run,
    last_sequence,
    left_behind,
    left_behind_by,
    line_last,
    names_after,
    newest_generations,
    parse_step_name,
    to_try,
)
from jaxckpt_train.run.goodput import RunStatistics
from jaxckpt_train.run.history import History, RunLog
from jaxckpt_train.run.lock import OwnerLock, try_to_write
from jaxckpt_train.run.pruning import expired_names, replaced
from jaxckpt_train.run.retention import BestLink, Deleter, LinkToBest, PendingDeletions
from jaxckpt_train.run.scrubber import Scrubber
from jaxckpt_train.store.backends.base import GONE, Backend, sync_directory
from jaxckpt_train.store.backends.local import doubts_about
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.process_identity import ProcessIdentity
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.threads import free_in_child
from jaxckpt_train.store.timeouts import call_with_timeout

_log = logging.getLogger("jaxckpt_train")
T = TypeVar("T")


class BeingRead:
    """The names of their directories, one for each reader.

    Args:
        guard: of the run: nobody decides what goes while somebody begins to read.
    """

    def __init__(self, guard: threading.RLock) -> None:
        self._guard, self._names = guard, list[str]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @contextlib.contextmanager
    def reading(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Within: these are being read."""
        names = [entry.name for entry in entries]
        with self._guard:
            self._names += names
        try:
            yield
        finally:
            with self._guard:
                for name in names:
                    self._names.remove(name)


class ResumePoint:
    """The step that was restored, or that there was none, and what there was in the run by then.

    Attributes:
        entry: of the step that was restored; None: none was, or this process has saved since.
    """

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self._seen: Seen | None = None  # None: it has not looked

    def restored(self, entry: Entry, there: Sequence[Entry]) -> None:
        """It goes on from this step, which was chosen from what was there."""
        self.entry, self._seen = entry, seen_of([entry, *there])

    def nothing(self) -> None:
        """It has looked, and begins from scratch as there is no step."""
        if self.entry is None:
            self._seen = {}

    def saved(self) -> None:
        """It goes on from what it has saved."""
        self.entry = self._seen = None

    def left_behind(self, there: Sequence[Entry], before: frozenset[str]) -> frozenset[str]:
        """The names of what it leaves behind by going on; of what was left `before` if it knows of nothing."""
        if self.entry is None or self._seen is None or unseen_steps(there, self._seen):
            return before
        return left_behind_by(self.entry, there)

    def refuse(self, directory: str, there: Sequence[Entry]) -> None:
        """Raise CheckpointExistsError if others have saved since."""
        if self._seen is not None:
            refuse_unseen(directory, self.entry, there, self._seen)


class NextSave:
    """Its number is above that of every save there ever was, also of those that failed or were deleted."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex
        self._highest = -1
        self._undone: set[str] = set()  # saves that failed, and lie there as if they had not

    def found(self, entries: Sequence[Entry], noted: RollBack) -> None:
        """Take note of what is in the run directory."""
        self._highest = max(self._highest, last_sequence(entries, noted))

    def goes_on(self, entries: Sequence[Entry]) -> None:
        """It is a save of the run to which these belong."""
        self._run = home_run(entries) or self._run

    def gone(self, sequences: Iterable[int]) -> None:
        """Take note of saves that were deleted, which a power cut may bring back."""
        self._highest = max(self._highest, *sequences, -1)

    def failed(self, sequence: int, stays: str | None) -> None:
        """Take note of a save that failed; `stays`: the name under which it lies there all the same, for nobody."""
        self._highest = max(self._highest, sequence)
        self._undone.update([] if stays is None else [stays])

    def saved(self, name: str) -> None:
        """Take note of a save that has a name which is not that of a failed one any more."""
        self._undone.discard(name)

    def place(self, entries: Sequence[Entry], left_behind: Collection[str], notes: int) -> dict[str, Any]:
        """For its manifest.

        Args:
            entries: all steps that are there.
            left_behind: the names of those that it does not go on from.
            notes: how many notes of the run there are.
        """
        sequence = max(self._highest, *(entry.sequence for entry in entries), -1) + 1
        left = sorted({*left_behind, *self._undone})
        return {"run": self._run, "sequence": sequence, "left_behind": left, "notes": notes}


@dataclasses.dataclass(frozen=True)
class Holding:
    """What this process holds of a run directory, and what works there in the background."""

    lock: OwnerLock
    deleter: Deleter
    scrubber: Scrubber
    log: RunLog


def let_go(held: Holding) -> None:
    """Let go once the deletions are done, without waiting for that, or for a disk that does not answer."""
    if not held.lock.is_inherited:
        held.scrubber.end()
        held.lock.end()
        held.deleter.end(functools.partial(release, held) if held.lock.may_be_held else None)


def finish(held: Holding, timeout_s: float | None, until: Callable[[], bool]) -> None:
    """Let go once the deletions are done, and wait for that; interrupted or late, without waiting any more.

    A forked child has none of it: neither the thread that deletes nor the lock.
    """
    if held.lock.is_inherited:
        return
    held.scrubber.end()
    is_done = False
    try:
        if not held.deleter.is_here:  # else called by garbage collection, in the middle of a deletion
            is_done = held.deleter.close(functools.partial(release, held), timeout_s, until)
    finally:
        if not is_done:
            let_go(held)


def release(held: Holding) -> None:
    """Give the lock back; a disk that refuses is told."""
    held.scrubber.join()  # it writes notes as the owner
    if held.lock.is_own():  # else the run is another's, whose history would say that it has ended
        held.log.ended()
    try:
        held.lock.release()
    except (StorageError, CorruptCheckpointError) as error:
        if getattr(error, "errno", None) not in GONE:
            _log.warning("%s was not released: %s", held.lock.path, error)


def take(backend: Backend, directory: str, lock: OwnerLock, took_over: Callable[[ProcessIdentity], object]) -> None:
    """Take a directory; `took_over` is told of a dead owner.

    Raises:
        SettingsError: there is a checkpoint, and no run.
        DirectoryLockedError, StorageError: a live process owns it, or the disk refuses.
        CheckpointTimeoutError: the disk has not answered for ten minutes.
    """

    def look(moved: Callable[[], None]) -> None:
        refuse_checkpoint(backend, directory)
        moved()
        for doubt in doubts_about(directory):
            _log.warning("%s: %s", directory, doubt)
        try_to_write(backend, directory)

    with contextlib.suppress(StorageError):  # which is told below: asked first where nobody waits for ever
        call_with_timeout(directory, look)
    backend.make_directory(directory, parents=True, sync=True)
    dead = lock.acquire()
    if dead is not None:
        took_over(dead)
    lock.clean()
    sync_directory(backend, directory)  # names that a dead owner gave may be known to memory only
    remove_attempts(backend, directory)


class RunDirectory:
    """One run directory. A reader looks at the disk each time; the owner knows, since nobody else changes it."""

    def __init__(
        self,
        backend: Backend,
        directory: str,
        policy: PreservationPolicy | None,
        clock: Callable[[], datetime.datetime],
        scrub_bytes_per_s: int = 0,
        best_link: BestLink | None = None,
    ) -> None:
        self._backend, self._directory, self._policy, self._clock = backend, directory, policy, clock
        self.history, self.is_owner = History(backend, directory), False
        self.log, self._best = RunLog(self.history, clock), LinkToBest(backend, directory, best_link)
        self._lock = OwnerLock(backend, directory, self.log.beat)
        self._deleter = Deleter(backend, directory, weakref.ref(self), self._lock.check)
        self._scrubber = Scrubber(backend, directory, scrub_bytes_per_s, weakref.ref(self))
        self.held = Holding(self._lock, self._deleter, self._scrubber, self.log)
        # A manager that was dropped without close(), as in a notebook, must not lock its directory for ever.
        weakref.finalize(self, let_go, self.held).atexit = False
        self._guard, self._book = threading.RLock(), NoteBook(backend, directory, self._lock.check)
        free_in_child(self)
        self._entries, self._left = list[Entry](), frozenset[str]()
        self._infos: tuple[CheckpointInfo, ...] | None = None
        self._left_attempts = list[str]()
        self._origin, self._next_save, self._being_read = ResumePoint(), NextSave(), BeingRead(self._guard)
        self._damage_reports, self._told_of, self._pending_deletions, self.past = (
            DamageReports(),
            set[str](),
            PendingDeletions(),
            RunStatistics(),
        )

    def own(self) -> None:
        """Become the owner: take the lock, clean up after dead owners, read what is there; or see that it still is.

        Raises:
            DirectoryLockedError: a live process owns the directory, or took it over from this one.
        """
        if not self.is_owner:
            return self.hold()
        return call_with_timeout(self._directory, lambda moved: self.check_owner())

    def hold(self) -> None:
        """As `own`, but whoever is the owner already asks no disk whether it still is, which may not answer."""
        with self._guard:
            if self.is_owner:
                self._lock.refuse_child()
            else:
                self._own()

    def check_owner(self) -> None:
        """Raise DirectoryLockedError if the directory is not this process's own any more."""
        self._lock.check()  # keeps no guard, which others need who want nothing of the disk

    def _own(self) -> None:
        take(self._backend, self._directory, self._lock, self.log.took_over)
        with self._guard:
            self._look()
            self._book.settle(self._notes, self._entries)
            self._next_save.goes_on(self._entries)
            self._left = self._origin.left_behind(self._entries, self._left)
        self._write_verdicts()
        recent = call_with_timeout(self._directory, lambda moved: self.history.recent())
        self.past = RunStatistics.of(recent)
        names = {entry.name for entry in self._entries}
        self._deleter.delete(begun_deletions(self._backend, self._directory, names, recent, self.log.deleted))
        self.is_owner = True  # last of all: what is interrupted before is done again
        self.log.started(None if self._origin.entry is None else self._origin.entry.step)
        self._best.update(self.newest)
        self._scrubber.start()

    def _look(self, progress: ReadProgress | None = None) -> None:
        scan = functools.partial(scan_with_notes, self._backend, self._directory)
        self._entries, self._notes = call_with_timeout(self._directory, scan, progress)
        self._left = left_behind(self._entries, self._notes.roll_back)
        self._next_save.found(self._entries, self._notes.roll_back)
        self._infos = None

    def check_fresh(self, progress: ReadProgress | None = None, beside_flax: bool = False) -> None:
        """Raise CorruptCheckpointError if there are step directories, but none that is committed and whole."""
        if not self.entries(progress):
            refuse_uncommitted(self._backend, self._directory, bool(self.damaged(progress)), progress, beside_flax)
            self._origin.nothing()

    def entries(self, progress: ReadProgress | None = None) -> list[Entry]:
        """All committed generations of all steps that are neither damaged nor about to be deleted, as they were saved.

        What a roll-back has left behind comes before all others.
        """
        with self._guard:
            self._look_again(progress)
            return line_last(self._whole(), self._left)

    def _look_again(self, progress: ReadProgress | None = None) -> None:
        if not self.is_owner:
            self._look(progress)

    def _whole(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.name not in self._pending_deletions and entry.damaged is None]

    def damaged(self, progress: ReadProgress | None = None) -> list[Entry]:
        """What was set aside since it is damaged, in the order of the saves."""
        with self._guard:
            self._look_again(progress)
            return [entry for entry in self._entries if entry.damaged is not None]

    def left(self) -> frozenset[str]:
        """The names of what a roll-back has left behind, as of the last look."""
        return self._left

    def newest(self) -> list[Entry]:
        """The last generation of each step, in the same order."""
        return newest_generations(self.entries())

    def candidates(
        self, step: int | None, *, damaged: bool = False, progress: ReadProgress | None = None
    ) -> list[Entry]:
        """The generations of a step, None: of all steps, the last to be tried last.

        Args:
            step: which one.
            damaged: whether those that were set aside are tried after the others.
            progress: called with 0 in waits for the disk.

        Raises:
            StepNotFoundError: there is none.
        """
        wanted = None if step is None else check_step(step)
        with self._guard:
            self._look_again(progress)
            entries = to_try(self._entries, self._left, self._pending_deletions.is_going, damaged=damaged)
        found = [entry for entry in entries if wanted in (None, entry.step)]
        if not found:
            if wanted is None and damaged:  # as who restores asks
                self._origin.nothing()
            raise step_not_found(self._directory, step, entries, self._backend, progress)
        return found

    def with_entries(
        self,
        step: int | None,
        use: Callable[[list[Entry]], T],
        *,
        damaged: bool = False,
        progress: ReadProgress | None = None,
        then: Callable[[T, list[Entry] | None], object] = lambda result, there: None,
    ) -> T:
        """Use the `candidates`, which retention leaves alone meanwhile; `then` gets the result, and what was there."""
        while True:
            try:
                with contextlib.ExitStack() as held:
                    with self._guard:
                        candidates = self.candidates(step, damaged=damaged, progress=progress)
                        there = None if self.is_owner else [*self._entries]  # nobody but the owner changes it
                        held.enter_context(self.reading(candidates))
                    result = use(candidates)
                    then(result, there)
                    return result
            except StepVanishedError as gone:  # the owner deleted it after it was listed: look again
                self.forget(gone.name)

    def infos(self) -> tuple[CheckpointInfo, ...]:
        """The steps that the run descends from, as policies see them. Cheap for an owner, old for a reader."""
        infos = self._infos
        if infos is None:
            with self._guard:
                self._look_again()
                infos = self._infos = tuple(entry.info() for entry in newest_generations(self._line()))
        return infos

    def is_committed(self, step: int) -> bool:
        """Whether the line that the run descends from has this step, now."""
        with self._guard:
            self._look_again()
            return any(entry.step == step and entry.name not in self._left for entry in self._whole())

    def _line(self, pending_deletions: bool = False) -> list[Entry]:
        origin = None if self.is_owner else self._origin.entry
        left = self._left if origin is None else left_behind_by(origin, self._entries)
        entries = [each for each in self._entries if each.damaged is None] if pending_deletions else self._whole()
        return [entry for entry in entries if entry.name not in left]

    def lineage(self, step: int) -> dict[str, Any]:
        """What the manifest of the next save says of its place in the run."""
        with self._guard:
            left = self._left | names_after(step, self._line())
            return self._next_save.place(self._entries, left, self._book.number)

    def refuse(self, step: int, *, overwrite: bool = False) -> None:
        """Refuse a step that is committed; one that was left behind, or set aside as damaged, may be saved again.

        Raises:
            CheckpointExistsError, SettingsError: it, or later ones are; or another has saved since this one restored.
        """
        with self._guard:
            self._origin.refuse(self._directory, self._entries)
            if not overwrite:
                refuse_again_or_below(self._directory, step, self._line(), self._origin.entry)

    def free_name(self, step: int) -> str:
        """The directory name under which a step is to be saved: its next generation, whatever is there or is to go."""
        names = {*self._pending_deletions, *(shown_name(item.name) for item in self._backend.list(self._directory))}
        return free_step_name(step, names, [entry.name for entry in self._entries])

    def committed(self, committed: Committed, info: Mapping[str, Any]) -> None:
        """Take note of a commit."""
        name = committed.directory.rpartition("/")[2]
        step, generation = parse_step_name(name) or (int(info["step"]), 0)
        entry = entry_from_manifest(name, step, generation, info)
        with self._guard:
            self._entries.append(dataclasses.replace(entry, pinned=self._notes.is_pinned(step)))
            self._origin.saved()
            self._next_save.saved(name)
            self._left = frozenset(entry.left_behind) - {name}
            self._infos = None

    def failed(self, place: Mapping[str, Any], stays: str | None, attempt: str | None) -> None:
        """Take note of a save that failed.

        Args:
            place: of the save in the run.
            stays: its name, if the disk has refused to take it back.
            attempt: the directory of the attempt, if the disk has refused to remove it.
        """
        with self._guard:
            self._next_save.failed(place["sequence"], stays)
            self._left_attempts += [] if attempt is None else [attempt]

    def remove_left_attempts(self) -> None:
        """Remove what failed saves of this process have left, as far as the disk lets it."""
        with self._guard:
            left, self._left_attempts = self._left_attempts, []
        for attempt in left:
            try:
                self._backend.remove(attempt)
            except StorageError as error:
                _log.warning("what a failed save has left was not removed: %s", error)
                self._left_attempts.append(attempt)

    def note_roll_back(self, unsynced: str | None = None) -> None:
        """Write down what a roll-back left behind, once `unsynced`, the save after it, is on the disk, too."""
        with self._guard:
            there = {entry.name for entry in self._entries}
            now = RollBack(max(entry.sequence for entry in self._entries), self._left & there)
            is_noted = now.names == self._notes.roll_back.names & there
        if not is_noted and (unsynced is None or self._deleter.make_durable(unsynced)):
            self._notes.roll_back = now
            self._book.note_roll_back(now)

    def refused(self, name: str) -> None:
        """Take note that the disk refuses to keep a step, for this process and for later ones."""
        for entry in [each for each in self._entries if each.name == name]:
            self._take_note(entry, {"unsynced": True})
            with contextlib.suppress(StorageError, DirectoryLockedError):
                self.note(entry, {"unsynced": True})

    def retain(self, *, is_durable: bool = True) -> None:
        """Hand what nobody keeps to the deleter. Called after a commit, which may not be durable yet."""
        with self._guard:
            line = self._line()
            free = {name for name in self._unkept(line) if name not in self._pending_deletions}
            pending_deletions, instead = replaced(free, self._whole(), line, is_durable=is_durable)
            self._pending_deletions.add(pending_deletions, wait=bool(instead))
            self._infos = None
        self._best.update(self.newest)  # before what it stood for goes
        self._deleter.delete(sorted(pending_deletions), instead=instead)

    def _unkept(self, line: list[Entry]) -> set[str]:
        context = DecisionContext(self._clock())
        return expired_names(self._entries, line, self._left, self._policy, context) - {*self._being_read}

    def about_to_go(self, names: Sequence[str]) -> list[str]:
        """Of what has waited to be deleted that which still may go: it may have been pinned, or restored."""
        with self._guard:
            self._infos, unkept = None, self._unkept(self._line(pending_deletions=True))
            return self._pending_deletions.let_go(
                names, {each.name for each in self._entries if each.name not in unkept}
            )

    def held_up(self, names: Sequence[str]) -> None:
        """Take note that they could not go, and wait until they can."""
        with self._guard:
            self._pending_deletions.add([name for name in names if name in self._pending_deletions], wait=True)

    def forget(self, name: str) -> None:
        """Take note that a step directory is gone."""
        with self._guard:
            self._next_save.gone(each.sequence for each in self._entries if each.name == name)
            self._entries = [entry for entry in self._entries if entry.name != name]
            self._pending_deletions.discard([name])
            self._infos = None  # and what was left behind stays so

    def deleted(self, name: str) -> None:
        """Take note that it is not there under this name any more."""
        self.forget(name)
        self.log.deleted(name)

    def reading(self, entries: Sequence[Entry]) -> contextlib.AbstractContextManager[None]:
        """Keep retention away from these steps meanwhile."""
        return self._being_read.reading(entries)

    def rolled_back(self, restored: Restored, there: Sequence[Entry] | None, *, warns: bool = True) -> None:
        """Take note of a restore from what was `there`: everything later is left behind once this process saves.

        `warns`: whether an owner that saved later steps is warned about that.
        """
        entry = restored.entry
        if restored.skipped and entry.name in self._left:
            _log.warning("step %d was left behind by a roll-back; no step since is whole", entry.step)
        with self._guard:
            self._origin.restored(entry, self._entries if there is None else there)
            if self.is_owner:
                before, self._left = self._left, left_behind_by(entry, self._entries)
                later = [each.step for each in self._whole() if each.name in self._left - before]
                if warns and later and not restored.skipped:
                    _log.warning(
                        "step %d was restored while the run has later steps (%s): the next save continues from step "
                        "%d and leaves them behind, so retention may delete them. To look at a step only, use load(); "
                        "to continue where the run was, call restore(step=%d) before the next save; restore(step=..., "
                        "roll_back=True) does not warn",
                        entry.step,
                        ", ".join(map(str, later)),
                        entry.step,
                        later[-1],
                    )
            self._pending_deletions.discard([entry.name])
            self._infos = None

    def judge(self, restored: Restored) -> None:
        """Set aside what a restore has proven to be damaged: the owner writes it down now, others once they own it."""
        tell_of_uncommitted(self._backend, self._directory, self._told_of)
        self._damage_reports.add(restored)
        if self.is_owner:
            self._write_verdicts()
            self.history.add("restore", self._clock(), **restored.record(), completed=self.log.completed)

    def set_aside(self, entry: Entry, problem: str) -> None:
        """As `judge`, of one step that is proven to be damaged, while another one is whole."""
        self._damage_reports.damaged(entry, problem)
        if self.is_owner:
            self._lock.check()  # another may have it since this was begun
            self._write_verdicts()

    def _write_verdicts(self) -> None:
        set_aside = self._damage_reports.write(self._write_verdict)
        self._scrubber.look_around([entry for entry, _ in set_aside], self._damage_reports.compared)
        for entry, problem in set_aside:
            self.history.add("set_aside", self._clock(), step=entry.step, name=entry.name, problem=problem)

    def _write_verdict(self, entry: Entry, damaged: str | None) -> bool:
        """Write it down, unless the step is gone, or about to go, or was saved anew."""
        with self.reading([entry]):
            if self._pending_deletions.is_going(entry.name) or all(
                each.identity != entry.identity for each in self._entries
            ):
                return False
            self.note(entry, {"damaged": damaged})
        return True

    def note_step(self, step: int, note: Mapping[str, Any]) -> None:
        """As `note`, of a step that retention leaves alone meanwhile; StepNotFoundError: there is none."""
        self.check_owner()
        with contextlib.ExitStack() as held:
            with self._guard:
                entry = self.candidates(step)[0]
                held.enter_context(self.reading([entry]))
            self.note(entry, note)
            if note.get("pin"):
                self._pending_deletions.discard([entry.name])

    def note(self, entry: Entry, note: Mapping[str, Any]) -> None:
        """Write a pin of a step, or metrics of one generation of it or that it is damaged, durably."""
        line = {"step": entry.step, "name": entry.name, "saved": entry.time.isoformat(), **note}
        self._book.add(line)
        self._notes.add(line)
        self._take_note(entry, note)
        self._best.update(self.newest)

    def _take_note(self, entry: Entry, note: Mapping[str, Any]) -> None:
        with self._guard:
            self._entries = [noted(each, entry, note) for each in self._entries]
            self._infos = None

    def close(self, timeout_s: float | None = None, until: Callable[[], bool] = lambda: False) -> None:
        """Finish deletions and let go of the directory; when interrupted or late, once the deletions are done."""
        self.is_owner = False
        finish(self.held, timeout_s, until)

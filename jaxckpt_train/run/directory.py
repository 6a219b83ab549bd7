"""A run directory as its owner or a reader sees it.

`RunDirectory` combines the lock, the list of committed steps, the notes, the history and retention of one run. The
owner keeps this state in memory, because no other process changes the directory. A reader scans the disk on each call;
in a multi-process job, it lists what the primary, which is the owner, has sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxckpt_train._validation import is_url
from jaxckpt_train.errors import DirectoryLockedError, StorageError
from jaxckpt_train.policies.context import CheckpointInfo, DecisionContext, PreservationPolicy
from jaxckpt_train.run.catalog import (
    leftovers,
    refuse_uncommitted,
    refuse_unknown_run,
    scan_with_record,
    step_not_found,
    warn_about_uncommitted,
)
from jaxckpt_train.run.entry import (
    UNKNOWN_SAVES,
    Entry,
    Restored,
    ResumePoint,
    RollBack,
    StepVanishedError,
    branch_last,
    check_new_step,
    check_step,
    entry_from_manifest,
    free_step_name,
    last_sequence,
    left_behind,
    left_behind_by,
    names_after,
    new_step_name,
    newest_generations,
    owning_run,
    parse_step_name,
)
from jaxckpt_train.run.goodput import RunStatistics
from jaxckpt_train.run.history import History, RunLog
from jaxckpt_train.run.lock import OwnerLock
from jaxckpt_train.run.ownership import Beat, Ownership, finish_and_release, release_later, try_directory
from jaxckpt_train.run.record import Annotation, RecordKeeper
from jaxckpt_train.run.retention import BestLink, Deleter, LinkToBest, expired_names, replaced
from jaxckpt_train.run.scrubber import Scrubber
from jaxckpt_train.store.backends.base import Backend, sync_directory
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.threads import free_in_child
from jaxckpt_train.store.timeouts import time_limited

_log = logging.getLogger("jaxckpt_train")
_TRIES = 10


class RunDirectory:
    """One run directory, for its owner or for a reader.

    Args:
        backend: the storage.
        directory: the path of the run.
        policy: the steps to keep; None: all but temporary ones.
        clock: the current time.
        scrub_bytes_per_s: the rate of the scrubber; 0: it verifies only neighbours of damaged steps.
        best_link: the link to the best step; None: no link.
        delete_grace_s: how long the objects of a deleted step stay, on an object store.
    """

    def __init__(
        self,
        backend: Backend,
        directory: str,
        policy: PreservationPolicy | None,
        clock: Callable[[], datetime.datetime],
        scrub_bytes_per_s: int = 0,
        best_link: BestLink | None = None,
        delete_grace_s: float = 600.0,
    ) -> None:
        self._is_remote = is_url(directory)
        self.backend, self.directory, self._policy, self._clock = backend, directory, policy, clock
        self.history, self.is_owner = History(backend, directory), False
        self.log = RunLog(self.history, clock)
        self._best = LinkToBest(backend, directory, None if self._is_remote else best_link)
        grace_s = delete_grace_s if self._is_remote else 0.0
        beat = Beat(self.log)
        self._lock = OwnerLock(backend, directory, beat)
        self._deleter = beat.deleter = Deleter(backend, directory, weakref.ref(self), self._lock.check, grace_s)
        self._scrubber = Scrubber(backend, directory, scrub_bytes_per_s, weakref.ref(self))
        self.held = Ownership(self._lock, self._deleter, self._scrubber, self.log)
        # A manager dropped without close(), as in a notebook, must not keep its directory locked.
        weakref.finalize(self, release_later, self.held).atexit = False
        self._guard = threading.RLock()
        self._record = RecordKeeper(backend, directory, self._lock.check, best_link)
        free_in_child(self)
        self._entries, self._left = list[Entry](), frozenset[str]()
        # The steps of the fast tier in the order of the saves, as far as they are known, also those that are not whole;
        # its files and its directory.
        self.fast = list[Entry]()
        self.fast_tier: tuple[Backend, str] | None = None
        self.chosen: CheckpointInfo | None = None  # the last step saved there that is to be copied from there
        self._is_replica = False  # whether the primary of the job sends the entries, so that the disk is not scanned
        self._infos: tuple[CheckpointInfo, ...] | None = None
        self._being_read = list[str]()
        self._going = set[str]()  # names of steps that are being deleted, and are no longer listed
        self._reported = set[str]()  # names of the steps, as the other processes of the job know them
        self._run_id = uuid.uuid4().hex
        self._highest = -1  # the sequence number of the last save, which may have failed or been deleted since
        self._undone = set[str]()  # names of failed saves that still look committed on the disk
        # On an object store: the names of all attempts of this process, of failed saves that may be in the record, and
        # of steps in the record that have no objects.
        self._attempts, self._in_doubt, self._vanished = set[str](), set[str](), set[str]()
        self._origin = ResumePoint()
        # Findings that are not recorded yet: the save, and its damage; None: it is intact again.
        self._findings: dict[tuple[str, datetime.datetime], tuple[Entry, str | None]] = {}
        # Saves with damage, also if no step is intact and none is set aside; and as of the last `has_new_damage`.
        self._seen_damage, self._damaged = set[tuple[str, datetime.datetime]](), set[tuple[str, datetime.datetime]]()
        self._warned_about = set[str]()
        self._past: RunStatistics | None = None

    @property
    def past(self) -> RunStatistics:
        """The statistics of earlier processes, as far as this process owns the run; read at the first use."""
        if self._past is None and self.is_owner:
            self._past = RunStatistics.of(self.history.recent())
        return self.known_past

    @property
    def known_past(self) -> RunStatistics:
        """As `past`, as far as it has been read."""
        return self._past or RunStatistics()

    def read_past(self) -> None:
        """Read the statistics of earlier processes, so that no use has to wait for them."""
        self._past = self.past if self.is_owner else None

    def own(self) -> None:
        """Become the owner: take the lock, clean up after dead owners, and read the run; or check the ownership.

        Raises:
            SettingsError: the directory is a single checkpoint, not a run.
            DirectoryLockedError: a live process owns the directory, or took it over from this one.
            StorageError, CheckpointTimeoutError: the disk refuses, or has not answered for ten minutes.
        """
        if self.is_owner:
            self._check_owner_in_time()
        else:
            self.hold()

    def hold(self) -> None:
        """Like `own`, but an owner does not access the disk, which may not answer."""
        with self._guard:
            if self.is_owner:
                self._lock.refuse_child()
            else:
                self._own()

    @time_limited
    def _check_owner_in_time(self) -> None:
        self.check_owner()

    def check_owner(self) -> None:
        """Raise DirectoryLockedError if this process no longer owns the directory."""
        self._lock.check()  # without the guard: other threads need it for calls that do not access the disk

    def _own(self) -> None:
        with contextlib.suppress(*(() if self._is_remote else (StorageError,))):
            try_directory(self.backend, self.directory)  # an error of a disk is raised again below
        self.backend.make_directory(self.directory, parents=True, sync=True)
        dead = self._lock.acquire()
        if dead is not None:
            self.history.add("take_over", self._clock(), host=dead.host, pid=dead.pid)
        self._lock.clean()
        sync_directory(self.backend, self.directory)  # names that a dead owner created may not be on the disk yet
        if not self._is_remote:
            self._deleter.delete([], hidden=leftovers(self.backend, self.directory))
        with self._guard:
            self._take_record()
            self._run_id = self._record.record.run or owning_run(self._entries) or self._run_id
            if self.fast_tier is not None or self._record.record.run:
                # Hosts may have steps that this job cannot see, as it does not have them, or has no fast tier: its
                # saves get higher numbers.
                self._record.name_run(self._run_id)
                self._highest = max(self._highest, self._record.record.number * UNKNOWN_SAVES)
            self._left = self._origin.left_behind(self._all(), self._left, self._roll_back())
        self._write_damage_reports()
        self.take_deleted()  # deletions are counted from here
        self._past = None if self._is_remote else RunStatistics.of(self.history.recent())
        self.is_owner = True  # last: whatever an interrupt prevents is repeated
        self.log.started(None if self._origin.entry is None else self._origin.entry.step)
        self._best.update(self._newest)
        self._scrubber.start()

    def _take_record(self) -> None:
        for _ in range(_TRIES):
            self._look()
            if self._record.take(self._found, self._entries):
                return
        raise DirectoryLockedError(f"{self.directory}: another process keeps changing its record")

    def _look(self) -> None:
        self._entries, self._found = scan_with_record(self.backend, self.directory)
        self._entries = [entry for entry in self._entries if entry.name not in self._vanished]
        if self.fast_tier is not None:
            refuse_unknown_run(self.directory, self._found, self._entries)
        roll_back = self._found.record.roll_back
        self._left = left_behind(self._all(), roll_back)
        self._highest = max(self._highest, last_sequence(self._all(), roll_back))
        self._infos = None

    def _all(self) -> list[Entry]:
        """The entries of both tiers, in the order of the saves."""
        return sorted([*self._entries, *self.fast], key=lambda entry: entry.order) if self.fast else self._entries

    def run_id(self) -> str | None:
        """The id of the run, by which the steps of its fast tier are recognised; None: it is not known."""
        with self._guard:
            self._look_again()
            return self._run_id if self.is_owner else self._found.record.run or owning_run(self._entries)

    def fast_line(self) -> list[Entry]:
        """The steps of the fast tier that no roll-back has left behind."""
        with self._guard:
            return [entry for entry in self.whole_fast() if entry.name not in self._left]

    def whole_fast(self) -> list[Entry]:
        """The steps of the fast tier without those of which too much is lost."""
        return [entry for entry in self.fast if entry.damaged is None]

    def _lost_fast(self) -> list[Entry]:
        return [entry for entry in self.fast if entry.damaged is not None]

    def chosen_infos(self) -> tuple[CheckpointInfo, ...]:
        """As `infos`, with the step that was chosen last, although its copy is not there yet, or has failed."""
        infos, chosen = self.infos(), self.chosen
        return infos if chosen is None or (infos and infos[-1].step >= chosen.step) else (*infos, chosen)

    def fast_infos(self) -> tuple[CheckpointInfo, ...]:
        """As `infos`, of the fast tier."""
        return tuple(entry.info() for entry in self.fast_line())

    def found_on_fast_tier(self, entries: Sequence[Entry]) -> None:
        """In the primary: record which steps are on the fast tier, and which of all steps are left behind."""
        with self._guard:
            self.fast = [*entries]
            entries, roll_back = self._all(), self._roll_back()
            left = left_behind(entries, roll_back)
            self._left, self._infos = self._origin.left_behind(entries, left, roll_back), None

    def _roll_back(self) -> RollBack:
        """The last roll-back of which the record says what it left behind."""
        return (self._record if self.is_owner else self._found).record.roll_back

    def saved_to_fast_tier(self, entry: Entry, removed: Collection[str]) -> None:
        """Record a save to the fast tier, and which steps it no longer has."""
        with self._guard:
            self.fast = [each for each in [*self.fast, entry] if each.name not in removed]
            self._highest = max(self._highest, entry.sequence)
            self._origin.saved()
            self._left = self._with_copies(frozenset(entry.left_behind) - {entry.name})

    def _with_copies(self, left: frozenset[str]) -> frozenset[str]:
        """The names of steps that are left behind, and those of their copies from the fast tier.

        Such a copy may end after the start of the save that leaves its step behind.
        """
        saves = {entry.save for entry in self.fast if entry.name in left}
        return left | {entry.name for entry in self._entries if entry.save in saves}

    def check_fresh(self, *, allows_flax: bool = False) -> None:
        """Raise CorruptCheckpointError if there are step directories but none of them is committed and intact."""
        if not self.entries():
            is_sure = self._found.version is not None and self._found.has_steps
            refuse_uncommitted(self.backend, self.directory, bool(self.damaged()), allows_flax, is_sure=is_sure)
            self._origin.nothing(self._lost_fast())

    def entries(self) -> list[Entry]:
        """All committed generations except damaged ones and those being deleted; those left behind come first."""
        with self._guard:
            self._look_again()
            return branch_last(self._whole(), self._left)

    def _look_again(self) -> None:
        if not (self.is_owner or self._is_replica):
            self._look()

    def receive(self, entries: Sequence[Entry], gone: Collection[str], left: Collection[str]) -> None:
        """In a process other than the primary: apply changes that it has sent.

        `entries` are new or changed, `gone` the names of those that are no longer listed, and `left` the names of all
        that a roll-back has left behind.
        """
        with self._guard:
            known = {entry.name: entry for entry in self._entries if self._is_replica and entry.name not in gone}
            known |= {entry.name: entry for entry in entries}
            self._entries = sorted(known.values(), key=lambda entry: entry.order)
            self._left, self._infos, self._is_replica = frozenset(left), None, True

    def _whole(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.name not in self._going and entry.damaged is None]

    def damaged(self) -> list[Entry]:
        """The entries that were set aside as damaged, in the order of the saves."""
        with self._guard:
            self._look_again()
            return [entry for entry in self._entries if entry.damaged is not None]

    def left(self) -> frozenset[str]:
        """The names of the steps that a roll-back has left behind, as of the last scan."""
        return self._left

    def newest(self) -> list[Entry]:
        """The last generation of each step, in the order of `entries`."""
        return newest_generations(self.entries())

    def _newest(self) -> list[Entry]:
        """As `newest`, without a scan."""
        with self._guard:
            return newest_generations(branch_last(self._whole(), self._left))

    def place_of(self, entry: Entry) -> tuple[Backend, str]:
        """The backend that has a step, and its path there."""
        backend, directory = self.backend, self.directory
        if entry.is_fast and self.fast_tier is not None:
            backend, directory = self.fast_tier
        return backend, f"{directory}/{entry.name}"

    def candidates(self, step: int | None, *, damaged: bool = False, fast: bool = False) -> list[Entry]:
        """The generations of a step (None: of all) as a restore tries them.

        With `damaged`, also those set aside; with `fast`, also those of the fast tier.

        Raises:
            StepNotFoundError: there is none.
        """
        wanted = None if step is None else check_step(step)
        with self._guard:
            self._look_again()
            entries = branch_last([*self._whole(), *(self.whole_fast() if fast else ())], self._left)[::-1]
            if damaged:
                entries += [each for each in reversed(self._entries) if each.damaged is not None]
        found = [entry for entry in entries if wanted in (None, entry.step)]
        if not found:
            if wanted is None and damaged:  # a restore
                self._origin.nothing(self._lost_fast())
            raise step_not_found(self.directory, step, entries, self.backend)
        return found

    @contextlib.contextmanager
    def holding_candidates(
        self, step: int | None, *, damaged: bool = False, fast: bool = False
    ) -> Iterator[tuple[list[Entry], list[Entry] | None]]:
        """Protect the candidates for a read from deletion within the context.

        A reader may raise StepVanishedError within the context, since the owner may have deleted the step after the
        scan. The step is forgotten then: try again.

        Yields:
            The candidates, and for a reader all entries of its scan: only the owner changes the run.
        """
        with contextlib.ExitStack() as held:
            with self._guard:
                candidates = self.candidates(step, damaged=damaged, fast=fast)
                there = None if self.is_owner else [*self._all()]
                held.enter_context(self.reading(candidates))
            try:
                yield candidates, there
            except StepVanishedError as gone:
                self.forget(gone.name)
                raise

    def infos(self) -> tuple[CheckpointInfo, ...]:
        """The steps that the run descends from, as policies see them. Cheap for an owner, stale for a reader."""
        infos = self._infos
        if infos is None:
            with self._guard:
                self._look_again()
                infos = self._infos = tuple(entry.info() for entry in newest_generations(self._line()))
        return infos

    def is_committed(self, step: int) -> bool:
        """Whether the current branch of the run has this step."""
        with self._guard:
            self._look_again()
            return any(entry.step == step and entry.name not in self._left for entry in self._whole())

    def _line(self) -> list[Entry]:
        origin = None if self.is_owner else self._origin.entry
        left = self._left if origin is None else left_behind_by(origin, self._entries, self._roll_back())
        return [entry for entry in self._whole() if entry.name not in left]

    def lineage(self, step: int) -> dict[str, Any]:
        """The lineage fields for the manifest of the next save."""
        with self._guard:
            sequence = max(self._highest, *(entry.sequence for entry in self._all()), -1) + 1
            left = sorted(self._left | self._undone | names_after(step, [*self._line(), *self.fast_line()]))
            number = self._record.record.number
            return {"run": self._run_id, "sequence": sequence, "left_behind": left, "record": number}

    def refuse(self, step: int, *, overwrite: bool = False) -> None:
        """Refuse to save a step that is committed. A step left behind or set aside as damaged may be saved again."""
        with self._guard:
            self._origin.refuse(self.directory, self._all())
            if not overwrite:
                check_new_step(self.directory, step, self._line(), self._origin.entry)

    def next_step_name(self, step: int) -> str:
        """The directory name of the next generation of a step, which no directory has, not even one being deleted."""
        if self._is_remote:
            name = new_step_name(step)
            self._attempts.add(name)
            return name
        there = {item.name for item in self.backend.list(self.directory)}
        with self._guard:
            return free_step_name(step, there | self._going)

    def publish(self, name: str, info: Mapping[str, Any]) -> None:
        """Right before a step is published: check the ownership; on an object store, commit it into the record."""
        if self._is_remote:
            self._record.add_step(name, info)
        else:
            self.check_owner()

    def drop_steps(self, names: Sequence[str]) -> None:
        """Remove steps from the record of a run on an object store, right before they are deleted."""
        self._record.drop_steps(names)

    def known_names(self) -> set[str]:
        """The names that no clean-up may remove: those of the record, and of all attempts of this process."""
        with self._guard:
            return {entry.name for entry in self._entries} | self._attempts | {*(self._record.record.steps or ())}

    def committed(self, committed: Committed, info: Mapping[str, Any], *, is_durable: bool) -> None:
        """Record a commit; `is_durable`: the step is on the disk."""
        name = committed.directory.rpartition("/")[2]
        step, generation = parse_step_name(name) or (int(info["step"]), 0)
        entry = entry_from_manifest(name, step, generation, info)
        entry = dataclasses.replace(entry, is_durable=is_durable or self._is_remote)
        with self._guard:
            self._record.reuse(name)
            self._entries.append(self._record.record.applied_to(entry))
            self._origin.saved()
            self._undone.discard(name)
            if all(entry.order >= each.order for each in self.fast):  # else it is a copy of an older one of these
                self._left = frozenset(entry.left_behind) - {name}
            self._left = self._with_copies(self._left)
            self._infos = None
            # The record has been replaced since: what it does not have now, it never will.
            failed, self._in_doubt = self._in_doubt.difference(self._record.record.steps or ()), set()
        if failed:
            self._deleter.delete([], hidden=sorted(failed))

    def failed(self, place: Mapping[str, Any], stays: str | None, attempt: str | None) -> None:
        """Record a failed save with these lineage fields.

        `stays` is its name if it still looks committed, and `attempt` its directory; None: the disk removed them.
        """
        with self._guard:
            self._highest = max(self._highest, place["sequence"])
            self._undone.update([] if stays is None else [stays])
            self._in_doubt.update([stays] if stays is not None and self._is_remote else [])
        self._deleter.delete([], hidden=[] if attempt is None else [attempt.rpartition("/")[2]])

    def record_roll_back(self) -> None:
        """Record what a roll-back left behind, after the first step saved since is on a disk."""
        with self._guard:
            entries = self._all()
            there, last = {entry.name for entry in entries}, max(entries, key=lambda entry: entry.sequence)
            if last.name in self._left:  # no step was saved since
                return
            now = RollBack(last.sequence, self._left & there)
            is_recorded = now.names == self._record.record.roll_back.names & there
        if not is_recorded and (last.is_fast or last.is_durable or self._deleter.make_durable(last.name)):
            self._record.roll_back(now)

    def synced(self, name: str, *, is_durable: bool) -> bool:
        """Record that the disk has synced a step, or that it refused to; return whether it has never refused.

        A refusal is recorded for later processes, too.
        """
        with self._guard:
            self._entries = [each.synced(is_durable) if each.name == name else each for each in self._entries]
            self._infos = None
            found = [each for each in self._entries if each.name == name]
        if not is_durable:
            for entry in found:
                with contextlib.suppress(StorageError, DirectoryLockedError):
                    self.annotate(entry, Annotation(is_unsynced=True))
        return bool(found) and not any(entry.is_unsynced for entry in found)

    def retain(self) -> None:
        """Delete the expired steps in the background. Called after a commit, which may not be durable yet."""
        names, before = self.plan_deletions()
        if before:
            self._deleter.delete_expired()
        else:
            self._deleter.delete(names)

    @time_limited
    def retain_now(self) -> None:
        """Like `retain`, but the expired steps are no longer listed when this returns."""
        self._deleter.delete(self._deleter.due())

    def plan_deletions(self) -> tuple[list[str], list[str]]:
        """The expired steps to delete now, and the steps that must be synced first; one of the two is empty.

        The steps to delete are no longer listed from now on. Until then they can be restored and pinned, and are then
        kept.
        """
        with self._guard:
            line, context = self._line(), DecisionContext(self._clock())
            unkept = expired_names(self._entries, line, self._left, self._policy, context)
            names, before = replaced(unkept - self._going - {*self._being_read}, self._whole(), line)
            if before:
                names = set()
            self._going |= names
            self._infos = None
        self._best.update(self._newest)  # before the deletion of the step that the link points to
        return sorted(names), before

    def take_deleted(self) -> list[str]:
        """The names of the steps that were deleted since the last call, or since this process owns the run."""
        with self._guard:
            now = {entry.name for entry in self._entries} - self._going
            gone, self._reported = self._reported - now, now
        return sorted(gone)

    def not_deleted(self, names: Sequence[str]) -> None:
        """Record that these steps could not be deleted: they are listed again, and the next commit decides anew."""
        with self._guard:
            self._going.difference_update(names)
            self._infos = None

    def forget(self, name: str) -> None:
        """Record that a step directory no longer exists."""
        with self._guard:
            gone = [entry.sequence for entry in self._entries if entry.name == name]
            self._highest = max(self._highest, *gone, -1)  # a power cut may bring them back
            self._entries = [entry for entry in self._entries if entry.name != name]
            self.fast = [entry for entry in self.fast if entry.name != name]
            self._going.discard(name)
            self._record.forget(name)
            self._vanished.update([name] if self._is_remote else [])  # such a name is never used again
            self._infos = None  # `_left` stays: what was left behind is still left behind

    def deleted(self, name: str) -> None:
        """Record a deletion, also in the history."""
        self.forget(name)
        self.history.add("delete", self._clock(), name=name)

    @contextlib.contextmanager
    def reading(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Protect these steps from deletion within the context."""
        names = [entry.name for entry in entries]
        with self._guard:
            self._being_read += names
        try:
            yield
        finally:
            with self._guard:
                for name in names:
                    self._being_read.remove(name)

    def note_restore(self, restored: Restored, there: Sequence[Entry] | None, *, warns: bool = True) -> None:
        """Record a restore; the next save of this process leaves all later steps behind.

        `there` has the entries that it was chosen from (None: those of the owner). `warns`: warn an owner about later
        steps.
        """
        entry = restored.entry
        if restored.skipped and entry.name in self._left:
            _log.warning("step %d was left behind by a roll-back, but no later step is intact", entry.step)
        with self._guard:
            self.chosen = None
            self._origin.restored(entry, self._all() if there is None else there)
            if self.is_owner:
                before, self._left = self._left, left_behind_by(entry, self._all(), self._roll_back())
                later = [each.step for each in self._whole() if each.name in self._left - before]
                if warns and later and not restored.skipped:
                    _log.warning(
                        "step %d was restored while the run has later steps (%s): the next save leaves them behind, so "
                        "retention may delete them. To look at a step only, use load(); restore(step=..., "
                        "roll_back=True) does not warn",
                        entry.step,
                        ", ".join(map(str, later)),
                    )
            self._infos = None

    @time_limited
    def record_damage(self, restored: Restored) -> None:
        """Record the damage that a restore found. The owner writes it at once, others when they own the run."""
        warn_about_uncommitted(self.backend, self.directory, self._warned_about)
        entry = restored.entry
        with self._guard:
            missing = (self._vanished & {*(self._found.record.steps or ())}) - self._warned_about
            self._warned_about |= missing
            for name in sorted(missing):
                _log.warning("%s/%s: ignored: the record of the run has it, but it has no COMMIT", self.directory, name)
            self._findings.pop(entry.identity, None)  # an earlier finding may date from an incomplete copy of the step
            if restored.is_mended:
                self._findings[entry.identity] = (entry, None)
            for each in restored.skipped:
                if each.is_proven and each.entry.damaged is None and not each.entry.is_fast:
                    self._findings[each.entry.identity] = (each.entry, each.problem)
        if self.is_owner:
            self._write_damage_reports()
            tier = {"tier": "fast", "ahead_steps": self._ahead_of_slow_tier(entry)} if entry.is_fast else {}
            self.history.add("restore", self._clock(), **restored.record(), **tier, completed=self.log.completed)

    def _ahead_of_slow_tier(self, entry: Entry) -> int:
        """How many steps a step of the fast tier is newer than the newest step of the run directory."""
        return max(0, entry.step - max((each.step for each in self._line()), default=0))

    def saw_damage(self, entry: Entry) -> None:
        """Let the next save write everything: files of this damaged step may be those of all others, too."""
        with self._guard:
            self._seen_damage.add(entry.identity)

    def has_new_damage(self) -> bool:
        """Whether a step was found to be damaged since the last call."""
        with self._guard:
            damaged = {entry.identity for entry in self._entries if entry.damaged is not None} | self._seen_damage
            before, self._damaged = self._damaged, damaged
        return not damaged <= before

    def set_aside(self, entry: Entry, problem: str) -> None:
        """Record that one step is damaged while another one is intact."""
        with self._guard:
            self._findings[entry.identity] = (entry, problem)
        if self.is_owner:
            self._lock.check()  # another process may own the run by now
            self._write_damage_reports()

    def _write_damage_reports(self) -> None:
        set_aside = list[Entry]()
        with self._guard:
            found, self._findings = list(self._findings.values()), {}
        for entry, finding in found:
            # Escape what is not valid Unicode, such as parts of a path.
            problem = finding and finding.encode("utf-8", "backslashreplace").decode()
            with self.reading([entry]):  # unless it is gone, about to be deleted, or saved again
                is_there = any(each.identity == entry.identity for each in self._entries)
                if not is_there or entry.name in self._going:
                    continue
                try:
                    self.annotate(entry, Annotation(damaged=problem))
                except StorageError as error:  # a later restore finds the damage again
                    _log.warning("step %d could not be set aside: %s", entry.step, error)
                    continue
            if problem is not None:
                _log.warning(
                    "step %d is set aside as damaged: %s is kept on disk but no longer listed", entry.step, entry.name
                )
                set_aside.append(entry)
                self.history.add("set_aside", self._clock(), step=entry.step, name=entry.name, problem=problem)
        self._scrubber.verify_neighbours(set_aside)

    @time_limited
    def annotate_step(self, step: int, change: Annotation) -> None:
        """Like `annotate`, for a step by its number, protected from deletion meanwhile."""
        self.check_owner()
        with contextlib.ExitStack() as held:
            with self._guard:
                entry = self.candidates(step)[0]
                held.enter_context(self.reading([entry]))
            self.annotate(entry, change)

    def annotate(self, entry: Entry, change: Annotation) -> None:
        """Record a pin of a step, or metrics or damage of one save of it, durably."""
        self._record.annotate(entry, change)
        with self._guard:
            self._entries = [self._record.record.applied_to(each) for each in self._entries]
            self._infos = None
        self._best.update(self._newest)

    def close(self, timeout_s: float | None = None, until: Callable[[], bool] | None = None) -> None:
        """Finish deletions and release the directory; see `finish_and_release` for interrupts and the timeout."""
        self.is_owner = False
        finish_and_release(self.held, timeout_s, until)

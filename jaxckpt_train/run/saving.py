"""Saving a step of a run.

`StepSave` is one save: it takes the state on the loop's thread; then it writes, commits, records and applies retention
in the background. `SaveSlot` holds the one save of a run that is in progress. `Drift` warns if a save would not fit
the targets of the next `resume`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxckpt_train import pending as unfinished
from jaxckpt_train.checkpoint_metadata import CheckpointMetadata, describe, run_info
from jaxckpt_train.checkpointables.handlers import JsonHandler
from jaxckpt_train.checkpointables.iterator_state import DATA_NAME, current_fingerprint
from jaxckpt_train.checkpointables.registry import handler_of
from jaxckpt_train.checkpointables.saving import CheckpointSave
from jaxckpt_train.checkpointables.staging import StagedPart, wait_until_taken
from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError, MismatchError, SettingsError
from jaxckpt_train.pending import LAST_PATIENCE_S, PendingSave
from jaxckpt_train.policies.context import CheckpointInfo, positive_seconds
from jaxckpt_train.policies.cost_model import LoopTimer
from jaxckpt_train.pytree.copies import device_wait_s, some_arrays
from jaxckpt_train.pytree.flatten import flatten
from jaxckpt_train.pytree.mismatch import tree_differences
from jaxckpt_train.pytree.snapshot import Snapshot
from jaxckpt_train.pytree.target import LeafRequest, leaf_request
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import entry_from_manifest, parse_step_name
from jaxckpt_train.run.history import Clock, metrics_to_json, plain_metrics
from jaxckpt_train.run.job import JobSync
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.dtypes import dtype_name
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.threads import Latch
from jaxckpt_train.store.transaction import Transaction

_log = logging.getLogger("jaxckpt_train")
ENDS_WITHIN_S = 60.0  # in a job, after the end of the save in the primary: by then all processes know the outcome
Busy = Literal["wait", "skip"]
Stalled = Literal["skip", "raise"]
CALL_S = 10.0
"""A background save waits this long for the end of its `save` call, to record its duration: interrupts may hide it."""


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """The result of `StepManager.save`. It is true if the step is being saved.

    Attributes:
        saved: whether the step is being saved.
        reason: why, or why not.
        pending: the save in progress; None if nothing is saved.
    """

    saved: bool
    reason: str
    pending: PendingSave[CheckpointMetadata] | None = None

    def __bool__(self) -> bool:
        """Whether the step is being saved."""
        return self.saved


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """A save to make: its label, the seconds that the loop has waited before, and the measured cost of a save."""

    step: int
    reason: str
    metrics: Mapping[str, Any] | None
    custom_metadata: Any
    temporary: bool
    decide_s: float
    wait_s: float
    cost_s: float | None = None


class StepSave:
    """One save of a step. The constructor takes the state; `run` does the rest, on any thread.

    In a multi-process job, every process makes the same save and writes its shards. The primary performs the directory
    operations: it is the `SaveTarget` of the checkpoint.

    Args:
        request: what to save, and why.
        checkpointables: the values to save, by name.
        run: the state of the run directory.
        job_sync: the processes.
        settings: how to write.
        clock: the current time.
        timer: measures what saves cost.
        drift: compares the save with the targets of `resume`.

    Attributes:
        device_wait_s: seconds that the call waited for updates that JAX had queued. This is training time, not time
            that the save blocked the loop.
        info: the information for the manifest.
        replace: False: a step never replaces another.
    """

    replace = False

    def __init__(
        self,
        request: SaveRequest,
        checkpointables: Mapping[str, Any],
        *,
        run: RunDirectory,
        job_sync: JobSync,
        settings: StoreSettings,
        clock: Clock,
        timer: LoopTimer,
        drift: Drift | None = None,
    ) -> None:
        started = self._began_at = time.perf_counter()
        self._timer, self._drift = timer, drift
        self._run, self._settings, self._clock = run, settings, clock
        self._step, self._job_sync = request.step, job_sync
        self._call_ended, self._caller = Latch(), threading.get_ident()
        self._is_owner = self._is_committed = False
        self.info: dict[str, Any] = {}
        job = job_sync.channel("save", settings.barrier_timeout_s)
        subject = f"step {request.step} to {run.directory}"
        self._save = CheckpointSave(job, subject, run.backend, settings)
        self._times = self._save.times
        with self._save.sharing_errors():
            self._take(request, checkpointables)
        self._record = {key: getattr(request, key) for key in ("step", "decide_s", "wait_s", "cost_s")}
        self._record["reason"] = str(request.reason)  # a plain str, not a subclass
        self._record["metrics"] = metrics_to_json(self.metrics) or None  # kept when the step is deleted
        self.device_wait_s = self._times.device_wait_s
        self._record["blocked_s"] = request.decide_s + time.perf_counter() - started - self.device_wait_s
        if self.device_wait_s:  # the devices were computing during the wait for the previous save, too
            self.device_wait_s += request.wait_s
        else:
            self._record["blocked_s"] += request.wait_s

    def _take(self, request: SaveRequest, checkpointables: Mapping[str, Any]) -> None:
        self._save.stage(checkpointables)
        if isinstance(request.metrics, Mapping):
            self._times.device_wait_s += device_wait_s(some_arrays([*request.metrics.values()]))
        self.metrics = plain_metrics(request.metrics)
        self.info |= run_info(
            created=self._clock().isoformat(timespec="microseconds"),
            step=request.step,
            **(self._run.lineage(request.step) if self._job_sync.is_primary else {}),
            metrics=metrics_to_json(self.metrics),
            custom_metadata=request.custom_metadata,
            temporary=request.temporary,
            fingerprint=current_fingerprint(),
        )

    def start(
        self,
        begun: Callable[[PendingSave[CheckpointMetadata] | None], None],
        timeout_s: float | None,
        patience_s: float,
        until: Callable[[], bool],
    ) -> PendingSave[CheckpointMetadata]:
        """Write in the background; return when the caller may modify what it saved.

        Args:
            begun: called with the save before it starts, so that an interrupt does not lose it; with None if it did not
                start.
            timeout_s: the time limit for taking the state.
            patience_s: the time limit for progress in taking it.
            until: ends the wait when it returns true.

        Raises:
            CheckpointTimeoutError: the state was not taken within `timeout_s`, or before `until` became true, or made
                no progress for `patience_s` seconds.
        """
        started, waited_s, parts = time.perf_counter(), self._times.device_wait_s, self._save.parts
        is_streamed = not all(part.snapshot is None or part.snapshot.is_taken.is_open() for part in parts)
        if unfinished.is_over():  # at the end of the process, the call waits for the save, not the other way round
            self._call_ended.open()
        try:
            pending = self._save.start(self.run, begun)
            wait_until_taken(parts, pending, timeout_s, patience_s, until)
        finally:
            held_s = time.perf_counter() - started
            waited_s = min(held_s, self._times.device_wait_s - waited_s) if is_streamed else 0.0
            self.device_wait_s += waited_s
            self._record["blocked_s"] += held_s - waited_s
            self._call_ended.open()
        return pending

    def run(self) -> CheckpointMetadata:
        """Write and commit, then record the save in the history and apply retention.

        All disk access is here, so that a disk that does not answer does not block the loop.
        """
        try:
            committed = self._save.run(self)
        except BaseException as error:
            if not self._is_committed:  # log it now: the next save, which raises the error, may never happen
                _log.warning("saving step %d failed: %s: %s", self._step, type(error).__name__, error)
                self._failed(error)
            raise
        if not self._job_sync.is_primary:
            self._timer.committed(time.perf_counter() - self._began_at, self._times.device_wait_s)
            name, info = committed.directory.rpartition("/")[2], committed.manifest.info
            step, generation = parse_step_name(name) or (self._step, 0)
            self._job_sync.replica.committed(entry_from_manifest(name, step, generation, info), self._save.result)
        return describe(committed)

    def begin(self) -> Transaction:
        """In the primary: check the ownership of the run, and create the attempt."""
        if self._drift is not None:
            self._drift.look(self._step, self._save.parts)
        self._run.check_owner()
        self._is_owner = True  # without ownership nothing is written, not even to the history
        self._run.remove_left_attempts()
        self._record["name"] = name = self._run.next_step_name(self._step)
        path, check = f"{self._run.directory}/{name}", self._run.check_owner
        return Transaction(self._run.backend, path, self._settings, check)

    def _failed(self, error: BaseException) -> None:
        if not self._is_owner:
            return
        attempt = self._save.transaction
        stays = attempt is not None and attempt.may_be_published
        left = attempt.directory if attempt is not None and attempt.was_not_removed else None
        self._run.failed(self.info, self._record["name"] if stays else None, left)
        self._note(ok=False, error=str(error))

    def committed(self, committed: Committed) -> list[str]:
        """In the primary: record the commit and apply retention; return the names that are no longer listed."""
        times, self._is_committed = self._times, True
        self._timer.committed(time.perf_counter() - self._began_at, times.device_wait_s)
        self._run.committed(committed, self.info)
        is_durable = self._settings.durability == "full"
        self._run.note_roll_back(None if is_durable else committed.directory.rpartition("/")[2])
        times.bytes = committed.data_bytes  # of all processes
        spent_s = times.write_s + times.commit_s
        self._note(ok=True, bytes_per_s=round(times.bytes / spent_s) if spent_s > 0 else math.inf)
        took_s = self._record["save_s"] - times.device_wait_s
        _log.info("saved step %d in %s s (%s)", self._step, _short(took_s), _size_text(times.bytes))
        try:
            self._run.check_owner()  # another process may have taken the run over, and list what retention would delete
            before = self._listed()
            self._run.retain(is_durable=is_durable)
            return sorted(before - self._listed())
        except BaseException as error:
            error.add_note(f"step {self._step} is committed; only retention failed")
            raise

    def _listed(self) -> set[str]:
        """The names of the listed steps, for the other processes; empty if there are none."""
        return set() if self._job_sync.is_single_process else {entry.name for entry in self._run.entries()}

    def _note(self, **outcome: Any) -> None:
        before_s = self._record["decide_s"] + self._record["wait_s"]
        self._record["save_s"] = before_s + time.perf_counter() - self._began_at
        if threading.get_ident() != self._caller:  # else this is still within the call
            self._call_ended.wait(CALL_S)  # until then the duration of the call is unknown
        self._run.history.add("save", self._clock(), **self._record, **dataclasses.asdict(self._times), **outcome)


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def _size_text(nbytes: int) -> str:
    """Format a size, such as "3.4 GiB"."""
    power = min(4, max(0, nbytes.bit_length() - 1) // 10)
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


class SaveSlot:
    """At most one save in progress, and what the next save does about it. `StepManager` documents the arguments.

    Attributes:
        pending: the save, until its outcome was reported.
        info: the step of the save, as policies see it.
        given_up: a save that is no longer waited for.
        is_asked_to_leave: whether the job has to shut down soon, so that a save must not wait for the slot.
        is_time_up: whether the time to shut down is over, so that unfinished work is given up.

    Raises:
        SettingsError: an argument is wrong.
    """

    def __init__(self, if_busy: Busy, stall_timeout_s: float, if_stalled: Stalled) -> None:
        if if_busy not in ("wait", "skip"):
            raise SettingsError(f'StepManager.if_busy: expected "wait" or "skip", found {if_busy!r}')
        if if_stalled not in ("skip", "raise"):
            raise SettingsError(f'StepManager.if_stalled: expected "skip" or "raise", found {if_stalled!r}')
        self._if_busy, self._if_stalled = if_busy, if_stalled
        self._stall_timeout_s = positive_seconds("StepManager.stall_timeout_s", stall_timeout_s)
        self.is_asked_to_leave: Callable[[], bool] = lambda: False
        self.is_time_up: Callable[[], bool] = lambda: False
        self.pending: PendingSave[CheckpointMetadata] | None = None
        self.info: CheckpointInfo | None = None
        self.given_up: PendingSave[CheckpointMetadata] | None = None
        self._skipped_for: tuple[PendingSave[CheckpointMetadata] | None, float] = (None, 0.0)
        self._warned_of: PendingSave[CheckpointMetadata] | None = None
        self._without_state: PendingSave[CheckpointMetadata] | None = None
        self._kept: list[BaseException] | None = None
        self._begun_at = 0.0

    def begun(self, pending: PendingSave[CheckpointMetadata] | None) -> None:
        """Store a save that is about to start; None: it did not start."""
        self.pending, self._begun_at = pending, time.monotonic()

    def running_for_s(self) -> float:
        """Seconds since the save started."""
        return time.monotonic() - self._begun_at

    def is_running(self) -> bool:
        """Whether the save has neither committed nor failed."""
        return self.pending is not None and not self.pending.done()

    def running_info(self) -> tuple[CheckpointInfo, ...]:
        """The running save as policies see it; empty if none is running."""
        return (self.info,) if self.info is not None and self.is_running() else ()

    def check(self) -> None:
        """If the save has failed, raise its error, once."""
        pending = self.pending
        if pending is not None and pending.done():
            self._raise_or_keep(self.settle())

    def is_over(self) -> bool:
        """Whether a save has ended whose outcome was not reported yet."""
        return self.pending is not None and self.pending.done()

    def report_outcome(self, *, is_raised: bool = False) -> None:
        """In a job, when the save has ended in the primary: wait for its end here, and raise its error.

        Args:
            is_raised: whether this or another error is already being raised, so that none is raised here.
        """
        try:
            error = self.settle(ENDS_WITHIN_S)
        except CheckpointTimeoutError as late:
            error, self.pending = late, None
        if not is_raised:
            self._raise_or_keep(error)

    def _raise_or_keep(self, error: BaseException | None) -> None:
        if error is not None and self._kept is None:
            raise error
        if error is not None and self._kept is not None:
            self._kept.append(error)

    @contextlib.contextmanager
    def deferring_errors(self) -> Iterator[None]:
        """Collect errors of failed saves within the context, and raise the first at its end."""
        if self._kept is not None:
            yield
            return
        kept = self._kept = list[BaseException]()
        try:
            yield
        except BaseException:
            for error in kept:
                _log.error("the previous save failed", exc_info=error)  # not the error that is raised here
            raise
        finally:
            self._kept = None
        if kept:
            raise kept[0]

    def settle(
        self,
        timeout_s: float | None = None,
        patience_s: float = LAST_PATIENCE_S,
        until: Callable[[], bool] | None = None,
    ) -> BaseException | None:
        """Wait for the save and free the slot; return the error if the save failed.

        Raises:
            CheckpointTimeoutError: the save was not done within `timeout_s`, made no progress for `patience_s` seconds,
                or `until` became true. The save continues.
        """
        pending = self.pending
        if pending is None:
            return None
        error = pending.outcome(timeout_s, patience_s, until)
        if self.pending is pending:  # else another thread has started the next save
            self.pending = None
            self._skipped_for = (None, 0.0)
        if pending is self._without_state:  # its failure was reported when the step was skipped
            self._without_state = None
            return None
        return error

    def wait_until_free(self, step: int, force: bool, timeout_s: float | None) -> str | None:
        """Wait until the slot is free for the save of `step`; if the step is skipped instead, return the reason.

        Raises:
            CheckpointTimeoutError: the running save was not done in time, or made no progress for too long.
            Exception: the original error of the running save, if it failed.
        """
        pending = self.pending
        if pending is None or pending.done():
            self.check()  # it may have failed since the last check
            return None
        if self._if_busy == "skip" and not force:
            self._look_at(pending)
            if pending.tracker.waited_s >= self._stall_timeout_s:
                return self._skipped(step, force, pending.stall_error())
            why = f"skipped: {pending.subject} is still in progress, and if_busy is 'skip'"
            _log.info("step %d: %s", step, why)
            return why
        _log.info("the save of step %d waits, because %s is still in progress", step, pending.subject)
        try:
            error = self.settle(timeout_s, self.patience_s(force), self.is_asked_to_leave)
        except CheckpointTimeoutError as stalled:
            if self.is_asked_to_leave():
                return f"skipped: {stalled}"
            return self._skipped(step, force, stalled)
        self._raise_or_keep(error)
        return None

    def _look_at(self, pending: PendingSave[CheckpointMetadata]) -> None:
        """Count the time since the last skipped step as time without progress.

        A single interval counts for at most half of the limit: after a suspension of the whole job, the save has until
        the next step to make progress.
        """
        now, (seen, at) = time.monotonic(), self._skipped_for
        if seen is pending:
            pending.tracker.waited(now - max(at, pending.tracker.moved_at), at_most=self._stall_timeout_s / 2)
        self._skipped_for = (pending, now)

    def patience_s(self, force: bool) -> float:
        """Seconds without progress after which a running save is no longer waited for."""
        return LAST_PATIENCE_S if force else self._stall_timeout_s

    def not_taken(self, step: int, force: bool, timeout_s: float | None, stalled: CheckpointTimeoutError) -> str:
        """The state of a save could not be taken in time: return why the step is skipped.

        Raises:
            CheckpointTimeoutError: `stalled`, if the step must not be skipped.
        """
        self._without_state = self.pending
        if timeout_s is None and self.is_asked_to_leave():  # with a timeout, the caller is the shutdown: raise instead
            _log.warning("step %d is skipped: %s", step, stalled)
            return f"skipped: {stalled}"
        return self._skipped(step, force, stalled)

    def _skipped(self, step: int, force: bool, stalled: CheckpointTimeoutError) -> str:
        if force or self._if_stalled == "raise":
            raise stalled
        level = logging.INFO if self._warned_of is self.pending else logging.WARNING  # warn once for each stalled save
        _log.log(level, "step %d is skipped: %s", step, stalled)
        self._warned_of = self.pending
        return f"skipped: {stalled}"

    def leave_to_parent(self) -> None:
        """Do not wait for a save that belongs to the parent of this forked process."""
        if self.pending is not None and self.pending.is_of_parent():
            self.pending, self.given_up = None, self.pending

    def give_up(self, exit_code: int) -> None:
        """Stop waiting for the save, also at the end of the process, which then exits with this code."""
        if self.pending is not None:
            self.pending.give_up(exit_code)
            self.pending, self.given_up = None, self.pending


class Drift:
    """Compares each save with what the next start of the loop will ask for. Holds no array.

    Args:
        targets: the targets that `resume` was given, by name.

    Attributes:
        warns_of_position: whether to warn if the position in the data does not change.
    """

    def __init__(self, targets: Mapping[str, Any]) -> None:
        self._requests = {
            name: requests for name, value in targets.items() if (requests := _requests_of(value)) is not None
        }
        self._forms: dict[str, Any] = {}
        self._position: tuple[int, Any] | None = None
        self.warns_of_position = True

    def look(self, step: int, parts: Sequence[StagedPart]) -> None:
        """Warn, once for each reason, if this save does not fit the targets or repeats the position in the data."""
        for part in parts:
            if part.name == DATA_NAME and self.warns_of_position:
                self._look_at_position(step, part)
            if part.snapshot is not None and part.name in self._requests:
                form = _form_of(part.snapshot)
                if form != self._forms.get(part.name):
                    self._forms[part.name] = form
                    self._compare(step, part.name, part.snapshot)

    def _compare(self, step: int, name: str, snapshot: Snapshot) -> None:
        arrays = {each.name: ArrayRecord(each.name, each.shape, dtype_name(each.dtype), ()) for each in snapshot.arrays}
        try:
            tree_differences(f"step {step}: {name}", snapshot.record, arrays, self._requests[name]).raise_all()
        except MismatchError as error:
            del self._requests[name]  # warn once
            _log.warning(
                "step %d: %r does not have the structure that resume(...) was given: the next start of this program "
                "would fail with the error below. Keep leaves, shapes and dtypes the same in each update (cast changed "
                "values back, remove what only one step needs), or pass a state with the new structure to "
                "resume(...).\n%s",
                step,
                name,
                error,
            )

    def _look_at_position(self, step: int, part: StagedPart) -> None:
        found = _position_of(part)
        before, self._position = self._position, (step, found)
        if found is not None and before is not None and before[1] == found and before[0] < step:
            self.warns_of_position = False
            _log.warning(
                "step %d: the position of %r is the same as at step %d. If the loop takes its batches from another "
                "iterator, a resume would repeat data: take them from the iterator that resume(...) returned. For "
                "several epochs, repeat the dataset (dataset.repeat()), or pass each new iterator by ckpt(state, "
                "data=iterator). If several updates use one batch, call ckpt(...) only after the last of them, or keep "
                "the batch in the state: a resume between them would continue with the next batch. "
                "Ignore this warning if the position restarts in each epoch and each save is at the same place of one",
                step,
                part.name,
                before[0],
            )


def _requests_of(value: Any) -> dict[str, LeafRequest] | None:
    """Return the request of each leaf of a target; None: the value is not a pytree, or not a valid target."""
    tree_of = getattr(handler_of(value), "tree_of", None)
    if tree_of is None:
        return None
    try:
        flat = flatten(tree_of(value))
        requests = {name: leaf_request(name, leaf, None) for name, leaf in zip(flat.names, flat.leaves, strict=True)}
    except CheckpointError:
        return None
    return {name: want._replace(sharding=None) for name, want in requests.items()}


def _form_of(snapshot: Snapshot) -> Any:
    leaves = snapshot.record.leaves
    return [*leaves], [*map(type, leaves.values())], [(each.shape, each.dtype) for each in snapshot.arrays]


def _position_of(part: StagedPart) -> Any:
    """The position in the data that a save holds, for a comparison; None: it cannot be compared."""
    if part.kind == JsonHandler.kind:
        return None
    if part.snapshot is not None:  # the state of an object with `get_state`
        return None if part.snapshot.arrays else part.snapshot.record.leaves
    return part.value

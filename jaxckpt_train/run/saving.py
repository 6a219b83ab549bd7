"""Saving a step of a run.

`StepSave` is one save: it takes the state on the loop's thread; then it writes, commits, records and applies retention
in the background. `Drift` warns if a save would not fit the targets of the next `resume`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxckpt_train._validation import is_url
from jaxckpt_train.checkpoint_metadata import CheckpointMetadata, describe, run_info
from jaxckpt_train.checkpointables.handlers import JsonHandler, handler_of
from jaxckpt_train.checkpointables.iterator_state import DATA_NAME, current_fingerprint
from jaxckpt_train.checkpointables.saving import CheckpointSave
from jaxckpt_train.checkpointables.staging import StagedPart, wait_until_taken
from jaxckpt_train.checkpointables.unchanged import UnchangedLeaves
from jaxckpt_train.distributed.coordinator import Coordinator
from jaxckpt_train.errors import CheckpointError, MismatchError
from jaxckpt_train.pending import PendingSave, process_is_ending
from jaxckpt_train.policies.cost_model import LoopTimer
from jaxckpt_train.pytree.copies import device_wait_s, some_arrays
from jaxckpt_train.pytree.flatten import flatten
from jaxckpt_train.pytree.snapshot import Snapshot
from jaxckpt_train.pytree.target import Comparison, LeafRequest, leaf_request
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import entry_from_manifest, new_step_name, parse_step_name
from jaxckpt_train.run.fast_steps import FastSaved, FastSteps
from jaxckpt_train.run.history import Clock, metrics_to_json, plain_metrics
from jaxckpt_train.run.job import JobSync
from jaxckpt_train.settings import MIB, StoreSettings
from jaxckpt_train.store.committed import Committed
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.segment import dtype_name
from jaxckpt_train.store.threads import Latch
from jaxckpt_train.store.transaction import Transaction, begin
from jaxckpt_train.tiers.saving import HostSave, begin_on_host

_log = logging.getLogger("jaxckpt_train")
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
    fast_only: bool = False
    must_drain: bool = False


class StepSave:
    """One save of a step. The constructor takes the state; `run` does the rest, on any thread.

    In a multi-process job, every process makes the same save and writes its shards. The primary performs the directory
    operations: it is the `SaveTarget` of the checkpoint.

    Attributes:
        device_wait_s: seconds that the call waited for updates that JAX had queued. This is training time, not time
            that the save blocked the loop.
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
        unchanged: UnchangedLeaves | None = None,
        fast: FastSteps | None = None,
    ) -> None:
        started = self._began_at = time.perf_counter()
        self._timer, self._drift = timer, drift
        self._run, self._settings, self._clock = run, settings, clock
        self._step, self._job_sync = request.step, job_sync
        self._call_ended, self._caller = Latch(), threading.get_ident()
        self._is_owner = False
        self.info: dict[str, Any] = {}
        self._fast, self._must_drain = fast, request.must_drain
        self._drain: Coordinator | None = None  # for a copy to the slow tier
        job = job_sync.channel("save", settings.barrier_timeout_s)
        if fast is None:
            subject = f"step {request.step} to {run.directory}"
            self._save = CheckpointSave(job, subject, run.backend, settings, unchanged)
        else:
            if not request.fast_only:
                self._drain = job_sync.channel("drain", settings.barrier_timeout_s)
            subject = f"step {request.step} to the fast tier of {run.directory}"
            self._save = HostSave(job, subject, fast.tier, settings, unchanged)
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

        Raises CheckpointTimeoutError if the state was not taken within `timeout_s`, or before `until` became true, or
        made no progress for `patience_s` seconds.
        """
        started, waited_s, parts = time.perf_counter(), self._times.device_wait_s, self._save.parts
        is_streamed = not all(part.snapshot is None or part.snapshot.is_taken.is_open() for part in parts)
        if process_is_ending():  # at the end of the process, the call waits for the save, not the other way round
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
            committed = self._save.write_and_commit(self)
        except BaseException as error:
            if not self._save.is_committed:  # log it now: the next save, which raises the error, may never happen
                _log.warning("saving step %d failed: %s: %s", self._step, type(error).__name__, error)
                self._failed(error)
            raise
        name = committed.directory.rpartition("/")[2]
        if not self._job_sync.is_primary:
            self._timer.committed(time.perf_counter() - self._began_at, self._times.device_wait_s)
        if self._fast is not None:
            self._fast.after(committed, msgspec.convert(self._save.result, FastSaved), self._drain)
        elif not self._job_sync.is_primary:
            info = committed.manifest.info
            step, generation = parse_step_name(name) or (self._step, 0)
            entry = entry_from_manifest(name, step, generation, info)
            self._run.receive([entry], self._save.result, {*entry.left_behind} - {name})
        return describe(committed)

    def create_attempt(self) -> Transaction:
        """In the primary: check the ownership of the run, and create the attempt."""
        if self._drift is not None:
            self._drift.look(self._step, self._save.parts)
        self._run.check_owner()
        self._is_owner = True  # without ownership nothing is written, not even to the history
        if self._fast is not None:
            self._record["name"] = name = new_step_name(self._step)
            return begin_on_host(self._fast.tier, name, self._settings, self._run.check_owner)
        self._record["name"] = name = self._run.next_step_name(self._step)
        publish = functools.partial(self._run.publish, name, self.info)
        return begin(self._run.backend, f"{self._run.directory}/{name}", self._settings, publish, is_step=True)

    def writes_everything(self) -> bool:
        """In the primary: whether a step was found to be damaged, whose files may be those of the last one, too."""
        return self._run.has_new_damage()

    def _failed(self, error: BaseException) -> None:
        if not self._is_owner:
            return
        attempt = self._save.transaction
        stays = attempt is not None and attempt.may_be_published
        left = attempt.directory if attempt is not None and attempt.was_not_removed else None
        self._run.failed(self.info, self._record["name"] if stays else None, left)
        self._note(ok=False, error=str(error))

    def after_commit(self, committed: Committed) -> Any:
        """In the primary: record the commit and apply retention; return what the other processes must know of it.

        These are the names of the steps that are no longer listed; of a step of the fast tier, a FastSaved.
        """
        times = self._times
        self._timer.committed(time.perf_counter() - self._began_at, times.device_wait_s)
        if self._fast is None:
            self._run.committed(committed, self.info, is_durable=self._settings.durability == "full")
            self._run.record_roll_back()
        times.bytes = committed.data_bytes  # of all processes
        spent_s = times.write_s + times.commit_s
        written_bytes = times.bytes - times.taken_bytes
        self._note(ok=True, bytes_per_s=round(written_bytes / spent_s) if spent_s > 0 else math.inf)
        took_s = self._record["save_s"] - times.device_wait_s
        taken = f", {times.taken_bytes / MIB:.2f} MiB of it unchanged" if times.taken_bytes else ""
        where = "" if self._fast is None else " to the fast tier"
        _log.info("saved step %d%s in %.3f s (%.2f MiB%s)", self._step, where, took_s, times.bytes / MIB, taken)
        if self._fast is not None:
            name = committed.directory.rpartition("/")[2]
            drains = self._drain is not None
            host_bytes = self._save.host_bytes if isinstance(self._save, HostSave) else 0
            message = self._fast.saved(name, self.info, host_bytes, drains=drains, must_drain=self._must_drain)
            return msgspec.to_builtins(message)
        try:
            if not is_url(self._run.directory):  # where retention changes the record first, which only the owner can
                self._run.check_owner()  # another process may have taken over, and list what retention would delete
            self._run.retain()
            return self._job_sync.take_deleted()
        except BaseException as error:
            error.add_note(f"step {self._step} is committed; only retention failed")
            raise

    def _note(self, **outcome: Any) -> None:
        before_s = self._record["decide_s"] + self._record["wait_s"]
        self._record["save_s"] = before_s + time.perf_counter() - self._began_at
        if threading.get_ident() != self._caller:  # else this is still within the call
            self._call_ended.wait(CALL_S)  # until then the duration of the call is unknown
        if self._fast is not None:
            self._record["tier"] = "fast"
        self._run.history.add("save", self._clock(), **self._record, **dataclasses.asdict(self._times), **outcome)


class Drift:
    """Compares each save with what the next start of the loop will ask for. Holds no array."""

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
        comparison, asked = Comparison(f"step {step}: {name}", snapshot.record, arrays), self._requests[name]
        same_names = {leaf: leaf for leaf in snapshot.record.leaves}
        comparison.requests(asked, same_names)
        skipped = [leaf for leaf, request in asked.items() if request.form == "skip"]
        comparison.unexpected(same_names, same_names, asked, skipped)
        try:
            comparison.raise_all()
        except MismatchError as error:
            del self._requests[name]  # warn once
            _log.warning(
                "step %d: %r does not have the structure that resume(...) was given: the next start of this program "
                "would fail with the error below. Keep leaves, shapes and dtypes the same in each update, or pass a "
                "state with the new structure to resume(...).\n%s",
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
                "step %d: the position of %r is the same as at step %d, so a resume may repeat or skip data. Take the "
                "batches from the iterator that resume(...) returned; for several epochs, repeat the dataset "
                "(dataset.repeat()), or pass each new iterator by ckpt(state, data=iterator). If several updates use "
                "one batch, call ckpt(...) only after the last of them, or keep the batch in the state",
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

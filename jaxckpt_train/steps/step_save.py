"""One save of a step: taken on the loop's thread, written, committed, recorded and retained in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxckpt_train import unfinished
from jaxckpt_train.checkpoint import run_info
from jaxckpt_train.checkpoint_metadata import CheckpointMetadata, describe
from jaxckpt_train.checkpointables.fingerprint import current_fingerprint
from jaxckpt_train.checkpointables.job_saving import JobSave
from jaxckpt_train.checkpointables.saving import (
    SaveTimes,
    StagedPart,
    begin_save,
    movement_of,
    stage_all,
    undone_on_error,
    wait_until_taken,
    write_parts,
)
from jaxckpt_train.pending import PendingSave
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.drift import Drift
from jaxckpt_train.steps.entry import entry_from_manifest
from jaxckpt_train.steps.history import metrics_to_json, plain_metrics
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.steps.together import Together
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.latch import Latch
from jaxckpt_train.store.transaction import Committed, Transaction
from jaxckpt_train.tree.device_wait import device_wait_s, some_arrays

_log = logging.getLogger("jaxckpt_train")
Clock = Callable[[], datetime.datetime]
CALL_S = 10.0
"""By then the call that saves has ended, as all it waits for is written; unless an interrupt kept it from saying so."""


def utc_now() -> datetime.datetime:
    """The wall clock, in UTC."""
    return datetime.datetime.now(datetime.UTC)


@dataclasses.dataclass(frozen=True)
class SaveResult:
    """What became of a call to `StepManager.save`; true where a step is being saved.

    Attributes:
        saved: whether the step is being saved.
        reason: why, or why not.
        pending: the save under way; None if nothing is saved.
    """

    saved: bool
    reason: str
    pending: PendingSave[CheckpointMetadata] | None = None

    def __bool__(self) -> bool:
        """Whether the step is being saved."""
        return self.saved


@dataclasses.dataclass(frozen=True)
class SaveRequest:
    """What is saved under which label, how long the loop was held up before, and what a save was seen to cost it."""

    step: int
    reason: str
    metrics: Mapping[str, Any] | None
    custom_metadata: Any
    temporary: bool
    decide_s: float
    wait_s: float
    cost_s: float | None = None


class StepSave:
    """One save. Making it takes the state; `run` does the rest, on any thread.

    In a job all processes make the same one, and each writes its share; what is done with the directory process 0 does.
    `took` is called with the seconds until it was committed, and those of them in which devices were computing. `drift`
    looks at what is saved.

    Attributes:
        device_wait_s: seconds that the call waited for updates that JAX had queued. They are training: no save blocks
            the loop by them.
    """

    def __init__(
        self,
        request: SaveRequest,
        checkpointables: Mapping[str, Any],
        *,
        backend: Backend,
        directory: str,
        run: RunDirectory,
        together: Together,
        settings: StoreSettings,
        clock: Clock,
        took: Callable[[float, float], None] = lambda duration_s, device_wait_s: None,
        drift: Drift | None = None,
    ) -> None:
        started = self._began_at = time.perf_counter()
        self._took, self._drift = took, drift
        self._backend, self._run, self._settings, self._clock = backend, run, settings, clock
        self._directory, self._step, self._together = directory, request.step, together
        self._times = SaveTimes()
        self._call_ended, self._caller = Latch(), threading.get_ident()
        self._attempt: Transaction | None = None
        self._is_owner = self._is_committed = False
        self._info: dict[str, Any] = {}
        self._job_save = None if together.is_alone else self._in_job()
        with contextlib.nullcontext() if self._job_save is None else self._job_save.told_on_error():
            self._take(request, checkpointables)
        self._record = {key: getattr(request, key) for key in ("step", "decide_s", "wait_s", "cost_s")}
        self._record["reason"] = str(request.reason)  # a plain text, which it may only look like
        self._record["metrics"] = metrics_to_json(self.metrics) or None  # which a step that is deleted takes with it
        self.device_wait_s = self._times.device_wait_s
        self._record["blocked_s"] = request.decide_s + time.perf_counter() - started - self.device_wait_s
        if self.device_wait_s:  # the devices were at work while the save before was waited for, too
            self.device_wait_s += request.wait_s
        else:
            self._record["blocked_s"] += request.wait_s

    def _in_job(self) -> JobSave:
        job = self._together.job.within("save", self._settings.barrier_timeout_s)
        subject = f"step {self._step} to {self._directory}"
        return JobSave(
            job,
            subject,
            self._begun,
            self._backend,
            self._info,
            self._settings,
            replace=False,
            committed=self._conclude,
            times=self._times,
        )

    def _take(self, request: SaveRequest, checkpointables: Mapping[str, Any]) -> None:
        if self._job_save is None:
            self._parts: Sequence[StagedPart] = stage_all(checkpointables, self._times, self._settings)
            self._movement = movement_of(self._parts)
        else:
            self._job_save.stage(checkpointables)
            self._parts, self._movement = self._job_save.parts, self._job_save.movement
        if isinstance(request.metrics, Mapping):
            self._times.device_wait_s += device_wait_s(some_arrays([*request.metrics.values()]))
        self.metrics = plain_metrics(request.metrics)
        self._info |= run_info(
            created=self._clock().isoformat(timespec="microseconds"),
            step=request.step,
            **(self._run.lineage(request.step) if self._together.leads else {}),
            metrics=metrics_to_json(self.metrics),
            custom_metadata=request.custom_metadata,
            temporary=request.temporary,
            fingerprint=current_fingerprint(),
        )

    def start(
        self,
        subject: str,
        begun: Callable[[PendingSave[CheckpointMetadata] | None], None],
        timeout_s: float | None,
        patience_s: float,
        until: Callable[[], bool],
    ) -> PendingSave[CheckpointMetadata]:
        """Write in the background; returns once the caller may do anything with what it saved.

        `begun` is told of the save before it begins (None: it did not), so that an interrupt does not lose it.

        Raises:
            CheckpointTimeoutError: the state was not taken in time, or before `until` became true, or no part of it
                for `patience_s` seconds.
        """
        started, waited_s = time.perf_counter(), self._times.device_wait_s
        is_streamed = not all(part.snapshot is None or part.snapshot.is_taken.is_open() for part in self._parts)
        if unfinished.is_over():  # the call waits for the save then, which must not wait for the call
            self._call_ended.open()
        try:
            pending = begin_save(subject, self.run, None, self._parts, self._movement, begun)
            wait_until_taken(self._parts, pending, timeout_s, patience_s, until)
        finally:
            held_s = time.perf_counter() - started
            waited_s = min(held_s, self._times.device_wait_s - waited_s) if is_streamed else 0.0
            self.device_wait_s += waited_s
            self._record["blocked_s"] += held_s - waited_s
            self._call_ended.open()
        return pending

    def run(self) -> CheckpointMetadata:
        """Write and commit; then note it in the history, and hand what no policy keeps any more to the deleter.

        All that touches the disk is here, so that one that does not answer does not keep the loop.
        """
        try:
            return self._lead() if self._together.leads else self._follow()
        except BaseException as error:
            if not self._is_committed:  # the loop is told at its next save, which it may never get to
                _log.warning("saving step %d failed: %s: %s", self._step, type(error).__name__, error)
            raise

    def _lead(self) -> CheckpointMetadata:
        with undone_on_error(None, self._parts):
            if self._drift is not None:
                self._drift.look(self._step, self._parts)
            if self._job_save is None:
                self._check_owner()
        try:
            committed = self._write()
        except BaseException as error:
            self._failed(error)
            raise
        if self._job_save is None:
            self._conclude(committed)
        return describe(committed)

    def _write(self) -> Committed:
        if self._job_save is not None:
            return self._job_save.run()
        return write_parts(
            self._begun(),
            self._backend,
            self._parts,
            self._info,
            self._settings,
            self._times,
            replace=False,
            progress=self._movement,
        )

    def _follow(self) -> CheckpointMetadata:
        """What a process does that does not lead: its share, and take note of what came of it."""
        assert self._job_save is not None
        committed = self._job_save.run()
        self._took(time.perf_counter() - self._began_at, self._times.device_wait_s)
        name, info = committed.directory.rpartition("/")[2], committed.manifest.info
        step, generation = parse_step_name(name) or (self._step, 0)
        self._together.followed.committed(entry_from_manifest(name, step, generation, info), self._job_save.told)
        return describe(committed)

    def _check_owner(self) -> None:
        self._run.check_owner()
        self._is_owner = True  # else nothing is written, not even into the history

    def _begun(self) -> Transaction:
        with undone_on_error(None, self._parts):
            if self._job_save is not None:
                self._check_owner()
            self._run.remove_left_attempts()
            self._record["name"] = name = self._run.free_name(self._step)
            path, check = f"{self._directory}/{name}", self._run.check_owner
            self._attempt = Transaction(self._backend, path, self._settings, check)
            return self._attempt

    def _failed(self, error: BaseException) -> None:
        if not self._is_owner or self._is_committed:
            return
        attempt = self._attempt
        stays = attempt is not None and attempt.stays
        left = attempt.directory if attempt is not None and attempt.is_left else None
        self._run.failed(self._info, self._record["name"] if stays else None, left)
        self._note(ok=False, error=str(error))

    def _conclude(self, committed: Committed) -> list[str]:
        """It is committed: note that, and decide which steps to keep; the names of those that are listed no more."""
        times, self._is_committed = self._times, True
        self._took(time.perf_counter() - self._began_at, self._times.device_wait_s)
        self._run.committed(committed, self._info)
        is_durable = self._settings.durability == "full"
        self._run.note_roll_back(None if is_durable else committed.directory.rpartition("/")[2])
        times.bytes = committed.data_bytes  # of all processes of a job
        spent_s = times.write_s + times.commit_s
        self._note(ok=True, bytes_per_s=round(times.bytes / spent_s) if spent_s > 0 else math.inf)
        took_s = self._record["save_s"] - times.device_wait_s
        _log.info("saved step %d in %s s (%s)", self._step, _short(took_s), _size_text(times.bytes))
        try:
            self._run.check_owner()  # another may have taken the run over, and list what this one would delete
            before = self._listed()
            self._run.retain(is_durable=is_durable)
            return sorted(before - self._listed())
        except BaseException as error:
            error.add_note(f"step {self._record['step']} is committed; what failed is deciding which steps to keep")
            raise

    def _listed(self) -> set[str]:
        """The names of what is listed, for the other processes; nobody is told where there is none."""
        return set() if self._together.is_alone else {entry.name for entry in self._run.entries()}

    def _note(self, **outcome: Any) -> None:
        before_s = self._record["decide_s"] + self._record["wait_s"]
        self._record["save_s"] = before_s + time.perf_counter() - self._began_at
        if threading.get_ident() != self._caller:  # who saves on the calling thread is still in the call
            self._call_ended.wait(CALL_S)  # else it is not known yet how long the call took
        self._run.history.add("save", self._clock(), **self._record, **dataclasses.asdict(self._times), **outcome)


def _short(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def _size_text(nbytes: int) -> str:
    """Such as "3.4 GiB"."""
    power = min(4, max(0, nbytes.bit_length() - 1) // 10)
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"

"""Restoring a step of a run, by one process or by all processes of a job.

`RunRestore` restores the newest intact step: a step that fails to load is read twice, then skipped with a warning. In a
multi-process job the primary chooses the step, all processes load it, and a failure in one process is a failure in all.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxckpt_train.checkpoint_metadata import CheckpointMetadata, describe
from jaxckpt_train.checkpointables.loading import compare_parts, load_parts
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, NotACheckpointError, StorageError, free_frames
from jaxckpt_train.pytree.restore import JobLoads, LoadOptions
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import Entry, Restored, Skipped, StepVanishedError
from jaxckpt_train.run.fast_steps import FastSteps
from jaxckpt_train.run.job import JobSync
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import is_damage
from jaxckpt_train.store.committed import Committed, is_gone, open_committed
from jaxckpt_train.store.manifest import MANIFEST_NAME, decode_manifest, encode_manifest
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.verify import verify

# Errors that prove damage of a committed file; a read error may not occur again.
_PROVEN = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}
_log = logging.getLogger("jaxckpt_train")
# Each process reads a larger manifest itself: the storage delivers it to many processes faster than the primary.
MOST_SENT_BYTES = 4 << 20


class ByteMeter:
    """Counts the bytes that a load reports, and forwards them."""

    def __init__(self, progress: ReadProgress | None) -> None:
        self.bytes = 0
        self._progress, self._lock = progress, threading.Lock()

    def __call__(self, done: int) -> None:
        """Add bytes."""
        with self._lock:
            self.bytes += done
        if self._progress is not None:
            self._progress(done)


def describe_listed(run: RunDirectory, listed: Sequence[Entry]) -> CheckpointMetadata:
    """Describe the first of the listed steps; raise StepVanishedError if it no longer exists."""
    backend, path = run.place_of(listed[0])
    try:
        return describe(open_committed(backend, path, is_complete=False))
    except (CorruptCheckpointError, NotACheckpointError) as error:
        if not is_gone(backend, path):
            raise
        raise StepVanishedError(listed[0].name) from error


def _none_intact(directory: str, skipped: Sequence[Skipped], asked: int | None) -> CorruptCheckpointError:
    listing = "\n".join(f"  step {each.entry.step}: {each.problem}" for each in skipped)
    what = f"none of {len(skipped)} committed steps can" if asked is None else f"step {asked} cannot"
    instead = "start from scratch in another directory" if asked is None else "restore another step"
    return CorruptCheckpointError(
        f"{directory}: {what} be restored; no file was changed. Bring the damaged files back from a copy "
        "(`jaxckpt_train.verify` lists them), load the intact parts by `jaxckpt_train.load_checkpointables`, "
        f"or {instead}:\n{listing}"
    )


def _is_proof(error: Exception) -> bool:
    """Whether the error proves that bytes are wrong or missing; otherwise they could not be read this time."""
    return isinstance(error, CorruptCheckpointError) or (isinstance(error, StorageError) and error.errno in _PROVEN)


class _Chosen(msgspec.Struct, array_like=True):
    """A message of the primary: the checkpoint to load, or the step that all processes have restored."""

    directory: str
    sha256: str
    manifest: bytes
    step: int | None
    is_fast: bool = False


class RunRestore:
    """One restore of a run, as a process of its job performs it. A single process is a job of size one.

    Attributes:
        backend: that of the step which was tried last.
        committed: that step; None: none was opened.
    """

    def __init__(
        self,
        run: RunDirectory,
        job_sync: JobSync,
        targets: Mapping[str, Any] | None,
        settings: StoreSettings,
        progress: ReadProgress | None,
        fast: FastSteps | None = None,
    ) -> None:
        self._run, self._job_sync, self._targets, self._settings = run, job_sync, targets, settings
        self._fast, self.backend = fast, run.backend
        self._meter = ByteMeter(progress)
        self.committed: Committed | None = None

    def restore(self, step: int | None, *, warns: bool) -> tuple[dict[str, Any], int]:
        """Restore a step, from which the run continues; return its checkpointables and its number.

        `warns`: warn an owner that has saved later steps. In a job, an error of one process is raised in all.
        """
        if self._fast is not None:
            self._fast.look()
        if not self._job_sync.is_primary:
            return self._follow()
        load = self._load_parts if self._job_sync.is_single_process else self._load_everywhere
        try:
            restored = self._read(step, load, damaged=True, warns=warns)
            self._run.record_damage(restored)
            if restored.left_out:
                names = ", ".join(map(repr, sorted(restored.left_out)))
                _log.warning("step %d also has %s, not requested: they start from scratch", restored.entry.step, names)
        except BaseException as error:
            self._report_failure(error)
            raise
        if not self._job_sync.is_single_process:
            self._job_sync.on_primary("restoring", lambda: _Chosen("", "", b"", restored.entry.step))
        return restored.results, restored.entry.step

    def load(self, step: int | None) -> dict[str, Any]:
        """Load a step in this process only; the run continues as before. Arguments and errors as for `restore`."""
        if self._fast is not None and not self._run.is_owner:  # an owner knows what it has saved
            self._fast.look()
        return self._read(step, self._load_parts, damaged=step is not None).results

    def _read(
        self, step: int | None, load: Callable[[Committed], dict[str, Any]], *, damaged: bool, warns: bool | None = None
    ) -> Restored:
        """Read a step; if `warns` is not None, the run continues from there."""
        while True:
            with (
                contextlib.suppress(StepVanishedError),
                self._run.holding_candidates(step, damaged=damaged, fast=self._fast is not None) as (found, there),
            ):
                restored = self._newest(found, step, load)
                if warns is not None:
                    self._run.note_restore(restored, there, warns=warns)
                return restored

    def _newest(
        self, candidates: Sequence[Entry], asked: int | None, load: Callable[[Committed], dict[str, Any]]
    ) -> Restored:
        """Restore the first intact candidate; raise StepVanishedError if one no longer exists."""
        started, meter = time.perf_counter(), self._meter
        skipped: list[Skipped] = []
        last: Exception | None = None
        for entry in candidates:
            backend, path = self._run.place_of(entry)
            self.backend = backend
            try:
                results, parts = self._read_twice(entry, path, load)
                taken_s = time.perf_counter() - started
                # To call a step intact again, verify all of it, not only what was requested.
                is_mended = entry.damaged is not None and verify(backend, path, self._settings).ok
                left_out = frozenset[str]() if self._targets is None else parts - set(self._targets)
                return Restored(entry, results, skipped, meter.bytes, taken_s, is_mended, left_out)
            except (CorruptCheckpointError, NotACheckpointError, StorageError) as error:
                if not is_damage(error):
                    raise
                if is_gone(backend, path):
                    raise StepVanishedError(entry.name) from error
                skipped.append(Skipped(entry, str(error), _is_proof(error)))
                if skipped[-1].is_proven:
                    self._run.saw_damage(entry)
                last = error
                free_frames(error)  # the frames hold the values loaded so far, and the next step needs the memory
                _log.warning("step %d cannot be restored and is skipped: %s", entry.step, error)
        raise _none_intact(self._run.directory, skipped, asked) from last

    def _read_twice(
        self, entry: Entry, path: str, load: Callable[[Committed], dict[str, Any]]
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """Load a candidate; also return the names of its checkpointables.

        After a failure, read it once more: memory or the data path may have been at fault. Raises StepVanishedError if
        another save has its name since.
        """
        manifests = set[str]()

        def read() -> tuple[dict[str, Any], frozenset[str]]:
            committed = open_committed(self.backend, path, is_complete=False)
            manifests.add(committed.manifest_sha256)
            if len(manifests) > 1:
                raise StepVanishedError(entry.name)
            results = load(committed)
            if (saved_as := committed.manifest.info.get("step")) not in (None, entry.step):  # which may be intended
                _log.warning("step %d was saved as step %s: %s was renamed", entry.step, saved_as, path)
            return results, frozenset(part.name for part in committed.manifest.parts)

        try:
            return read()
        except (CorruptCheckpointError, StorageError) as error:
            if not is_damage(error):
                raise
            first = f"{'check the memory' if _is_proof(error) else 'check the disk'}; the first attempt failed: {error}"
            free_frames(error)
        found = read()
        _log.warning("step %d was intact when it was read again; %s", entry.step, first)
        return found

    def _load_parts(self, committed: Committed, loads: JobLoads | None = None) -> dict[str, Any]:
        options, wanted, self.committed = LoadOptions(donatable=True), self._wanted(committed), committed
        return load_parts(self.backend, committed, wanted, self._settings, options, self._meter, loads)

    def _wanted(self, committed: Committed) -> Mapping[str, Any]:
        return dict.fromkeys(part.name for part in committed.manifest.parts) if self._targets is None else self._targets

    def _report_failure(self, error: BaseException) -> None:
        """In the primary: raise the error in the other processes as well."""

        def say() -> Any:
            raise error

        if not self._job_sync.is_single_process:
            with contextlib.suppress(type(error)):
                self._job_sync.on_primary("restoring", say)

    def _load_everywhere(self, committed: Committed) -> dict[str, Any]:
        """In the primary: load a checkpoint in all processes."""
        manifest = encode_manifest(committed.manifest)
        sent = manifest if len(manifest) <= MOST_SENT_BYTES else b""
        is_fast = self.backend is not self._run.backend
        chosen = _Chosen(committed.directory, committed.manifest_sha256, sent, None, is_fast)
        self._job_sync.on_primary("restoring", lambda: chosen)
        return self._load_together(committed.directory, lambda: committed)

    def _follow(self) -> tuple[dict[str, Any], int]:
        """In the other processes: load what the primary chooses, until all processes succeed or the primary raises."""
        results: dict[str, Any] = {}
        own: BaseException | None = None
        while True:
            try:
                chosen = msgspec.convert(self._job_sync.on_primary("restoring", lambda: None), _Chosen)
            except CheckpointError as error:
                if own is None:
                    raise
                raise own from error  # an error of a checkpointable's own code in this process
            if chosen.step is not None:
                return results, chosen.step
            results = {}
            if chosen.is_fast and self._fast is not None:  # the directory has another path on this host
                directory = f"{self._fast.tier.directory}/{os.path.basename(chosen.directory)}"
                chosen = msgspec.structs.replace(chosen, directory=directory)
                self.backend = self._fast.tier.files
            else:
                self.backend = self._run.backend
            try:
                results = self._load_together(chosen.directory, functools.partial(self._opened, chosen))
            except CheckpointError as error:
                if 0 in getattr(error, "lost", ()):
                    raise  # the primary is lost
                free_frames(error)  # the primary decides what the error means, and what to try next
            except BaseException as error:  # noqa: BLE001  # raised above, after the decision of the primary
                own = error

    def _opened(self, chosen: _Chosen) -> Committed:
        if chosen.manifest:
            manifest = decode_manifest(chosen.manifest, f"{chosen.directory}/{MANIFEST_NAME}")
            return Committed(chosen.directory, manifest, chosen.sha256)
        committed = open_committed(self.backend, chosen.directory, is_complete=False)
        if committed.manifest_sha256 != chosen.sha256:
            raise CorruptCheckpointError(f"{chosen.directory}: was replaced during the restore")
        return committed

    def _load_together(self, directory: str, open_it: Callable[[], Committed]) -> dict[str, Any]:
        """Load a checkpoint so that all processes succeed or all fail."""

        def look() -> Committed:
            committed = open_it()
            compare_parts(self.backend, committed, self._wanted(committed), self._settings)
            return committed

        # First compare everywhere: a mismatch in one process is reported at once, before the processes read together.
        committed = self._job_sync.on_all(f"comparing with {directory}", look)

        job = self._job_sync.job
        order = job.within("load", self._settings.barrier_timeout_s)  # here, where no process can fail alone
        loads = JobLoads(job, self._settings, order)

        def load() -> dict[str, Any]:
            with loads.sharing_errors():
                return self._load_parts(committed, loads)

        return self._job_sync.on_all(f"restoring {directory}", load)

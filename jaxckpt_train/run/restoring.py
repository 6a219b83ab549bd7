"""A restore by all processes of a job: process 0 chooses the step, all load it, and one that fails is one for all.

Restores the newest step that is whole: a damaged one is read twice, then skipped with a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import msgspec

from jaxckpt_train.checkpoint_metadata import CheckpointMetadata, describe
from jaxckpt_train.checkpointables.loading import compare_parts, load_parts
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, NotACheckpointError, StorageError, free_frames
from jaxckpt_train.pytree.flatten import PLACEHOLDER
from jaxckpt_train.pytree.restore import LoadOptions
from jaxckpt_train.pytree.shared_reads import JobLoads
from jaxckpt_train.run.entry import Entry, Restored, Skipped, StepVanishedError
from jaxckpt_train.run.job import JobSync
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import GONE, Backend
from jaxckpt_train.store.committed import UNREADABLE, Committed, is_removed, opened
from jaxckpt_train.store.manifest import MANIFEST_NAME, encode_manifest
from jaxckpt_train.store.manifest_decoding import decode_manifest
from jaxckpt_train.store.reader import ReadProgress
from jaxckpt_train.store.verify import verify

# What a damaged or vanished file looks like. Anything else (no permission, no memory) is not the step's fault.
_DAMAGE = {
    *GONE,
    errno.EIO,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EBADMSG,
    getattr(errno, "EUCLEAN", errno.EIO),  # macOS has none
}
# Of these, what the disk itself says of a file that was committed there; a read that failed may succeed tomorrow.
_PROVEN = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}
_log = logging.getLogger("jaxckpt_train")
# A larger manifest is read by each process itself: the storage gives it to many sooner than process 0 does.
MOST_TOLD_BYTES = 4 << 20


class ByteMeter:
    """Counts the bytes that a load reports, and passes them on."""

    def __init__(self, progress: ReadProgress | None) -> None:
        self.bytes = 0
        self._progress, self._lock = progress, threading.Lock()

    def __call__(self, done: int) -> None:
        """Count some more."""
        with self._lock:
            self.bytes += done
        if self._progress is not None:
            self._progress(done)


def describe_listed(
    backend: Backend, directory: str, listed: Sequence[Entry], progress: ReadProgress | None
) -> CheckpointMetadata:
    """What the first of the listed steps holds.

    Raises:
        CorruptCheckpointError: its manifest is damaged.
        StepVanishedError: it is not there any more; look again.
    """
    path = f"{directory}/{listed[0].name}"
    try:
        return describe(opened(backend, path, progress))
    except (CorruptCheckpointError, NotACheckpointError) as error:
        if not is_removed(backend, path, progress):
            raise
        raise StepVanishedError(listed[0].name) from error


def size_if_readable(describe: Callable[[], CheckpointMetadata]) -> int | None:
    """How many bytes a step holds; None: it cannot be read, which the restore of it finds out, and tells."""
    try:
        return describe().bytes
    except UNREADABLE:
        return None


def restore_newest(
    backend: Backend,
    directory: str,
    candidates: Sequence[Entry],
    targets: Mapping[str, Any] | None,
    settings: StoreSettings,
    progress: ReadProgress | None,
    asked: int | None = None,
    load: Callable[[Committed], dict[str, Any]] | None = None,
) -> Restored:
    """Restore the first of the candidates that is whole.

    Args:
        backend: where.
        directory: the run directory.
        candidates: in the order in which they are tried; at least one.
        targets: by name of the checkpointable, None without targets: all of them.
        settings: how to read.
        progress: called with numbers of bytes.
        asked: the one step that was asked for, if it was.
        load: loads a checkpoint, in a job with the other processes; None: this one alone.

    Raises:
        CorruptCheckpointError: none is whole.
        MismatchError: the first one that can be read does not fit the targets.
        StepVanishedError: one is not there any more; look again.
    """
    started, meter = time.perf_counter(), ByteMeter(progress)
    skipped: list[Skipped] = []
    last: Exception | None = None
    for entry in candidates:
        reading = _Reading(backend, f"{directory}/{entry.name}", entry, targets, settings, meter, load)
        try:
            results = reading.twice()
            reading.tell_if_renamed()
            taken_s = time.perf_counter() - started
            is_mended, is_verified = reading.is_mended(), bool(skipped) and reading.is_verified()
            return Restored(entry, results, skipped, meter.bytes, taken_s, is_mended, is_verified, reading.left_out())
        except (CorruptCheckpointError, NotACheckpointError, StorageError) as error:
            if isinstance(error, StorageError) and error.errno not in _DAMAGE:
                raise
            if is_removed(backend, reading.path, progress):
                raise StepVanishedError(entry.name) from error
            skipped.append(Skipped(entry, str(error), _is_proof(error)))
            last = error
            free_frames(error)  # all that was loaded until then, whose memory the next step needs
            _log.warning("step %d cannot be restored and is skipped: %s", entry.step, error)
    listing = "\n".join(f"  step {each.entry.step}: {each.problem}" for each in skipped)
    what = f"none of {len(skipped)} committed steps can" if asked is None else f"step {asked} cannot"
    instead = "begin anew in another directory" if asked is None else "restore another step"
    raise CorruptCheckpointError(
        f"{directory}: {what} be restored; no file was changed. Bring the damaged files back from a copy "
        "(`jaxckpt_train.verify` tells which), load the parts that are whole by `jaxckpt_train.load_checkpointables`, "
        f"or {instead}:\n{listing}"
    ) from last


def _is_proof(error: Exception) -> bool:
    """Whether bytes are wrong or missing; else they could not be read, or not be found, this time."""
    return isinstance(error, CorruptCheckpointError) or (isinstance(error, StorageError) and error.errno in _PROVEN)


@dataclasses.dataclass
class _Reading:
    """One candidate, and how it is read."""

    backend: Backend
    path: str
    entry: Entry
    targets: Mapping[str, Any] | None
    settings: StoreSettings
    meter: ByteMeter
    load: Callable[[Committed], dict[str, Any]] | None = None
    manifests: set[str] = dataclasses.field(default_factory=set)
    saved_as: object = None
    parts: frozenset[str] = frozenset()

    def twice(self) -> dict[str, Any]:
        """Load it; what came out damaged, or not at all, is read once more: memory, or the way from the disk, may err.

        Raises:
            StepVanishedError: another one has its name since; look again.
        """
        try:
            return self._once()
        except (CorruptCheckpointError, StorageError) as error:
            if isinstance(error, StorageError) and error.errno not in _DAMAGE:
                raise
            first = f"{'is the memory sound' if _is_proof(error) else 'is the disk'}? {error}"
            free_frames(error)
        results = self._once()
        _log.warning("step %d was whole when it was read again; %s", self.entry.step, first)
        return results

    def _once(self) -> dict[str, Any]:
        committed = opened(self.backend, self.path, self.meter)
        self.manifests.add(committed.manifest_sha256)
        self.saved_as = committed.manifest.info.get("step")
        self.parts = frozenset(part.name for part in committed.manifest.parts)
        if len(self.manifests) > 1:
            raise StepVanishedError(self.entry.name)
        if self.load is not None:
            return self.load(committed)
        wanted = {part.name: None for part in committed.manifest.parts} if self.targets is None else self.targets
        return load_parts(self.backend, committed, wanted, self.settings, LoadOptions(donatable=True), self.meter)

    def tell_if_renamed(self) -> None:
        """A directory may have been given another number; whoever did it knows what is trained anew, or not at all."""
        if self.saved_as not in (None, self.entry.step):
            _log.warning("step %d was saved as step %s: %s was renamed", self.entry.step, self.saved_as, self.path)

    def left_out(self) -> frozenset[str]:
        """Names of what the step has and nobody asked for, such as the position in the data."""
        return frozenset() if self.targets is None else self.parts - set(self.targets)

    def is_mended(self) -> bool:
        """Whether it was set aside and is whole again, also where nothing was asked for."""
        return self.entry.damaged is not None and verify(self.backend, self.path, self.settings, self.meter).ok

    def is_verified(self) -> bool:
        """Whether all bytes of all that it holds were read and compared."""
        if not self.settings.verify_on_load or self.targets is None:
            return self.settings.verify_on_load
        try:
            leaves = jax.tree.leaves(dict(self.targets))
        except (TypeError, ValueError):  # a target that is no tree for JAX
            return False
        return self.parts <= set(self.targets) and not any(leaf is PLACEHOLDER for leaf in leaves)


class _Chosen(msgspec.Struct, array_like=True):
    """What process 0 tells: which checkpoint to load, or that all is restored, from which step."""

    directory: str
    sha256: str
    manifest: bytes
    step: int | None


class JobRestore:
    """One restore, as one of the processes does it.

    Args:
        together: the run.
        backend: where.
        targets: by name of the checkpointable, None without targets: all of them.
        settings: how to read.
        progress: called with numbers of bytes that this process reads.
    """

    def __init__(
        self,
        job_sync: JobSync,
        backend: Backend,
        targets: Mapping[str, Any] | None,
        settings: StoreSettings,
        progress: ReadProgress | None,
    ) -> None:
        self._job_sync, self._backend = job_sync, backend
        self._targets, self._settings, self._meter = targets, settings, ByteMeter(progress)
        self._is_told = False

    @contextlib.contextmanager
    def led(self) -> Iterator[Callable[[Committed], dict[str, Any]] | None]:
        """In process 0: within, choose a checkpoint, load it by what this yields, and say that it is `restored`.

        Yields:
            What loads a checkpoint in all processes; None: there is only this one.

        Raises:
            What is raised within, which is told to the others.
        """
        if self._job_sync.is_alone:
            yield None
            return
        try:
            yield self._tell_and_load
        except BaseException as error:
            if not self._is_told:
                self._tell_failure(error)
            raise

    def restored(self, step: int) -> None:
        """In process 0: tell that all have restored this step."""
        if not self._job_sync.is_alone:
            self._is_told = True
            self._job_sync.led("restoring", lambda: _Chosen("", "", b"", step))

    def _tell_failure(self, error: BaseException) -> None:
        def say() -> Any:
            raise error

        with contextlib.suppress(type(error)):
            self._job_sync.led("restoring", say)

    def _tell_and_load(self, committed: Committed) -> dict[str, Any]:
        manifest = encode_manifest(committed.manifest)
        told = manifest if len(manifest) <= MOST_TOLD_BYTES else b""
        chosen = _Chosen(committed.directory, committed.manifest_sha256, told, None)
        self._job_sync.led("restoring", lambda: chosen)
        return self._load(committed.directory, lambda: committed)

    def follow(self) -> tuple[dict[str, Any], int]:
        """In any other process: load what process 0 chooses, until one can be loaded by all.

        Returns:
            What was restored, by name, and from which step.

        Raises:
            What process 0 raised in the end.
        """
        results: dict[str, Any] = {}
        own: BaseException | None = None
        while True:
            try:
                chosen = msgspec.convert(self._job_sync.led("restoring", _never), _Chosen)
            except CheckpointError as told:
                if own is None:
                    raise
                raise own from told  # what a checkpointable's own code has raised here
            if chosen.step is not None:
                return results, chosen.step
            results = {}
            try:
                results = self._load(chosen.directory, lambda chosen=chosen: self._opened(chosen))  # type: ignore[misc]
            except CheckpointError as error:
                if 0 in getattr(error, "lost", ()):
                    raise  # process 0 says nothing more
                free_frames(error)  # process 0 decides what it means, and what is tried next
            except BaseException as error:  # noqa: BLE001  # raised once process 0 has said what comes of it
                own = error

    def _opened(self, chosen: _Chosen) -> Committed:
        if chosen.manifest:
            manifest = decode_manifest(chosen.manifest, f"{chosen.directory}/{MANIFEST_NAME}")
            return Committed(chosen.directory, manifest, chosen.sha256)
        committed = opened(self._backend, chosen.directory, self._meter)
        if committed.manifest_sha256 != chosen.sha256:
            raise CorruptCheckpointError(f"{chosen.directory}: was replaced while it was being restored")
        return committed

    def _load(self, directory: str, open_it: Callable[[], Committed]) -> dict[str, Any]:
        """Load it, and have all succeed, or fail."""

        def look() -> tuple[Committed, Mapping[str, Any]]:
            committed = open_it()
            names = [part.name for part in committed.manifest.parts]
            wanted = dict.fromkeys(names) if self._targets is None else self._targets
            compare_parts(self._backend, committed, wanted, self._settings)
            return committed, wanted

        # First: what does not fit in one process is told at once, and not found missing by those that read together.
        committed, wanted = self._job_sync.all_do(f"comparing with {directory}", look)

        job = self._job_sync.job
        order = job.within("load", self._settings.barrier_timeout_s)  # now, while nothing can fail in one alone
        loads = JobLoads(job, self._settings, order)

        def load() -> dict[str, Any]:
            with loads.told_on_error():
                options = LoadOptions(donatable=True)
                return load_parts(self._backend, committed, wanted, self._settings, options, self._meter, loads)

        return self._job_sync.all_do(f"restoring {directory}", load)


def _never() -> Any:
    raise AssertionError("only process 0 says")

"""A restore by all processes of a job: process 0 chooses the step, all load it, and one that fails is one for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from jaxckpt_train.checkpointables.loading import compare_parts, load_parts
from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, free_frames
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.restoring import ByteMeter
from jaxckpt_train.steps.together import Together
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.manifest import MANIFEST_NAME, encode_manifest
from jaxckpt_train.store.manifest_decoding import decode_manifest
from jaxckpt_train.store.reader import Progress
from jaxckpt_train.store.replaced import opened
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.tree.read_once import JobLoads
from jaxckpt_train.tree.restore import LoadOptions

# A larger manifest is read by each process itself: the storage gives it to many sooner than process 0 does.
MOST_TOLD_BYTES = 4 << 20


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
        together: Together,
        backend: Backend,
        targets: Mapping[str, Any] | None,
        settings: StoreSettings,
        progress: Progress | None,
    ) -> None:
        self._together, self._backend = together, backend
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
        if self._together.is_alone:
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
        if not self._together.is_alone:
            self._is_told = True
            self._together.led("restoring", lambda: _Chosen("", "", b"", step))

    def _tell_failure(self, error: BaseException) -> None:
        def say() -> Any:
            raise error

        with contextlib.suppress(type(error)):
            self._together.led("restoring", say)

    def _tell_and_load(self, committed: Committed) -> dict[str, Any]:
        manifest = encode_manifest(committed.manifest)
        told = manifest if len(manifest) <= MOST_TOLD_BYTES else b""
        chosen = _Chosen(committed.directory, committed.manifest_sha256, told, None)
        self._together.led("restoring", lambda: chosen)
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
                chosen = msgspec.convert(self._together.led("restoring", _never), _Chosen)
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
        committed, wanted = self._together.all_do(f"comparing with {directory}", look)

        job = self._together.job
        order = job.within("load", self._settings.barrier_timeout_s)  # now, while nothing can fail in one alone
        loads = JobLoads(job, self._settings, order)

        def load() -> dict[str, Any]:
            with loads.told_on_error():
                options = LoadOptions(donatable=True)
                return load_parts(self._backend, committed, wanted, self._settings, options, self._meter, loads)

        return self._together.all_do(f"restoring {directory}", load)


def _never() -> Any:
    raise AssertionError("only process 0 says")

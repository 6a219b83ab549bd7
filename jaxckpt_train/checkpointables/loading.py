"""Load the checkpointables of a committed checkpoint through their handlers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxckpt_train._validation import is_url, named
from jaxckpt_train.checkpointables.base import Handler, Json, value_file
from jaxckpt_train.checkpointables.handlers import handler_for_load, handler_of
from jaxckpt_train.checkpointables.iterator_state import DATA_NAME, check_fingerprint
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CorruptCheckpointError, MismatchError, StorageError
from jaxckpt_train.pytree.leaves import Only, has_tree, refused_if_too_deep
from jaxckpt_train.pytree.restore import JobLoads, LoadOptions, TreeRestore
from jaxckpt_train.pytree.target import requested_shardings
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener, Spread
from jaxckpt_train.store.backends.local import LocalBackend, temporary_folder
from jaxckpt_train.store.committed import Committed, check_unchanged
from jaxckpt_train.store.files import copy_file, open_recorded, read_recorded
from jaxckpt_train.store.manifest import NOT_JSON, FileRecord, PartRecord, decode_value
from jaxckpt_train.store.reader import PreopenedFiles, ReadProgress
from jaxckpt_train.store.threads import unlocked_cached_property
from jaxckpt_train.store.timeouts import close_files, report_progress, time_limited
from jaxckpt_train.store.verify import file_problems


class _OpenPart:
    """One checkpointable of an opened checkpoint: the `Saved` that a handler receives."""

    def __init__(
        self,
        files: Opener,
        committed: Committed,
        part: PartRecord,
        settings: StoreSettings,
        options: LoadOptions,
        progress: ReadProgress | None,
        loads: JobLoads,
        downloads: contextlib.ExitStack | None = None,
        here: Opener | None = None,
    ) -> None:
        self._here = here  # what is on this host, if `files` has more
        self._downloads = downloads  # removes local copies of files
        self._files, self._committed, self._part, self._loads = files, committed, part, loads
        self._settings, self._options, self._progress = settings, options, progress
        self.name, self.kind = part.name, part.kind
        self._files_by_name = {file.file: file for file in part.files}
        self.values = sum(value_file(part.name, number) in self._files_by_name for number in range(len(part.files)))
        process = current().process
        self.process = process if process < self.values else 0
        self._returned_directory = False

    def tree(self, like: Any) -> Any:
        return self._restore.load(like, self._options, self._progress, self._loads)

    def compare(self, like: Any) -> None:
        self._restore.compare(like, self._options, self._loads)

    @unlocked_cached_property
    def _restore(self) -> TreeRestore:
        if not has_tree(self._part) and self._part.files:
            self.value()  # the tree of another tool could not be read; this raises the error that says why
        return TreeRestore(self._files, self._committed, self._part, self._settings)

    def value(self) -> Json:
        name, manifest = value_file(self.name, self.process), self._committed.manifest
        record = self._files_by_name.get(name)
        if record is None:
            raise CorruptCheckpointError(
                f"{self._committed.directory}: expected the file {name} in the manifest, found no entry for it"
            )
        digest = manifest.digest if self._settings.verify_on_load else None
        data = _read_value(self._files, self._committed, record, digest)
        try:
            return decode_value(data)
        except NOT_JSON as error:
            raise CorruptCheckpointError(f"{self._committed.directory}/{name}: not JSON: {error}") from error

    def directory(self) -> Path:
        if self._downloads is not None and not self._is_here():
            folder = self._downloads.enter_context(temporary_folder())
            _download(self._files, self._committed, self._part, self._settings.verify_on_load, folder)
            return Path(folder, self.name)
        self._returned_directory = True
        return Path(self._committed.directory, self.name)

    def _is_here(self) -> bool:
        """Whether a path leads to the files. Raises CorruptCheckpointError: one is damaged, and has no other copy."""
        if is_url(self._committed.directory):
            return False
        opener, digests = self._here or self._files, self._settings.verify_on_load
        try:
            problems = _own_problems(opener, self._committed, self._part, digests)
        except StorageError:
            if self._here is None:
                raise
            return False
        if problems and self._here is None:
            raise CorruptCheckpointError(problems[0])
        return not problems

    def check_after(self) -> None:
        """Raise CorruptCheckpointError if files that were read by name may belong to another checkpoint."""
        if self._returned_directory:
            check_unchanged(self._files, self._committed, may_be_gone=False)


@time_limited
def _read_value(files: Opener, committed: Committed, record: FileRecord, digest: str | None) -> np.ndarray:
    data = read_recorded(files, committed.directory, record, digest, committed.manifest.block_bytes)
    if digest is None:
        check_unchanged(files, committed, may_be_gone=False)
    return data


@time_limited
def _own_problems(files: Opener, committed: Committed, part: PartRecord, digests: bool) -> list[str]:
    return [
        problem
        for file in part.files
        for problem in file_problems(files, committed, file, digests=digests, pace=lambda _: report_progress())
    ]


@time_limited
def _download(files: Opener, committed: Committed, part: PartRecord, digests: bool, folder: str) -> None:
    """Copy the files of a checkpointable into a local folder. Raises CorruptCheckpointError if one is damaged."""
    local, manifest = LocalBackend(), committed.manifest
    local.make_directory(f"{folder}/{part.name}", parents=False, sync=False)
    for file in part.files:
        path = f"{folder}/{file.file}"
        local.make_directory(os.path.dirname(path), parents=True, sync=False)
        with contextlib.closing(open_recorded(files, committed.directory, file.file, file.bytes)) as source:
            sink = local.create(path, direct=False)
            found = copy_file(
                source,
                sink,
                manifest.digest,
                lambda _: report_progress(),
                block_bytes=manifest.block_bytes,
                expected=file.digests if digests else None,
            )
        if digests and found != file.digests:
            raise CorruptCheckpointError(f"{committed.directory}/{file.file}: not what was saved (the digest differs)")


def load_parts(
    backend: Opener,
    committed: Committed,
    targets: Mapping[str, Any],
    settings: StoreSettings,
    options: LoadOptions,
    progress: ReadProgress | None = None,
    loads: JobLoads | None = None,
) -> dict[str, Any]:
    """Restore the named checkpointables into their targets, or without a target if it is None.

    With `loads`, all processes of the job load together, as described in `StoreSettings.read_once`, also after a
    failure. The owner of `loads` shares errors with the other processes.
    """
    files, loads = PreopenedFiles(backend, committed, settings.direct_io), loads or JobLoads(None, settings)
    here = backend.here() if isinstance(backend, Spread) else None
    try:
        with contextlib.ExitStack() as downloads, refused_if_too_deep("the target of a load, or its shardings"):
            jobs = []
            for name, target in named("targets", targets).items():
                part = _part_of(committed, name)
                opened = _OpenPart(files, committed, part, settings, options, progress, loads, downloads, here)
                if name == DATA_NAME:
                    check_fingerprint(name, committed.manifest.info.get("fingerprint"))
                jobs.append((handler_for_load(target, part.kind, name), target, opened))
            jobs.sort(key=lambda job: not job[0].early)
            if len(jobs) > 1:  # a single one is compared before it changes anything
                parts = [_part_of(committed, opened.name) for *_, opened in jobs]
                # Retention may remove the checkpoint during the first read.
                files.open_ahead(parts)
                for handler, target, opened in jobs:
                    _compare(handler, target, opened)
            results = {}
            for handler, target, opened in jobs:
                results[opened.name] = handler.restore(target, opened)
                opened.check_after()
            return {name: results[name] for name in targets}
    finally:
        close_files(files.end())


def _compare(handler: Handler, target: Any, opened: _OpenPart) -> None:
    compare = getattr(handler, "compare", None)
    if compare is not None:
        compare(target, opened)


def expect_parts(loads: JobLoads, targets: Mapping[str, Any], only: Only = None, shardings: Any = None) -> None:
    """Tell the loads of a job early what these targets need, as far as it is known before anything can fail."""
    for target in targets.values() if loads.processes > 1 else ():
        tree_of = getattr(handler_of(target), "tree_of", None)  # other handlers state it when they load
        if tree_of is not None:
            loads.expect(requested_shardings(tree_of(target), only, shardings))


def compare_parts(backend: Opener, committed: Committed, targets: Mapping[str, Any], settings: StoreSettings) -> None:
    """Raise MismatchError if `load_parts` would raise it, without reading anything or changing a target."""
    loads = JobLoads(None, settings)
    for name, target in targets.items():
        part = _part_of(committed, name)
        opened = _OpenPart(backend, committed, part, settings, LoadOptions(), None, loads)
        _compare(handler_for_load(target, part.kind, name), target, opened)


def _part_of(committed: Committed, name: str) -> PartRecord:
    part = committed.manifest.part(name)
    if part is None:
        there = ", ".join(repr(part.name) for part in committed.manifest.parts)
        raise MismatchError(
            f"{committed.directory}: has no checkpointable {name!r}; it has {there or 'none'}. Restore only those, and "
            f"start {name!r} afresh"
        )
    return part

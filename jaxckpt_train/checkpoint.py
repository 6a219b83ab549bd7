"""Save, load, inspect and verify single checkpoints.

The first part opens the checkpoint at a path, which may come from this package or from another tool (`use_source`). The
second part holds the public functions: `save`, `load`, `metadata`, `verify` and their variants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from jaxckpt_train._validation import absolute_path, flag, is_url, named
from jaxckpt_train.checkpoint_metadata import CheckpointMetadata, describe, run_info
from jaxckpt_train.checkpointables.loading import expect_parts, load_parts
from jaxckpt_train.checkpointables.saving import CheckpointSave, PathTarget
from jaxckpt_train.checkpointables.staging import wait_until_taken
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CorruptCheckpointError, MismatchError, NotACheckpointError, StorageError
from jaxckpt_train.formats.detect import find_file, find_in_directory
from jaxckpt_train.formats.orbax_read import match_target
from jaxckpt_train.formats.safetensors import KIND as SAFETENSORS
from jaxckpt_train.formats.torch import KIND as PYTORCH
from jaxckpt_train.opened import DEFAULT_NAME, ORBAX, OURS, Opened, open_found
from jaxckpt_train.pending import PendingSave, wait_for_saves_of
from jaxckpt_train.pytree.leaves import Only
from jaxckpt_train.pytree.restore import JobLoads, LoadOptions
from jaxckpt_train.settings import StoreSettings, checked_settings
from jaxckpt_train.store.backends.base import Backend
from jaxckpt_train.store.backends.by_path import backend_for
from jaxckpt_train.store.committed import Committed, use_committed
from jaxckpt_train.store.files import is_file
from jaxckpt_train.store.reader import polling
from jaxckpt_train.store.timeouts import call_with_timeout
from jaxckpt_train.store.transaction import Transaction, begin
from jaxckpt_train.store.verify import VerifyReport, verify_opened
from jaxckpt_train.store.writer import Progress
from jaxckpt_train.transforms.apply import apply_operations, parse_operations
from jaxckpt_train.transforms.operations import Operation

T = TypeVar("T")
PathLike = str | os.PathLike[str]


def options_for(source: Opened, options: LoadOptions) -> LoadOptions:
    """Adapt the options of a load to the tool that wrote the tree."""
    if source.wrote_tree == SAFETENSORS:
        return dataclasses.replace(options, has_types=False)
    if source.wrote_tree in (ORBAX, PYTORCH):
        return dataclasses.replace(options, forms=match_target, has_types=False)
    return options


def main_part(source: Opened) -> str:
    """Return the name of the checkpointable `state`, or of the only one; raise MismatchError if there is neither."""
    names = [part.name for part in source.committed.manifest.parts]
    if DEFAULT_NAME in names:
        return DEFAULT_NAME
    if len(names) == 1:
        return names[0]
    raise MismatchError(
        f"{source.path}: expected a checkpointable {DEFAULT_NAME!r} or a single one, found "
        f"{', '.join(map(repr, names)) or 'none'}; choose with load_checkpointables(path, {{name: target}})"
    )


def transformed(source: Opened, operations: Sequence[Operation]) -> Opened:
    """Apply operations to the main checkpointable of an opened checkpoint."""
    if not operations:
        return source
    found = apply_operations(source.files, source.committed, main_part(source), operations, source.settings)
    return dataclasses.replace(source, files=found.files, committed=found.committed)


def use_source(backend: Backend, path: str, use: Callable[[Opened], T], settings: StoreSettings) -> T:
    """Open the checkpoint at a path and call `use` with it; repeat this if another checkpoint replaces it meanwhile.

    If it has index files, they have not been read.

    It may be of this package, or of Orbax, PyTorch, safetensors or Flax. Raises NotACheckpointError if there is no
    checkpoint of a known format, otherwise as `open_committed` and `open_found`, and what `use` raises.
    """
    if not is_url(path) and is_file(backend, path):
        return use(open_found(backend, find_file(backend, path), settings))
    seen: list[Committed] = []

    def use_ours(committed: Committed) -> T:
        seen.append(committed)
        return use(Opened(OURS, backend, committed, settings))

    try:
        return use_committed(backend, path, use_ours, is_complete=False)
    except NotACheckpointError:
        if seen:
            raise
        # An object comes last, because the look at it is one more request.
        is_object = is_url(path) and is_file(backend, path)
        found = find_file(backend, path) if is_object else find_in_directory(backend, path)
        if found is None:
            raise
    return use(open_found(backend, found, settings))


def absolute(path: PathLike) -> str:
    """Return the absolute path, with `~` expanded; raise SettingsError if `path` is not one."""
    return absolute_path("path", path)


def _to_read(path: PathLike) -> str:
    """Return the absolute path, after waiting for this process's own saves to it."""
    there = absolute(path)
    wait_for_saves_of(there)
    return there


def save(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
    settings: StoreSettings | None = None,
) -> CheckpointMetadata:
    """Save one pytree as a checkpoint, and wait until it is durable. An interrupt only ends the wait.

    Args:
        path: the directory to create.
        tree: any pytree, Flax train state or NNX object. It is stored as the checkpointable `state`.
        overwrite: replace an existing checkpoint. This is atomic if the system can exchange two names (Linux).
        custom_metadata: plain JSON data to keep with the checkpoint, less than 1 MiB. Save more as a JsonValue.
        settings: how to store the data. None: the defaults.

    Raises:
        CheckpointExistsError: something exists at `path`, and `overwrite` is false.
        UnsupportedLeafError: a leaf cannot be stored.
        SettingsError: `custom_metadata` is too large, or `path` has a name that later saves clean up (`.NAME.aside`, or
            at a URL `step-0000000100`).
        StorageError: the file system refused an operation. Previous contents of `path` are unchanged; or, if the disk
            fails again while they are restored, they are in the directory that the error names.
        CheckpointTimeoutError: the file system has not answered for ten minutes.
    """
    return save_async(path, tree, overwrite=overwrite, custom_metadata=custom_metadata, settings=settings).wait()


def save_async(
    path: PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
    settings: StoreSettings | None = None,
) -> PendingSave[CheckpointMetadata]:
    """Save like `save`, but return as soon as later changes of the state no longer matter, and write in the background.

    Returns:
        The pending save. Its `.wait()` returns the metadata or raises the error of the save; for a URL, also that of a
        path that is taken. A script that ends without waiting still completes the save.
    """
    return save_checkpointables_async(
        path, {DEFAULT_NAME: tree}, overwrite=overwrite, custom_metadata=custom_metadata, settings=settings
    )


def save_checkpointables(
    path: PathLike,
    checkpointables: Mapping[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
    settings: StoreSettings | None = None,
) -> CheckpointMetadata:
    """Save like `save`, but several checkpointables by name: pytrees, Flax objects, iterators, JsonValue."""
    return save_checkpointables_async(
        path, checkpointables, overwrite=overwrite, custom_metadata=custom_metadata, settings=settings
    ).wait()


def save_checkpointables_async(
    path: PathLike,
    checkpointables: Mapping[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
    settings: StoreSettings | None = None,
) -> PendingSave[CheckpointMetadata]:
    """Save like `save_async`, but several checkpointables by name."""
    final, chosen = absolute(path), checked_settings("settings", settings)
    info, replace = dict[str, Any](), flag("overwrite", overwrite)
    job = current().within("save", chosen.barrier_timeout_s)
    backend = backend_for(chosen)
    target = PathTarget(backend, final, chosen, info, replace)
    save = CheckpointSave(job, final, backend, chosen)
    # In a job, all processes get the error when they wait. An object store may take seconds to answer.
    begins_here = job.processes == 1 and not is_url(final)
    with save.sharing_errors():
        if begins_here:
            target.check()
        save.stage(checkpointables)
        info |= run_info(custom_metadata)
        if begins_here:  # here, so that the call refuses a wrong path
            target.transaction = save.transaction = call_with_timeout(
                final, lambda: begin(backend, final, chosen), undo=_abort
            )
    pending = save.start(lambda: describe(save.write_and_commit(target)))
    wait_until_taken(save.parts, pending)
    return pending


def _abort(transaction: Transaction) -> None:
    """Remove an abandoned attempt. Files that cannot be removed now are cleaned up after this process has ended."""
    with contextlib.suppress(StorageError):
        transaction.abort()


def load(
    path: PathLike,
    like: Any = None,
    *,
    only: Only = None,
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    missing: Literal["error", "keep"] = "error",
    shardings: Any = None,
    transforms: Sequence[Any] | None = None,
    donatable: bool | None = None,
    settings: StoreSettings | None = None,
    progress: Progress | None = None,
) -> Any:
    """Load one pytree: the checkpointable `state`, or the only one there is.

    Args:
        path: the path of a checkpoint, of a step directory of a run, or of a checkpoint of another tool: a step or an
            item of Orbax, a safetensors file or a folder of them, a msgpack file of Flax, or a directory with several
            of these. From such a directory the newest is loaded, as Flax does.
        like: the tree to load into. Its leaves are arrays, `jax.ShapeDtypeStruct`, numpy arrays, values, or
            PLACEHOLDER, which skips the leaf. NNX objects are restored in place. Dtypes and weak types come from the
            checkpoint; weakly typed arrays and Python numbers in `like` accept any. None: nested dicts and lists of
            numpy arrays.
        only: a pattern of leaf paths such as "params/**", several patterns, or a predicate. Only matching leaves are
            read; other leaves of `like` are returned unchanged. In a key, write "~" as "~0", "/" as "~1" and "@" as
            "~2".
        rename: new names for saved leaf paths, `{"old/**": "new/**"}`.
        cast: convert dtypes within floats, within integers, and upwards, but never from float to integer. Floats are
            rounded.
        missing: what to do with a leaf of `like` that is not in the checkpoint: "error" raises MismatchError, "keep"
            keeps its value.
        shardings: one sharding or a tree of them, for leaves of `like` without a sharding, or for a load without
            `like`.
        transforms: operations on the stored tree that run before all other options; see `jaxckpt_train.transforms`.
        donatable: on the CPU, copy arrays into memory that JAX reuses when they are donated to a computation. Without
            the copy they stay in the memory into which they were read. The load is then faster, but the first step that
            donates them holds the state twice. None: copy the arrays that replace a `jax.Array` of `like`. Restores of
            a run always copy. Other devices need no copy.
        settings: how to read. None: the defaults.
        progress: called with the number of bytes of each read.

    Raises:
        NotACheckpointError: there is no committed checkpoint at `path`.
        MismatchError: the checkpoint and `like` differ; it lists all differences and is raised before any array is
            read. With `cast`, also: an integer does not fit into the new dtype, or a finite float is beyond its range.
        CorruptCheckpointError: the bytes are not what was saved.
        CheckpointTimeoutError: the disk has not answered for ten minutes; or another process that takes part in the
            load (see `StoreSettings.read_once`) did not join or made no progress.
        OtherProcessError: another process loads something else, or failed.
    """
    chosen = checked_settings("settings", settings)
    loads = JobLoads(current(), chosen)
    with loads.sharing_errors():
        expect_parts(loads, {DEFAULT_NAME: like}, only, shardings)
        options = LoadOptions(
            only=only, rename=rename, cast=cast, missing=missing, shardings=shardings, donatable=donatable
        )
        there = _to_read(path)
        operations = () if transforms is None else parse_operations("transforms", transforms)

        def load_main(source: Opened) -> Any:
            name, changed = main_part(source), transformed(source, operations)
            files, there, how = changed.files, changed.committed, options_for(changed, options)
            return load_parts(files, there, {name: like}, changed.settings, how, progress, loads)[name]

        with polling(progress):
            return use_source(backend_for(chosen), there, load_main, chosen)


def load_checkpointables(
    path: PathLike,
    targets: Mapping[str, Any] | None = None,
    *,
    settings: StoreSettings | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Load several checkpointables by name, each into its target, or without one if the target is None.

    Args:
        path: as for `load`.
        targets: the names to load, and their targets. None: all checkpointables, without targets.
        settings: how to read. None: the defaults.
        progress: called with the number of bytes of each read.

    It raises the same errors as `load`.
    """
    chosen = checked_settings("settings", settings)
    loads = JobLoads(current(), chosen)

    def load_named(source: Opened) -> dict[str, Any]:
        names = [part.name for part in source.committed.manifest.parts]
        wanted = dict.fromkeys(names) if targets is None else targets
        how = options_for(source, LoadOptions())
        return load_parts(source.files, source.committed, wanted, source.settings, how, progress, loads)

    with loads.sharing_errors():
        expect_parts(loads, {} if targets is None else named("targets", targets))
        there = _to_read(path)
        with polling(progress):
            return use_source(backend_for(chosen), there, load_named, chosen)


def metadata(path: PathLike, *, settings: StoreSettings | None = None) -> CheckpointMetadata:
    """Describe the contents of a checkpoint. Reads no array data and touches no device.

    Raises NotACheckpointError, CorruptCheckpointError or FormatVersionError; see `errors`.
    """
    chosen = checked_settings("settings", settings)
    return use_source(backend_for(chosen), _to_read(path), lambda source: describe(source.committed), chosen)


def verify(path: PathLike, *, settings: StoreSettings | None = None) -> VerifyReport:
    """Read and check every byte of a checkpoint. Damage is reported, not raised.

    Raises NotACheckpointError if nothing is committed at `path`, or retention removed it meanwhile.
    """
    chosen, there = checked_settings("settings", settings), _to_read(path)
    backend = backend_for(chosen)

    def verify_or_raise(committed: Committed) -> VerifyReport:
        report = verify_opened(backend, committed, chosen)
        if not report.ok:  # raising lets `use_committed` retry if the checkpoint was being replaced
            raise _DamagedError(report)
        return report

    try:
        return use_committed(backend, there, verify_or_raise, is_complete=False)
    except _DamagedError as error:
        return error.report
    except CorruptCheckpointError as error:  # the manifest is damaged
        return VerifyReport(there, 0, (str(error),))


class _DamagedError(CorruptCheckpointError):
    """The damage that a verification found."""

    def __init__(self, report: VerifyReport) -> None:
        super().__init__(*report.problems)
        self.report = report

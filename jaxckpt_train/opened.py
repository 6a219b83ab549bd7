"""Opened checkpoints of this package or of other tools: their contents, and how to read them. Needs no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxckpt_train.errors import CorruptCheckpointError, MismatchError, StorageError
from jaxckpt_train.formats.flax import open_flax
from jaxckpt_train.formats.foreign import PYTREE, ForeignCheckpoint
from jaxckpt_train.formats.step_folders import FlaxFile
from jaxckpt_train.pytree.leaves import TreeRecord, decode_tree, has_tree
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import GONE, Backend, Opener
from jaxckpt_train.store.committed import Committed, checkpoint_path
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord
from jaxckpt_train.store.threads import unlocked_cached_property

OURS, ORBAX = "jaxckpt_train", "Orbax"
DEFAULT_NAME = "state"
IMPORTED_KIND = "imported_kind"  # a key of the manifest's information


@dataclasses.dataclass(frozen=True)
class Opened:
    """An opened checkpoint of this package or of another tool."""

    kind: str  # the tool that wrote it
    files: Opener
    committed: Committed
    settings: StoreSettings  # how it is read; a checkpoint without digests cannot be verified
    run: str | None = None  # the directory of its run, if it was found there
    skipped: tuple[str, ...] = ()  # the names of newer steps of its run that cannot be restored
    decoding: int = 0  # the additional memory to read an array, as a multiple of its size

    @property
    def wrote_tree(self) -> object:
        """The tool whose form the trees have: for an imported checkpoint, the one that it was imported from."""
        return self.committed.manifest.info.get(IMPORTED_KIND, self.kind) if self.kind == OURS else self.kind

    @property
    def path(self) -> str:
        """The directory with the files of the checkpoint."""
        return self.committed.directory

    @property
    def location(self) -> str:
        """The path by which users know the checkpoint."""
        return checkpoint_path(self.path)

    @unlocked_cached_property
    def trees(self) -> Mapping[str, TreeRecord]:
        """The checkpointables that are trees, by name. Raises CorruptCheckpointError if one is damaged."""
        parts = self.committed.manifest.parts
        return {part.name: decode_tree(part, self.path) for part in parts if has_tree(part)}

    def arrays(self) -> dict[str, ArrayRecord]:
        """Return all arrays by the name of their checkpointable and their leaf path."""
        return {f"{part.name}/{array.name}": array for part in self.committed.manifest.parts for array in part.arrays}

    def part(self, name: str | None) -> PartRecord:
        """Return a checkpointable by name; None: `state`, or the only tree. Raises MismatchError if there is none."""
        trees = self.trees
        state = self.committed.manifest.part(DEFAULT_NAME)
        is_state = state is not None and (has_tree(state) or state.kind == PYTREE)
        wanted = name or (DEFAULT_NAME if is_state else next(iter(trees), "") if len(trees) == 1 else "")
        found = self.committed.manifest.part(wanted) if wanted else None
        if found is None:
            there = ", ".join(repr(part.name) for part in self.committed.manifest.parts) or "none"
            advice = "; choose one with --part" if trees and name is None else ""
            expected = f"a checkpointable {DEFAULT_NAME!r}, or a single tree, found {len(trees) or 'none'}"
            if name is not None:
                expected = f"one of its checkpointables, found {name!r}"
            raise MismatchError(f"{self.path}: expected {expected}; it has {there}{advice}")
        if found.kind == PYTREE and not has_tree(found) and found.files:
            # The tree could not be read; opening its file raises the error that says why.
            self.files.open(self.path, found.files[0].file, direct=False).close()
        return found


def open_found(backend: Backend, found: ForeignCheckpoint | FlaxFile, settings: StoreSettings) -> Opened:
    """Open a checkpoint of another tool.

    Raises NotACheckpointError: the file has no known format; CorruptCheckpointError: it is damaged. If it is Flax's
    newest checkpoint, no older one is used instead; UnsupportedLeafError: it has leaves that this package cannot read;
    StorageError: it cannot be read, or does not fit into memory.
    """
    if isinstance(found, FlaxFile):
        found = _open_flax(backend, found)
    unverified = dataclasses.replace(settings, verify_on_load=False)
    return Opened(found.kind, found.files, found.committed, unverified, decoding=found.decoding)


def _open_flax(backend: Backend, found: FlaxFile) -> ForeignCheckpoint:
    try:
        return open_flax(backend, found.path, is_checkpoint=found.directory is not None)
    except StorageError as error:
        from jaxckpt_train.formats.detect import find_in_directory  # imports the readers of all formats

        newer = find_in_directory(backend, found.directory) if found.directory and found.is_newest else None
        if error.errno not in GONE or newer is None or newer == found:
            raise
        # Flax removed this checkpoint after it saved a newer one
        return _open_flax(backend, newer) if isinstance(newer, FlaxFile) else newer
    except CorruptCheckpointError as error:
        if found.before is None:
            raise
        raise CorruptCheckpointError(
            f"{error}. It is the newest checkpoint in {found.directory}, and no older one is loaded instead; to load "
            f"the one before it, pass {found.before}"
        ) from error

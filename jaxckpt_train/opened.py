"""An opened checkpoint, of ours or of another tool: what it holds, and how it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxckpt_train.errors import CorruptCheckpointError, MismatchError, StorageError
from jaxckpt_train.formats.flax_directory import FlaxFile
from jaxckpt_train.formats.foreign import PYTREE, Foreign
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import GONE, Backend, Opener
from jaxckpt_train.store.made_once import made_once
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.tree.leaf_records import TreeRecord, decode_tree, has_tree

OURS, ORBAX, FLAX = "jaxckpt_train", "Orbax", "Flax"
DEFAULT_NAME = "state"
IMPORTED_KIND = "imported_kind"  # in the manifest


@dataclasses.dataclass(frozen=True)
class Opened:
    """An opened checkpoint.

    Attributes:
        kind: the tool that wrote it.
        files: what it is read from.
        committed: what it holds.
        settings: how it is read: what has no digests cannot be verified.
        run: the directory of its run, if it was found by that.
        skipped: the names of newer steps of its run that cannot be restored.
        decoding: how many times its size reading an array takes beside that, in other libraries.
    """

    kind: str
    files: Opener
    committed: Committed
    settings: StoreSettings
    run: str | None = None
    skipped: tuple[str, ...] = ()
    decoding: int = 0

    @property
    def wrote_tree(self) -> object:
        """The tool whose form the trees have: of an import it is the one that it came from."""
        return self.committed.manifest.info.get(IMPORTED_KIND, self.kind) if self.kind == OURS else self.kind

    @property
    def path(self) -> str:
        """Where it is."""
        return self.committed.directory

    @made_once
    def trees(self) -> Mapping[str, TreeRecord]:
        """The checkpointables that are trees, by name; CorruptCheckpointError if one is damaged."""
        parts = self.committed.manifest.parts
        return {part.name: decode_tree(part, self.path) for part in parts if has_tree(part)}

    def arrays(self) -> dict[str, ArrayRecord]:
        """All arrays, by the name of their checkpointable and their leaf path."""
        return {f"{part.name}/{array.name}": array for part in self.committed.manifest.parts for array in part.arrays}

    def part(self, name: str | None) -> PartRecord:
        """A checkpointable by its name; None: `state`, or the only tree.

        Raises:
            MismatchError: there is none such.
            CorruptCheckpointError: it is a tree of another tool that is damaged.
        """
        trees = self.trees
        state = self.committed.manifest.part(DEFAULT_NAME)
        is_state = state is not None and (has_tree(state) or state.kind == PYTREE)
        wanted = name or (DEFAULT_NAME if is_state else next(iter(trees), "") if len(trees) == 1 else "")
        found = self.committed.manifest.part(wanted) if wanted else None
        if found is None:
            raise MismatchError(f"{self.path}: {self._why_no_part(name)}")
        if found.kind == PYTREE and not has_tree(found) and found.files:
            self.files.open(self.path, found.files[0].file, direct=False).close()  # which tells why it has none
        return found

    def _why_no_part(self, name: str | None) -> str:
        there = ", ".join(repr(part.name) for part in self.committed.manifest.parts) or "none"
        if name is not None:
            return f"expected one of its checkpointables, found {name!r}; it has {there}"
        if not self.trees:
            return f"expected a checkpointable that is a tree, found none; it has {there}"
        several = ", ".join(map(repr, self.trees))
        return f"has no checkpointable {DEFAULT_NAME!r} but several trees, {several}; choose one with --part"


def open_found(backend: Backend, found: Foreign | FlaxFile, settings: StoreSettings) -> Opened:
    """Open what another tool has written.

    Args:
        backend: where.
        found: at a path.
        settings: how it is going to be read.

    Raises:
        NotACheckpointError: it is a file of no form that is known here, or Flax is not installed to read it.
        CorruptCheckpointError: it is damaged; where it is the newest of Flax's no older one is taken.
        UnsupportedLeafError: it has leaves that are not read here.
        StorageError: it cannot be read, or does not fit into memory.
    """
    if isinstance(found, Foreign):
        unverified = dataclasses.replace(settings, verify_on_load=False)
        return Opened(found.kind, found.files, found.committed, unverified, decoding=found.decoding)
    from jaxckpt_train.checkpointables.flax_legacy import open_flax_file  # which needs Flax, and so JAX
    from jaxckpt_train.formats.found import find_in_directory

    try:
        memory, committed = open_flax_file(backend, found, settings)
    except StorageError as error:
        newer = find_in_directory(backend, found.directory) if found.directory and found.is_newest else None
        if error.errno not in GONE or newer is None or newer == found:
            raise
        return open_found(backend, newer, settings)  # Flax removes an older one as soon as it has a newer
    except CorruptCheckpointError as error:
        if found.before is None:
            raise
        raise CorruptCheckpointError(
            f"{error}. It is the newest one in {found.directory}, and no older one is taken in its place; to go back "
            f"to the one before, give {found.before}"
        ) from error
    return Opened(FLAX, memory, committed, settings)

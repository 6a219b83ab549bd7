"""Opens what a user names: a checkpoint, a step of a run, or what another tool has written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxckpt_train.errors import CheckpointError, MismatchError, NotACheckpointError, StepNotFoundError, StorageError
from jaxckpt_train.formats.foreign import Foreign
from jaxckpt_train.formats.found import open_foreign_directory, open_foreign_file
from jaxckpt_train.looking.run_look import has_steps, look_at_run, newest_whole
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Backend, Opener
from jaxckpt_train.store.local import is_file
from jaxckpt_train.store.manifest import ArrayRecord, PartRecord
from jaxckpt_train.store.transaction import Committed, open_committed
from jaxckpt_train.tree.leaf_records import TreeRecord, decode_tree

OURS = "jaxckpt_train"


@dataclasses.dataclass(frozen=True)
class Opened:
    """An opened checkpoint.

    Attributes:
        kind: the tool that wrote it.
        files: what it is read from.
        committed: what it holds.
        settings: how it is read.
        run: the directory of its run, if it was found by that.
    """

    kind: str
    files: Opener
    committed: Committed
    settings: StoreSettings
    run: str | None = None

    @property
    def path(self) -> str:
        """Where it is."""
        return self.committed.directory

    def trees(self) -> dict[str, TreeRecord]:
        """The checkpointables that are trees, by name."""
        parts = self.committed.manifest.parts
        return {part.name: decode_tree(part, self.path) for part in parts if bytes(part.detail) != b"null"}

    def arrays(self) -> dict[str, ArrayRecord]:
        """All arrays, by the name of their checkpointable and their leaf path."""
        return {f"{part.name}/{array.name}": array for part in self.committed.manifest.parts for array in part.arrays}

    def part(self, name: str | None) -> PartRecord:
        """A checkpointable by its name; None: `state`, or the only tree.

        Raises:
            MismatchError: there is none such.
        """
        trees = self.trees()
        wanted = name or ("state" if "state" in trees else next(iter(trees), "") if len(trees) == 1 else "")
        found = self.committed.manifest.part(wanted) if wanted else None
        if found is None:
            there = ", ".join(repr(part.name) for part in self.committed.manifest.parts) or "none"
            raise MismatchError(f"{self.path}: expected one of its checkpointables, found {name!r}; it has {there}")
        return found


def open_at(backend: Backend, path: str, step: int | None = None, *, verify: bool = True) -> Opened:
    """Open what is at a path.

    Args:
        backend: where.
        path: absolute; of a checkpoint, a run, or what Orbax, PyTorch, safetensors or Flax have written.
        step: of a run; None: the newest that is whole.
        verify: whether digests are compared when it is read.

    Raises:
        NotACheckpointError: there is none, or no such step.
        CorruptCheckpointError: it is damaged.
        StorageError: it cannot be read.
    """
    settings = StoreSettings(verify_on_load=verify)
    if is_file(path):
        return _of_file(backend, path, settings)
    if _is_run(backend, path):
        name = _step_of(backend, path, step)
        return Opened(OURS, backend, open_committed(backend, f"{path}/{name}"), settings, path)
    if step is not None:
        raise NotACheckpointError(f"{path}: expected a run to take step {step} of, found none")
    try:
        return Opened(OURS, backend, open_committed(backend, path), settings)
    except NotACheckpointError:
        foreign = open_foreign_directory(backend, path)
        if foreign is None:
            raise
    return _of_foreign(foreign, settings)


def _is_run(backend: Backend, path: str) -> bool:
    try:
        return has_steps(backend, path)
    except StorageError:
        return False


def _step_of(backend: Backend, path: str, step: int | None) -> str:
    looks = look_at_run(backend, path)
    if step is None:
        found = newest_whole(looks)
        if found is None:
            raise StepNotFoundError(f"{path}: has no step that can be restored; `jaxckpt ls {path}` says why")
        return found.name
    same = [each for each in looks if each.step == step]
    if not same:
        there = ", ".join(str(each.step) for each in looks[-5:]) or "none"
        raise StepNotFoundError(f"{path}: has no step {step}; the last ones are {there}")
    return next((each.name for each in same if each.is_current), same[-1].name)


def _of_file(backend: Backend, path: str, settings: StoreSettings) -> Opened:
    foreign = open_foreign_file(backend, path)
    if foreign is not None:
        return _of_foreign(foreign, settings)
    from jaxckpt_train.checkpointables.flax_legacy import open_flax_file  # which needs Flax, and so JAX

    memory, committed = open_flax_file(backend, path, settings)
    return Opened("Flax", memory, dataclasses.replace(committed, directory=path), settings)


def _of_foreign(foreign: Foreign, settings: StoreSettings) -> Opened:
    unverified = dataclasses.replace(settings, verify_on_load=False)
    return Opened(foreign.kind, foreign.files, foreign.committed, unverified)


def metadata_of(opened: Opened) -> Mapping[str, object]:
    """What a checkpoint says of itself beside its tree."""
    info = opened.committed.manifest.info
    known = ("step", "created", "metrics", "custom_metadata", "versions", "temporary")
    return {name: info[name] for name in known if name in info}


def is_damage(error: CheckpointError) -> bool:
    """Whether an error tells of damage, and not of a wrong question."""
    return type(error).__name__ in ("CorruptCheckpointError", "IncompleteCheckpointError", "FormatVersionError")

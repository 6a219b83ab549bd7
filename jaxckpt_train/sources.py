"""What a path stands for: a checkpoint of ours, or one of another tool that is read as if it were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxckpt_train.checkpointables.flax_legacy import open_flax_file
from jaxckpt_train.errors import MismatchError, NotACheckpointError
from jaxckpt_train.formats.foreign import Foreign
from jaxckpt_train.formats.found import open_foreign_directory, open_foreign_file
from jaxckpt_train.formats.orbax_names import in_form_of
from jaxckpt_train.formats.torch_checkpoint import KIND as PYTORCH
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.answers import answer_of
from jaxckpt_train.store.backend import Backend, Opener
from jaxckpt_train.store.local import is_file
from jaxckpt_train.store.replaced import use_committed
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.surgery.operate import operate
from jaxckpt_train.surgery.operation import Operation
from jaxckpt_train.tree.restore import LoadOptions

T = TypeVar("T")
Progress = Callable[[int], object]
DEFAULT_NAME = "state"
OURS, ORBAX = "jaxckpt_train", "Orbax"


@dataclasses.dataclass(frozen=True)
class OpenSource:
    """An opened checkpoint.

    Attributes:
        kind: the tool that wrote it.
        files: what it is read from.
        committed: what it holds.
        settings: how it is read: what has no digests cannot be verified.
    """

    kind: str
    files: Opener
    committed: Committed
    settings: StoreSettings

    def options(self, options: LoadOptions) -> LoadOptions:
        """How a tree of it is loaded."""
        return dataclasses.replace(options, forms=in_form_of) if self.kind in (ORBAX, PYTORCH) else options

    def main_part(self) -> str:
        """The name of the checkpointable `state`, or of the only one.

        Raises:
            MismatchError: there are others only.
        """
        names = [part.name for part in self.committed.manifest.parts]
        if DEFAULT_NAME in names:
            return DEFAULT_NAME
        if len(names) == 1:
            return names[0]
        raise MismatchError(
            f"{self.committed.directory}: has no checkpointable {DEFAULT_NAME!r} but "
            f"{', '.join(map(repr, names)) or 'none'}; choose with load_checkpointables(path, {{name: target}})"
        )

    def operated(self, operations: Sequence[Operation], name: str | None = None) -> OpenSource:
        """With operations applied to one checkpointable, by default the main one."""
        if not operations:
            return self
        found = operate(self.files, self.committed, name or self.main_part(), operations, self.settings)
        return dataclasses.replace(self, files=found.files, committed=found.committed)


def use_source(
    backend: Backend,
    path: str,
    use: Callable[[OpenSource], T],
    settings: StoreSettings,
    progress: Progress | None = None,
) -> T:
    """Open what is at a path and call `use` with it; once more whenever another checkpoint took its place meanwhile.

    Args:
        backend: where.
        path: of a checkpoint of ours, or of what Orbax, PyTorch, safetensors or Flax have written.
        use: called with it.
        settings: how it is read.
        progress: called with 0 while it is waited for; what it raises ends that.

    Raises:
        NotACheckpointError: there is none that is known here.
        As `open_committed`, and what `use` raises.
    """
    if answer_of(path, lambda moved: is_file(path), progress):
        return use(_open_file(backend, path, settings))
    seen: list[Committed] = []

    def use_ours(committed: Committed) -> T:
        seen.append(committed)
        return use(OpenSource(OURS, backend, committed, settings))

    try:
        return use_committed(backend, path, use_ours, progress)
    except NotACheckpointError:
        foreign = None if seen else answer_of(path, lambda moved: open_foreign_directory(backend, path), progress)
        if foreign is None:
            raise
    return use(_of_foreign(foreign, settings))


def _open_file(backend: Backend, path: str, settings: StoreSettings) -> OpenSource:
    foreign = open_foreign_file(backend, path)
    if foreign is not None:
        return _of_foreign(foreign, settings)
    memory, committed = open_flax_file(backend, path, settings)
    return OpenSource("Flax", memory, committed, settings)


def _of_foreign(foreign: Foreign, settings: StoreSettings) -> OpenSource:
    unverified = dataclasses.replace(settings, verify_on_load=False)
    return OpenSource(foreign.kind, foreign.files, foreign.committed, unverified)

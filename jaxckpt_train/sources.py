"""What a path stands for when it is loaded: a checkpoint of ours, or one of another tool, read as if it were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxckpt_train.errors import MismatchError, NotACheckpointError
from jaxckpt_train.formats.found import find_file, find_in_directory
from jaxckpt_train.formats.orbax_names import in_form_of
from jaxckpt_train.formats.safetensors_files import KIND as SAFETENSORS
from jaxckpt_train.formats.torch_checkpoint import KIND as PYTORCH
from jaxckpt_train.opened import DEFAULT_NAME, ORBAX, OURS, Opened, open_found
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.answers import answer_of
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.local import is_file
from jaxckpt_train.store.reader import Progress as ReadProgress
from jaxckpt_train.store.replaced import use_committed
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.surgery.operate import operate
from jaxckpt_train.surgery.operation import Operation
from jaxckpt_train.tree.restore import LoadOptions

T = TypeVar("T")


def options_for(source: Opened, options: LoadOptions) -> LoadOptions:
    """How a tree of it is loaded."""
    if source.wrote_tree == SAFETENSORS:
        return dataclasses.replace(options, has_types=False)
    if source.wrote_tree in (ORBAX, PYTORCH):
        return dataclasses.replace(options, forms=in_form_of, has_types=False)
    return options


def main_part(source: Opened) -> str:
    """The name of the checkpointable `state`, or of the only one.

    Raises:
        MismatchError: there are others only.
    """
    names = [part.name for part in source.committed.manifest.parts]
    if DEFAULT_NAME in names:
        return DEFAULT_NAME
    if len(names) == 1:
        return names[0]
    raise MismatchError(
        f"{source.path}: has no checkpointable {DEFAULT_NAME!r} but "
        f"{', '.join(map(repr, names)) or 'none'}; choose with load_checkpointables(path, {{name: target}})"
    )


def operated(source: Opened, operations: Sequence[Operation]) -> Opened:
    """With operations applied to the main one of its checkpointables."""
    if not operations:
        return source
    found = operate(source.files, source.committed, main_part(source), operations, source.settings)
    return dataclasses.replace(source, files=found.files, committed=found.committed)


def use_source(
    backend: Backend,
    path: str,
    use: Callable[[Opened], T],
    settings: StoreSettings,
    progress: ReadProgress | None = None,
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
        As `open_committed` and `open_found`, and what `use` raises.
    """
    if answer_of(path, lambda moved: is_file(path), progress):
        return use(open_found(backend, find_file(backend, path), settings))
    seen: list[Committed] = []

    def use_ours(committed: Committed) -> T:
        seen.append(committed)
        return use(Opened(OURS, backend, committed, settings))

    try:
        return use_committed(backend, path, use_ours, progress)
    except NotACheckpointError:
        found = None if seen else answer_of(path, lambda moved: find_in_directory(backend, path), progress)
        if found is None:
            raise
    return use(open_found(backend, found, settings))

"""Remembers what was saved last, so that the next save of the same run need not write it again."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from jaxckpt_train.checkpointables.staging import StagedPart, first_of
from jaxckpt_train.errors import CheckpointError
from jaxckpt_train.pytree.identity import LastSaved, LeafIdentities
from jaxckpt_train.pytree.leaves import idle_pattern, leaf_filter
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.base import Opener
from jaxckpt_train.store.committed import Committed, with_chunks_of
from jaxckpt_train.store.manifest import BLOCK_BYTES
from jaxckpt_train.store.reuse import Unchanged, WrittenBefore, steady_arrays
from jaxckpt_train.store.writer import WrittenArrays, segment_prefix

_log = logging.getLogger("jaxckpt_train")


class UnchangedLeaves:
    """The newest committed checkpoint of a run, as far as this process has written or restored it.

    Args:
        frozen: patterns of leaf paths that never change; they get files of their own from the first save on.
    """

    def __init__(self, frozen: Sequence[str] | None = None) -> None:
        self._frozen, self._is_frozen = frozen, None if frozen is None else leaf_filter(frozen)
        self._last: dict[str, LastSaved] = {}

    def last(self, part: str) -> LastSaved | None:
        """What was saved last of a checkpointable."""
        return self._last.get(part)

    def known(self, part: StagedPart) -> Unchanged:
        """What is known about the arrays of a part that is about to be written."""
        assert part.snapshot is not None
        last, frozen = self._last.get(part.name), frozenset[str]()
        if self._is_frozen is not None:
            frozen = frozenset(filter(self._is_frozen, (array.name for array in part.snapshot.arrays)))
        # A save that has ended since this one was staged may have other arrays.
        same = part.snapshot.same if part.snapshot.last is last else frozenset[str]()
        return Unchanged(None if last is None else last.before, same, frozen)

    def look(self, parts: Sequence[StagedPart]) -> None:
        """Warn, once, if a pattern of `frozen` selects no leaf."""
        frozen, self._frozen = self._frozen, None
        if frozen is None:
            return
        names = [array.name for part in parts if part.snapshot is not None for array in part.snapshot.arrays]
        idle = idle_pattern(frozen, names)
        if idle is not None:
            found = first_of(list(map(repr, names))) or "no array"
            _log.warning("frozen: the pattern %r selects no leaf of what is saved: %s", idle, found)

    def committed(
        self, directory: str, parts: Sequence[StagedPart], written: Mapping[str, tuple[int, WrittenArrays]]
    ) -> None:
        """Remember a committed checkpoint: for each part, the number of its first segment, and what was written."""
        last = dict[str, LastSaved]()
        for part in parts:
            if part.snapshot is not None and part.snapshot.identities is not None and part.name in written:
                first, arrays = written[part.name]
                before = self._last.get(part.name)
                last[part.name] = LastSaved(
                    WrittenBefore(
                        directory,
                        dict(enumerate(arrays.segments, first)),
                        {array.name: array for array in arrays.arrays if array.chunks},
                        steady_arrays(None if before is None else before.before, arrays.arrays),
                        frozenset(range(first, first + arrays.taken)),
                    ),
                    part.snapshot.identities,
                )
        self._last = last

    def restored(self, files: Opener, committed: Committed | None, process: int, settings: StoreSettings) -> None:
        """Remember what a process of this number wrote of the checkpoint from which the run continues."""
        self._last = {}
        if committed is None:
            return
        try:
            committed = with_chunks_of(files, committed, process)
        except CheckpointError as error:  # the next save writes everything
            _log.warning("what has not changed since %s will be written again: %s", committed.directory, error)
            return
        manifest, nothing = committed.manifest, LeafIdentities((), ())
        if (manifest.digest, manifest.block_bytes) != (settings.digest, BLOCK_BYTES):
            return
        for part in manifest.parts:
            start = segment_prefix(part.name, process)
            own = {number: each for number, each in enumerate(manifest.segments) if each.file.startswith(start)}
            arrays = {}
            for array in part.arrays:
                chunks = tuple(chunk for chunk in array.chunks if chunk.segment in own)
                if chunks:
                    arrays[array.name] = msgspec.structs.replace(array, chunks=chunks)
            before = WrittenBefore(committed.directory, own, arrays)
            self._last[part.name] = LastSaved(before, nothing)

    def forget(self) -> None:
        """Let the next save write everything: it is not certain what is on the disk."""
        self._last = {}

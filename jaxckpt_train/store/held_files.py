"""The files of a checkpoint of several parts: open from the start, whatever retention removes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backend import Opener, Source
from jaxckpt_train.store.manifest import PartRecord
from jaxckpt_train.store.sources import OPEN_AT_ONCE
from jaxckpt_train.store.transaction import Committed

_TOO_MANY = (errno.EMFILE, errno.ENFILE)

Direct = bool | Literal["auto"]


class HeldFiles:
    """Opens files; those of one checkpoint that it holds, without looking for their names again.

    Args:
        files: where.
        committed: the opened checkpoint.
        direct: how its segments are going to be opened.
    """

    def __init__(self, files: Opener, committed: Committed, direct: Direct) -> None:
        self._files, self._committed, self._direct = files, committed, direct
        self._held: dict[tuple[str, Direct], Source] = {}
        self._is_closed = False
        self._lock = threading.Lock()  # never held while a disk is asked, which may not answer

    def hold(self, parts: Sequence[PartRecord], moved: Callable[[], None] = lambda: None) -> None:
        """Open what these parts are read from, in this order, but no files of their own kind; `moved` is told of each.

        Of more than `OPEN_AT_ONCE` the others are opened when their turn comes. What cannot be opened is told then.
        """
        names = {part.name: place for place, part in enumerate(parts)}
        files = [each.file for each in self._committed.manifest.segments if each.file.partition("/")[0] in names]
        segments = sorted(files, key=lambda file: names[file.partition("/")[0]])
        values = [part.files[0].file for part in parts if len(part.files) == 1]
        wanted: list[tuple[str, Direct]] = [(name, False) for name in values]
        wanted += [(name, self._direct) for name in segments]
        for name, direct in wanted[:OPEN_AT_ONCE]:
            try:
                source = self._files.open(self._committed.directory, name, direct=direct)
            except StorageError as error:
                if error.errno not in _TOO_MANY:
                    continue
                self._release()  # others need some, too
                return
            with self._lock:
                is_wanted = not self._is_closed
                if is_wanted:
                    self._held[name, direct] = source
            if not is_wanted:
                source.close()
                return
            moved()

    def open(self, directory: str, name: str, *, direct: Direct) -> Source:
        """As `Opener.open`; a file that is held is handed over."""
        with self._lock:
            held = self._held.pop((name, direct), None) if directory == self._committed.directory else None
        if held is not None:
            return held
        try:
            return self._files.open(directory, name, direct=direct)
        except StorageError as error:
            if error.errno not in _TOO_MANY or not self._release():
                raise
        return self._files.open(directory, name, direct=direct)

    def _release(self) -> bool:
        """Close what is held; whether there was any."""
        left = self._take_all()
        for source in left:
            source.close()
        return bool(left)

    def _take_all(self) -> list[Source]:
        with self._lock:
            left = list(self._held.values())
            self._held.clear()
        return left

    def end(self) -> list[Source]:
        """Hold nothing any more, and hand over what nobody has asked for, to be closed."""
        with self._lock:
            self._is_closed = True
        return self._take_all()

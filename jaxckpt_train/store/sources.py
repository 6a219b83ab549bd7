"""The segments of one load: opened before the first read as far as possible, closed after their last one."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backend import Opener, Source
from jaxckpt_train.store.plain_files import open_recorded
from jaxckpt_train.store.replaced import refuse_another
from jaxckpt_train.store.transaction import Committed

OPEN_AT_ONCE = 256  # of the 1,024 open files that a process may often have, for all it does


class Sources:
    """Open segments, shared by reading threads.

    Those that are opened before the first read stay readable if a retention removes the step meanwhile. Of more than
    `OPEN_AT_ONCE` the others are opened when their turn comes.

    Args:
        files: where.
        committed: the opened checkpoint.
        settings: whether past the page cache, and whether what is read is verified.
        segments: the segment of each read to come, with repetitions.
    """

    def __init__(self, files: Opener, committed: Committed, settings: StoreSettings, segments: Iterable[int]) -> None:
        self._files, self._committed = files, committed
        self._direct, self._is_verified = settings.direct_io, settings.verify_on_load
        self._left = Counter(segments)
        self._open: dict[int, Source] = {}
        self._in_use: Counter[int] = Counter()
        self._is_closed = False
        self._lock = threading.Lock()  # never held while a disk is asked, which may not answer

    def open(self, moved: Callable[[], None] = lambda: None) -> None:
        """Open the segments, or the first of them; `moved` is told of each.

        Raises:
            CorruptCheckpointError: one is missing, or has another size than the manifest says.
            StorageError: the file system refused.
        """
        for number in sorted(self._left)[:OPEN_AT_ONCE]:
            self._keep(number, self._opened(number))
            moved()
        if self._left:
            self._refuse_another()

    def read_into(self, segment: int, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`."""
        with self._using(segment) as source:
            source.read_into(offset, data, needed)

    def done(self, segment: int) -> None:
        """Tell that one of its reads is over; after the last one it is closed."""
        with self._lock:
            self._left[segment] -= 1
        self._close_unused(segment)

    def end(self) -> list[Source]:
        """Let nobody read any more, and hand over what is to be closed; what is being read is closed when that ends."""
        with self._lock:
            self._is_closed = True
            return [self._open.pop(number) for number in list(self._open) if not self._in_use[number]]

    def _close_unused(self, number: int) -> None:
        with self._lock:
            is_over = self._is_closed or not self._left[number]
            unused = self._open.pop(number, None) if is_over and not self._in_use[number] else None
        if unused is not None:
            unused.close()

    @contextlib.contextmanager
    def _using(self, number: int) -> Iterator[Source]:
        source = self._taken(number)
        try:
            yield source
        finally:
            with self._lock:
                self._in_use[number] -= 1
            self._close_unused(number)

    def _taken(self, number: int) -> Source:
        """The open segment, opened if it is not yet."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise StorageError(errno.EBADF, "the load is over", self._committed.directory)
                if number in self._open:
                    self._in_use[number] += 1
                    return self._open[number]
            opened = self._opened(number)
            try:
                self._refuse_another()
            except BaseException:
                opened.close()
                raise
            self._keep(number, opened)

    def _keep(self, number: int, opened: Source) -> None:
        """Share a segment, unless another thread was faster, or the load is over."""
        with self._lock:
            is_wanted = not self._is_closed and number not in self._open
            if is_wanted:
                self._open[number] = opened
        if not is_wanted:
            opened.close()

    def _refuse_another(self) -> None:
        """A segment of the right name and size may be of a checkpoint that took the place of this one meanwhile.

        Digests tell even if that one is gone by now.
        """
        refuse_another(self._files, self._committed, may_be_gone=self._is_verified)

    def _opened(self, number: int) -> Source:
        record = self._committed.manifest.segments[number]
        return open_recorded(
            self._files,
            self._committed.directory,
            record.file,
            record.bytes,
            direct=self._direct,
            subject="segment",
        )

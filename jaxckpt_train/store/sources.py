"""The segments of one load: opened before the first read as far as possible, closed after their last one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import numpy as np

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.store.backend import MISSING, Backend, Source
from jaxckpt_train.store.transaction import Committed

OPEN_AT_ONCE = 256  # of the 1,024 open files that a process may often have, for all it does


class Sources:
    """Open segments, shared by reading threads.

    Those that are opened before the first read stay readable if a retention removes the step meanwhile. Of more than
    `OPEN_AT_ONCE` the others are opened when their turn comes.

    Args:
        backend: where.
        committed: the opened checkpoint.
        direct: as `StoreSettings.direct_io`.
        segments: the segment of each read to come, with repetitions.
    """

    def __init__(
        self, backend: Backend, committed: Committed, direct: bool | Literal["auto"], segments: Iterable[int]
    ) -> None:
        self._backend, self._committed, self._direct = backend, committed, direct
        self._left = Counter(segments)
        self._open: dict[int, Source] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Open the segments, or the first of them.

        Raises:
            CorruptCheckpointError: one is missing, or has another size than the manifest says.
            StorageError: the file system refused.
        """
        for number in sorted(self._left)[:OPEN_AT_ONCE]:
            self._get(number)

    def read_into(self, segment: int, offset: int, data: np.ndarray, needed: int) -> None:
        """As `Source.read_into`."""
        self._get(segment).read_into(offset, data, needed)

    def done(self, segment: int) -> None:
        """Tell that one of its reads is over; after the last one it is closed."""
        with self._lock:
            self._left[segment] -= 1
            source = self._open.pop(segment, None) if not self._left[segment] else None
        if source is not None:
            source.close()

    def close(self) -> None:
        """Close what is open; nobody may read any more."""
        while self._open:
            self._open.popitem()[1].close()

    def _get(self, number: int) -> Source:
        with self._lock:
            if number not in self._open:
                self._open[number] = self._opened(number)
            return self._open[number]

    def _opened(self, number: int) -> Source:
        record, directory = self._committed.manifest.segments[number], self._committed.directory
        path = f"{directory}/{record.file}"
        try:
            source = self._backend.open(directory, record.file, direct=self._direct)
        except StorageError as error:
            if error.errno not in MISSING:
                raise
            raise CorruptCheckpointError(f"{path}: the manifest names this segment, but: {error}") from error
        if source.size != record.bytes:
            source.close()
            raise CorruptCheckpointError(f"{path}: {source.size} bytes, but the manifest says {record.bytes}")
        return source

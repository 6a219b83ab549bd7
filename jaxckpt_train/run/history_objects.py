"""The history of a run on an object store: small objects, each with the lines of a moment, which are merged in groups.

An object is named by the time of its first line, its writer and its number, so that names sort by time. A merged object
has the first and the last number of its group; what it covers is removed, and is not read if a crash kept it.
"""

from __future__ import annotations

import datetime
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backends.base import GONE, Backend, objects_of
from jaxckpt_train.store.files import read_whole
from jaxckpt_train.store.threads import free_in_child, shared_workers
from jaxckpt_train.store.timeouts import report_progress

FOLDER = "history"
FLUSH_S = 60.0  # how long a line may wait for its object
GROUP = 64  # objects that are merged into one
READS_AT_ONCE = 8
MOST_WAITING = 10_000  # lines, while the storage refuses
MOST_OBJECT_BYTES = 256 << 20
_NAME = re.compile(r"[0-9T.]{21,22}-(?P<writer>[0-9a-f]{12})-(?P<first>[0-9]{8})(-(?P<last>[0-9]{8}))?\.jsonl")
_log = logging.getLogger("jaxckpt_train")


class ObjectHistory:
    """Writes lines, for one process, and reads those of all processes."""

    def __init__(self, backend: Backend, directory: str) -> None:
        self._backend, self._folder = backend, f"{directory}/{FOLDER}"
        self._writer, self._number = uuid.uuid4().hex[:12], 0
        self._guard = threading.RLock()  # never held while the storage works
        free_in_child(self)
        self._writing = threading.Lock()
        self._waiting = list[bytes]()
        self._waits_since = 0.0
        self._batch: tuple[str, bytes] | None = None  # the object that is being written, or was not
        self._group = list[tuple[str, bytes]]()  # the names of the objects that are not merged yet, and their content

    def add(self, line: bytes, *, may_wait: bool) -> None:
        """Write a line with all that wait; with `may_wait`, with the next one, or in `write_late`."""
        with self._guard:
            if not self._waiting:
                self._waits_since = time.monotonic()
            self._waiting = [*self._waiting[-MOST_WAITING:], line]
        if not may_wait:
            with self._writing:
                self._write()

    def write_late(self) -> None:
        """Write the lines that wait if the first has waited for a minute, unless another thread is writing."""
        with self._guard:
            is_late = self._waiting and time.monotonic() - self._waits_since >= FLUSH_S
        if is_late and self._writing.acquire(blocking=False):
            try:
                self._write()
            finally:
                self._writing.release()

    def _write(self) -> None:
        while (batch := self._batch or self._next_batch()) is not None:
            self._batch = batch
            name, content = batch
            try:
                self._backend.write_new(f"{self._folder}/{name}", content)
            except StorageError as error:  # it may be there: only under the same name, it is not there twice
                _log.warning("the history was not written, and will be with the next event: %s", error)
                return
            self._batch = None
            self._number += 1
            self._group.append(batch)
            if len(self._group) == GROUP:
                self._merge()

    def _next_batch(self) -> tuple[str, bytes] | None:
        """The name and content of the next object; None: no line waits, or another thread has written them."""
        with self._guard:
            lines, self._waiting = self._waiting, []
        at = datetime.datetime.now(datetime.UTC)
        name = f"{at:%Y%m%dT%H%M%S.%f}-{self._writer}-{self._number:08d}.jsonl"
        return (name, b"".join(line + b"\n" for line in lines)) if lines else None

    def finish(self) -> None:
        """Write what waits, and merge the objects of this process."""
        with self._writing:
            self._write()
            if len(self._group) > 1:
                self._merge()

    def _merge(self) -> None:
        group, self._group = self._group, []
        first = group[0][0].removesuffix(".jsonl")
        try:
            self._backend.write_new(
                f"{self._folder}/{first}-{self._number - 1:08d}.jsonl", b"".join(content for _, content in group)
            )
            objects_of(self._backend).remove_objects([f"{self._folder}/{name}" for name, _ in group])
        except StorageError as error:
            _log.warning("%s: its objects were not merged: %s", self._folder, error)

    def lines(self) -> Iterator[bytes]:
        """All lines, oldest first. Raises StorageError."""
        with self._writing:
            self._write()
        names = self._names()
        for at in range(0, len(names), GROUP):
            for content in self._read(names[at : at + GROUP]):
                yield from content.split(b"\n")

    def recent(self, most_bytes: int) -> list[bytes]:
        """The lines of the last objects, oldest first, until they have this many bytes. Raises StorageError."""
        names, found, size = self._names(), list[bytes](), 0
        while names and size < most_bytes:
            names, last = names[:-GROUP], names[-GROUP:]
            contents = self._read(last)
            size += sum(map(len, contents))
            found[:0] = [line for content in contents for line in content.split(b"\n")]
        return found

    def _names(self) -> list[str]:
        """The names of the objects to read, in order."""
        try:
            listed = [entry.name for entry in self._backend.list(self._folder) if entry.kind == "file"]
        except StorageError as error:
            if error.errno in GONE:
                return []
            raise
        parsed = {name: match for name in listed if (match := _NAME.fullmatch(name))}
        merged = [(each["writer"], each["first"], each["last"]) for each in parsed.values() if each["last"]]

        def is_covered(match: re.Match[str]) -> bool:
            return not match["last"] and any(
                writer == match["writer"] and first <= match["first"] <= last for writer, first, last in merged
            )

        return sorted(name for name, match in parsed.items() if not is_covered(match))

    def _read(self, names: Sequence[str]) -> list[bytes]:
        found = dict[str, bytes]()

        def read(name: str) -> None:
            try:
                found[name] = read_whole(self._backend, self._folder, name, MOST_OBJECT_BYTES).tobytes()
            except StorageError as error:
                if error.errno not in GONE:  # else it was merged meanwhile
                    raise
            report_progress()

        shared_workers(READS_AT_ONCE, "jaxckpt-history").run_all(read, names)
        return [found[name] for name in names if name in found]

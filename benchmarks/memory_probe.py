"""The memory of this process as the kernel counts it: now, and at its highest while something runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

CLEAR_REFS, STATUS, ROLLUP = (Path("/proc/self", name) for name in ("clear_refs", "status", "smaps_rollup"))
RESET_PEAK = "5\n"
EVERY_S = 0.002
KIB = 1024


class Usage(NamedTuple):
    """Resident bytes, by kind. Shared memory without a file (`mmap(-1)` of Python) is in `shmem`, not in `anon`."""

    anon: int
    shmem: int
    file: int
    peak: int

    @property
    def private(self) -> int:
        """What only this process can have asked for: mapped files are left out."""
        return self.anon + self.shmem

    @property
    def total(self) -> int:
        """Resident bytes."""
        return self.anon + self.shmem + self.file


def usage() -> Usage:
    """The memory of this process now, and the highest total since the last `reset_peak`."""
    return _parse(STATUS.read_text(encoding="ascii"))


def _parse(status: str) -> Usage:
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return Usage(*(KIB * int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem", "RssFile", "VmHWM")))


def rollup_bytes() -> int:
    """The resident bytes by a walk over all pages: slow, and exact."""
    lines = dict(line.split(":", 1) for line in ROLLUP.read_text(encoding="ascii").splitlines()[1:])
    return KIB * int(lines["Rss"].split()[0])


def reset_peak() -> None:
    """Let the kernel begin anew to remember the highest total."""
    CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")


def calm_down() -> None:
    """Free what is unreachable, and give what is free back to the kernel."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


class Peak:
    """While entered, remembers the most memory in use.

    Attributes:
        before: as it was entered.
        after: as it was left.
        private: highest sampled `Usage.private`, looked at every 2 ms; misses what comes and goes between.
        samples: how often it was looked at.
    """

    def __enter__(self) -> Peak:
        calm_down()
        reset_peak()
        self.before = usage()
        self.private, self.samples = self.before.private, 0
        self._looking, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-probe", daemon=True)
        self._thread.start()
        self._looking.wait()  # what is measured begins where the samples have begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.after = usage()
        self._stop.set()
        self._thread.join()
        self.private = max(self.private, self.after.private)

    @property
    def extra(self) -> int:
        """By how much resident memory was higher than before, by the kernel's own mark: misses nothing."""
        return max(0, self.after.peak - self.before.total)

    @property
    def extra_private(self) -> int:
        """The same without mapped files, of what was sampled."""
        return self.private - self.before.private

    def _sample(self) -> None:
        fd = os.open(STATUS, os.O_RDONLY)
        try:
            while not self._stop.is_set():
                self.private = max(self.private, _parse(os.pread(fd, 8192, 0).decode("ascii")).private)
                self.samples += 1
                self._looking.set()
                time.sleep(EVERY_S)
        finally:
            os.close(fd)

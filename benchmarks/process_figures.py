"""What the kernel says of this process: resident memory, its peak, bytes read and written, and time the host took."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

from benchmarks.sample import Resident

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
IO = Path("/proc/self/io")
MAPS = Path("/proc/self/maps")
STAT = Path("/proc/stat")
STOLEN_FIELD = 8
RESET_PEAK = "5"


class ResidentMeter:
    """Resident memory from the making of the meter on."""

    def __init__(self) -> None:
        CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        self._before = _field_bytes(STATUS, "VmRSS")

    def read(self) -> Resident:
        """Before, at the peak so far, and now."""
        peak = _field_bytes(STATUS, "VmHWM")
        return Resident(before=self._before, peak=peak, final=_field_bytes(STATUS, "VmRSS"))


def disk_read_bytes() -> int:
    """Bytes that this process made the kernel fetch from disks since it began."""
    return _field_bytes(IO, "read_bytes")


def asked_read_bytes() -> int:
    """Bytes that read calls of this process gave it, from a disk or a page cache; a socket's `recv` is no read call."""
    return _field_bytes(IO, "rchar")


def disk_written_bytes() -> int:
    """Bytes that this process made the kernel write to disks, or will have made it, since it began."""
    return _field_bytes(IO, "write_bytes")


def stolen_s() -> float:
    """Seconds in which the host of this virtual machine kept its processors from it, all together, since it began."""
    fields = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
    return int(fields[STOLEN_FIELD]) / os.sysconf("SC_CLK_TCK")


def is_mapped(root: Path) -> bool:
    """Whether a file below `root` is still mapped by this process."""
    return f"{root}/" in MAPS.read_text(encoding="utf-8", errors="replace")


def release_memory() -> None:
    """Free what is unreachable, and give free memory back to the system, so that an idle worker holds none of it."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _field_bytes(file: Path, name: str) -> int:
    lines = (line.partition(":") for line in file.read_text(encoding="ascii").splitlines())
    words = next(value.split() for key, _, value in lines if key == name)
    return int(words[0]) * (1024 if words[1:] == ["kB"] else 1)

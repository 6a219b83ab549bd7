"""A slow disk: a library that limits reads and writes below a folder, for all processes that preload it together.

It limits native calls, so it holds for libraries that read and write without Python, and a process that waits in it
can be killed at once. Calls that it does not know would pass unlimited: compare `SlowDisk.passed` with what must have
been read and written.
"""

from __future__ import annotations

import dataclasses
import shutil
import struct
import subprocess
from pathlib import Path

COMPILER, SOURCE = "gcc", Path(__file__).with_name("slow_disk.c")
STATE = struct.Struct("=3q")  # free at, bytes read, bytes written


class CannotSlowDownError(RuntimeError):
    """There is no compiler."""


@dataclasses.dataclass(frozen=True)
class SlowDisk:
    """A folder whose files are slow to processes that preload `library`."""

    folder: Path
    library: Path
    state: Path

    def passed(self) -> tuple[int, int]:
        """The bytes read and written so far."""
        _, read, written = STATE.unpack(self.state.read_bytes())
        return read, written


def slow_disk(parent: Path, bytes_per_s: float) -> SlowDisk:
    """Create the folder `slow` and compile its library. Raises CannotSlowDownError: there is no compiler."""
    if shutil.which(COMPILER) is None:
        raise CannotSlowDownError(f"{COMPILER} is needed to limit the speed of a disk; install it")
    here = parent.resolve()
    disk = SlowDisk(here / "slow", here / "slow_disk.so", here / "slow_disk.state")
    disk.folder.mkdir()
    disk.state.write_bytes(bytes(STATE.size))
    constants = [f'-DFOLDER="{disk.folder}"', f'-DSTATE="{disk.state}"', f"-DBYTES_PER_S={bytes_per_s:f}"]
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", *constants, "-o", disk.library, SOURCE, "-ldl"], check=True)
    return disk

"""Requirements of campaigns: a compiler, the right to mount, FUSE, loop devices. Each is tried, not guessed.

A campaign that cannot run prints `SKIP: <why>` and exits with `SKIPPED`, which is 77 as in Automake. A campaign with
parts that cannot run prints `<part>: SKIP: <why>`, and its exit code is that of the other parts.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile

SKIPPED = 77
COMPILER = "cc"


def leave_if(reason: str | None) -> None:
    """End a campaign that cannot run, and print why.

    Raises:
        SystemExit: with `SKIPPED`, if there is a reason.
    """
    if reason is not None:
        print(f"SKIP: {reason}", flush=True)
        raise SystemExit(SKIPPED)


@functools.cache
def why_no_compiler() -> str | None:
    """Return why no library can be compiled and preloaded, or None."""
    if sys.platform != "linux":
        return "needs Linux, to load a library before all others"
    if shutil.which(COMPILER) is None:
        return f"needs a C compiler ({COMPILER})"
    command = [COMPILER, "-shared", "-fPIC", "-x", "c", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input="#include <stdio.h>\n", capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"needs a C compiler that works: {_last_line(done.stderr)}"


@functools.cache
def why_no_mount() -> str | None:
    """Return why no file system in memory can be mounted, or None."""
    for tool in ("mount", "umount"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"needs the right to mount: {_last_line(done.stderr)}"
        subprocess.run(["umount", folder], check=True)
    return None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason was given"])[-1].replace("\n", " ")

"""Whether malloc takes large blocks in huge pages and gives them back at once, and how a process begins so.

What a library allocates for each large chunk that it decodes comes fresh from the kernel and goes back to it. In pages
of 4 KiB its first touch takes longer than to decode it; in huge ones it is some hundredth of that. GNU's libc asks for
them if it is told so before a process begins, and in no other way (`glibc.malloc.hugetlb`, since 2.35). It also keeps
blocks of up to 32 MiB for later, in each thread, once one of that size was given back, unless it is told where to stop
(`glibc.malloc.mmap_threshold`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE, TUNABLE, THRESHOLD = "GLIBC_TUNABLES", "glibc.malloc.hugetlb", "glibc.malloc.mmap_threshold"
KEPT_BYTES = 4 << 20  # larger blocks go back at once
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SINCE = (2, 35)


def has_huge_malloc() -> bool:
    """Whether this process has it."""
    return _tunables(os.environ).get(TUNABLE, "0") != "0" and _can()


def variables_of_huge_malloc(variables: Mapping[str, str]) -> dict[str, str] | None:
    """The environment of a process that has it, made of another one.

    None: that one decides it already, or it can have none on this system.
    """
    decided = _tunables(variables)
    if TUNABLE in decided or not _can():
        return None
    told = [variables.get(VARIABLE, ""), f"{TUNABLE}=1", "" if THRESHOLD in decided else f"{THRESHOLD}={KEPT_BYTES}"]
    return {**variables, VARIABLE: ":".join(filter(None, told))}


def begin_again(words: list[str]) -> None:
    """Have this very process run a command instead of what it runs, by the same Python; comes back if it has it.

    Interrupts wait until `has_begun_again` is called there: Python tells of one that comes while it starts.
    """
    variables = variables_of_huge_malloc(os.environ)
    if variables is not None and sys.executable:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with contextlib.suppress(OSError):  # what it does is slower without
            os.execve(sys.executable, words, variables)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def has_begun_again() -> None:
    """Let interrupts through again, if this process was begun by `begin_again`."""
    if f"{TUNABLE}=1" in os.environ.get(VARIABLE, ""):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _tunables(variables: Mapping[str, str]) -> dict[str, str]:
    pairs = (each.partition("=") for each in variables.get(VARIABLE, "").split(":"))
    return {name: value for name, _, value in pairs}


def _can() -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        version = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
        if version is not None and (int(version[1]), int(version[2])) >= SINCE:
            return "[never]" not in POLICY.read_text()
    return False

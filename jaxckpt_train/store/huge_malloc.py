"""Whether malloc takes large blocks in huge pages, and how a process begins so.

What a library allocates for each large chunk that it decodes comes fresh from the kernel and goes back to it. In pages
of 4 KiB its first touch takes longer than to decode it; in huge ones it is some hundredth of that. GNU's libc asks for
them if it is told so before a process begins, and in no other way (`glibc.malloc.hugetlb`, since 2.35).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SINCE = (2, 35)


def has_huge_malloc() -> bool:
    """Whether this process has it."""
    return _tunables(os.environ).get(TUNABLE, "0") != "0" and _can()


def variables_of_huge_malloc(variables: Mapping[str, str]) -> dict[str, str] | None:
    """The environment of a process that has it, made of another one.

    None: that one decides it already, or it can have none on this system.
    """
    if TUNABLE in _tunables(variables) or not _can():
        return None
    told = variables.get(VARIABLE, "")
    return {**variables, VARIABLE: f"{told}:{TUNABLE}=1" if told else f"{TUNABLE}=1"}


def begin_again(words: list[str]) -> None:
    """Have this very process run a command instead of what it runs, by the same Python; comes back if it has it."""
    variables = variables_of_huge_malloc(os.environ)
    if variables is not None and sys.executable:
        with contextlib.suppress(OSError):  # what it does is slower without
            os.execve(sys.executable, words, variables)


def _tunables(variables: Mapping[str, str]) -> dict[str, str]:
    pairs = (each.partition("=") for each in variables.get(VARIABLE, "").split(":"))
    return {name: value for name, _, value in pairs}


def _can() -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        version = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
        if version is not None and (int(version[1]), int(version[2])) >= SINCE:
            return "[never]" not in POLICY.read_text()
    return False

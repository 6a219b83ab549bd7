"""A malloc that uses huge pages: it causes fewer page faults, and a process restarts itself once to get it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxckpt_train.store import process_identity
from jaxckpt_train.store.process_identity import huge_malloc_environment
from tests.conftest import REPO_ROOT

FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
block = libc.malloc(64 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
ctypes.memset(block, 1, 64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(variables: dict[str, str]) -> int:
    return int(subprocess.run([sys.executable, "-c", FAULTS], env=variables, capture_output=True, check=True).stdout)


def test_huge_malloc_reduces_page_faults() -> None:
    variables = huge_malloc_environment({})
    if variables is None:
        pytest.skip("this system has no malloc that takes huge pages")
    assert (
        _faults({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) > 10_000
        or "[always]" in process_identity.POLICY.read_text()
    )
    assert _faults(variables) < 8_000


AGAIN = """
import os, sys
from jaxckpt_train.store.process_identity import restart_with_huge_malloc, has_huge_malloc
print(os.getpid(), has_huge_malloc(), sys.argv[1:], flush=True)
restart_with_huge_malloc(sys.orig_argv)
print("continues")
"""


def test_process_restarts_once_with_huge_malloc() -> None:
    if huge_malloc_environment({}) is None:
        pytest.skip("this system has no malloc that takes huge pages")
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, "a word"],
        env={"PYTHONPATH": str(REPO_ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, last = done.stdout.splitlines()
    pid = first.split()[0]
    assert (first, second, last) == (f"{pid} False ['a word']", f"{pid} True ['a word']", "continues")

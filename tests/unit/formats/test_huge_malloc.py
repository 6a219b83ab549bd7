"""A malloc that takes huge pages: which environment asks for it, what that does, and that a process begins again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxckpt_train.store import process_identity as huge_malloc
from jaxckpt_train.store.process_identity import has_huge_malloc, huge_malloc_environment
from tests.conftest import REPO_ROOT

ASKED, KEPT = "glibc.malloc.hugetlb=1", "glibc.malloc.mmap_threshold=4194304"


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel says of huge pages, and a libc that is new enough."""
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_malloc, "POLICY", file)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    return file


@pytest.mark.usefixtures("policy")
def test_what_else_is_tuned_stays() -> None:
    assert huge_malloc_environment({}) == {"GLIBC_TUNABLES": f"{ASKED}:{KEPT}"}
    other = "glibc.malloc.arena_max=1"
    assert huge_malloc_environment({"A": "b", "GLIBC_TUNABLES": other}) == {
        "A": "b",
        "GLIBC_TUNABLES": f"{other}:{ASKED}:{KEPT}",
    }
    other = "glibc.malloc.mmap_threshold=65536"
    assert huge_malloc_environment({"GLIBC_TUNABLES": other}) == {"GLIBC_TUNABLES": f"{other}:{ASKED}"}


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize("told", [ASKED, "glibc.malloc.hugetlb=0", f"glibc.malloc.arena_max=1:{ASKED}"])
def test_what_is_decided_stays(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert huge_malloc_environment({"GLIBC_TUNABLES": told}) is None
    monkeypatch.setenv("GLIBC_TUNABLES", told)
    assert has_huge_malloc() == told.endswith("1")


@pytest.mark.parametrize("libc", ["glibc 2.34", "glibc 1.99", "musl", None])
def test_another_libc_has_none(libc: str | None, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: libc)
    monkeypatch.setenv("GLIBC_TUNABLES", ASKED)
    assert not has_huge_malloc()
    assert huge_malloc_environment({}) is None


def test_a_kernel_without_huge_pages_has_none(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", ASKED)
    assert has_huge_malloc()
    policy.write_text("always madvise [never]\n")
    assert not has_huge_malloc()
    policy.unlink()
    assert not has_huge_malloc()
    assert huge_malloc_environment({}) is None


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


def test_the_first_touch_of_a_large_block_is_cheap_then() -> None:
    variables = huge_malloc_environment({})
    if variables is None:
        pytest.skip("this system has no malloc that takes huge pages")
    assert (
        _faults({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) > 10_000 or "[always]" in huge_malloc.POLICY.read_text()
    )
    assert _faults(variables) < 8_000


AGAIN = """
import os, sys
from jaxckpt_train.store.process_identity import restart_with_huge_malloc, has_huge_malloc
print(os.getpid(), has_huge_malloc(), sys.argv[1:], flush=True)
restart_with_huge_malloc(sys.orig_argv)
print("goes on")
"""


def test_a_process_begins_again_once_and_goes_on() -> None:
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
    assert (first, second, last) == (f"{pid} False ['a word']", f"{pid} True ['a word']", "goes on")

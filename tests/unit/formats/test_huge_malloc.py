"""A malloc that uses huge pages: which environment variables ask for it, and on which systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxckpt_train.store import process_identity
from jaxckpt_train.store.process_identity import has_huge_malloc, huge_malloc_environment

ASKED, KEPT = "glibc.malloc.hugetlb=1", "glibc.malloc.mmap_threshold=4194304"


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's setting of huge pages in a file, and a libc that is new enough."""
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    monkeypatch.setattr(process_identity, "POLICY", file)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    return file


@pytest.mark.usefixtures("policy")
def test_other_malloc_tunables_are_kept() -> None:
    assert huge_malloc_environment({}) == {"GLIBC_TUNABLES": f"{ASKED}:{KEPT}"}
    other = "glibc.malloc.arena_max=1"
    assert huge_malloc_environment({"A": "b", "GLIBC_TUNABLES": other}) == {
        "A": "b",
        "GLIBC_TUNABLES": f"{other}:{ASKED}:{KEPT}",
    }
    other = "glibc.malloc.mmap_threshold=65536"
    assert huge_malloc_environment({"GLIBC_TUNABLES": other}) == {"GLIBC_TUNABLES": f"{other}:{ASKED}"}


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize("tunables", [ASKED, "glibc.malloc.hugetlb=0", f"glibc.malloc.arena_max=1:{ASKED}"])
def test_explicit_huge_page_setting_is_kept(tunables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert huge_malloc_environment({"GLIBC_TUNABLES": tunables}) is None
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    assert has_huge_malloc() == tunables.endswith("1")


@pytest.mark.parametrize("libc", ["glibc 2.34", "glibc 1.99", "musl", None])
def test_other_libc_has_no_huge_malloc(libc: str | None, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: libc)
    monkeypatch.setenv("GLIBC_TUNABLES", ASKED)
    assert not has_huge_malloc()
    assert huge_malloc_environment({}) is None


def test_kernel_without_huge_pages_has_no_huge_malloc(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", ASKED)
    assert has_huge_malloc()
    policy.write_text("always madvise [never]\n")
    assert not has_huge_malloc()
    policy.unlink()
    assert not has_huge_malloc()
    assert huge_malloc_environment({}) is None

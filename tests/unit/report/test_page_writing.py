"""A page replaces an earlier report, and no other file."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from jaxckpt_train.errors import CheckpointExistsError, StorageError
from jaxckpt_train.report.page import MARK, write_page
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.report_runs import BACKEND


class NoExchange(LocalBackend):
    """Fails to exchange two names."""

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        raise StorageError(errno.EIO, "refused", first)


def test_page_replaces_an_earlier_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    for page in (f"{MARK}one", f"{MARK}another ü"):
        write_page(BACKEND, str(path), page)
        assert path.read_text() == page
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"weights", b"<!doctype html>\n<p>"])
def test_other_files_are_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(content)
    with pytest.raises(CheckpointExistsError, match="or an earlier report"):
        write_page(BACKEND, str(path), f"{MARK}one")
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_or_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "target").write_text(f"{MARK}precious")
    (tmp_path / "b").symlink_to(tmp_path / "target")
    for name in "ab":
        with pytest.raises(CheckpointExistsError):
            write_page(BACKEND, str(tmp_path / name), f"{MARK}one")
    assert (tmp_path / "target").read_text() == f"{MARK}precious"


def test_missing_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        write_page(BACKEND, str(tmp_path / "none" / "report.html"), MARK)


def test_failed_write_keeps_the_earlier_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(BACKEND, str(path), f"{MARK}one")
    with pytest.raises(StorageError):
        write_page(NoExchange(), str(path), f"{MARK}another")
    assert path.read_text() == f"{MARK}one"
    assert list(tmp_path.iterdir()) == [path]

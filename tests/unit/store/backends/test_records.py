"""A record while its directory is removed, and where a file system lists names that are gone."""

from __future__ import annotations

from pathlib import Path

from jaxckpt_train.store.backends.base import Entry
from jaxckpt_train.store.backends.local import LocalBackend


class CachedListing(LocalBackend):
    """Lists a directory as it was at the first look, as sshfs does for some seconds."""

    def __init__(self) -> None:
        self._listed = dict[str, list[Entry]]()

    def list(self, path: str) -> list[Entry]:
        if path not in self._listed:
            self._listed[path] = super().list(path)
        return self._listed[path]


def test_newest_version_is_read_behind_a_cached_listing(tmp_path: Path) -> None:
    cached, disk, path = CachedListing(), LocalBackend(), f"{tmp_path}/record"
    version = disk.swap_record(path, b"0", None)
    for data in (b"0", b"1", b"2"):
        found = cached.read_record(path)
        assert found is not None
        assert (found.version, found.data, found.problem) == (version, data, None)
        version = disk.swap_record(path, str(int(data) + 1).encode(), version)


class Removing(LocalBackend):
    """A user removes the content of the record right after it was written."""

    def write_new(self, path: str, data: bytes) -> bool:
        is_new = super().write_new(path, data)
        Path(path).unlink()
        return is_new


def test_record_that_is_removed_meanwhile_is_not_written(tmp_path: Path) -> None:
    path = f"{tmp_path}/record"
    assert Removing().swap_record(path, b"one", None) is None
    assert LocalBackend().read_record(path) is None

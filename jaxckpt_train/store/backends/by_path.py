"""The backend for any path: URLs go to object stores, and everything else to the local file system."""

from __future__ import annotations

import errno
import functools
from typing import Literal

from jaxckpt_train._validation import is_url
from jaxckpt_train.settings import ObjectStoreSettings, StoreSettings
from jaxckpt_train.store.backends.base import Backend, Entry, Sink, Source, Storage, StoredRecord, storage_error
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.backends.objects import ObjectBackend


def backend_for(settings: StoreSettings) -> Backend:
    """The backend for paths and URLs, with these settings."""
    return _backend_for(settings.object_store)


@functools.lru_cache(maxsize=64)
def _backend_for(settings: ObjectStoreSettings) -> ByPath:
    return ByPath(settings)


class ByPath:
    """A backend that chooses by the path. What object stores lack is an error there."""

    def __init__(self, settings: ObjectStoreSettings) -> None:
        self.settings = settings
        self.local = LocalBackend()

    @functools.cached_property
    def objects(self) -> ObjectBackend:
        """The object stores, which need a package that files do not."""
        return ObjectBackend(self.settings)

    def _of(self, path: str) -> Storage:
        return self.objects if is_url(path) else self.local

    def _files_of(self, path: str, action: str) -> LocalBackend:
        if is_url(path):
            raise storage_error(errno.EOPNOTSUPP, action, path, "object stores have no such operation")
        return self.local

    def create(self, path: str, *, direct: bool | Literal["auto"]) -> Sink:
        return self._of(path).create(path, direct=direct)

    def open(self, directory: str, name: str, *, direct: bool | Literal["auto"]) -> Source:
        return self._of(directory).open(directory, name, direct=direct)

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        return self._of(path).kind(path)

    def write_new(self, path: str, data: bytes) -> bool:
        return self._of(path).write_new(path, data)

    def clone(self, source: str, target: str, size: int) -> bool:
        return is_url(source) == is_url(target) and self._of(target).clone(source, target, size)

    def share(self, source: str, target: str) -> bool:
        return not is_url(source) and not is_url(target) and self.local.share(source, target)

    def list(self, path: str) -> list[Entry]:
        return self._of(path).list(path)

    def make_directory(self, path: str, *, parents: bool, sync: bool) -> None:
        self._of(path).make_directory(path, parents=parents, sync=sync)

    def remove(self, path: str) -> None:
        self._of(path).remove(path)

    def sync(self, path: str) -> None:
        self._of(path).sync(path)

    def read_record(self, path: str) -> StoredRecord | None:
        return self._of(path).read_record(path)

    def swap_record(self, path: str, data: bytes, version: int | None) -> int | None:
        return self._of(path).swap_record(path, data, version)

    def refresh_record(self, path: str, version: int) -> None:
        self._of(path).refresh_record(path, version)

    def rename(self, source: str, target: str) -> None:
        self._files_of(source, "rename").rename(source, target)

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        self._files_of(first, "exchange").exchange(first, second, sync=sync)

    def append(self, path: str, data: bytes) -> None:
        self._files_of(path, "append to the file").append(path, data)

    def touch(self, path: str) -> None:
        self._files_of(path, "touch the file").touch(path)

    def point(self, path: str, target: str | None) -> None:
        self._files_of(path, "make a link").point(path, target)

"""`pytest --in-bucket`: `tmp_path` is a URL in a bucket of the stand-in, so that tests of the disk try object stores.

Tests that cannot apply there are skipped; `disk_only` lists them with the reasons.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import ClassVar, NamedTuple

import pytest

from jaxckpt_train.settings import ObjectStoreSettings
from jaxckpt_train.store.backends import local
from jaxckpt_train.store.backends.by_path import ByPath
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.backends.objects import ObjectBackend
from tests.support.disk_only import reason_of
from tests.support.objects.object_map import BUCKET, ObjectMap, Stored
from tests.support.objects.stand_in import StandIn
from tests.support.paths import REPO_ROOT

_numbers = itertools.count()


class Stat(NamedTuple):
    """What tests ask of an object's size and time."""

    st_size: int
    st_mtime: float
    st_mtime_ns: int


class BucketPath(PurePosixPath):
    """The path of an object or of a prefix, whose text is a URL. It has those methods of `Path` that tests use."""

    objects: ClassVar[ObjectMap]

    def __str__(self) -> str:
        return re.sub("^s3:/(?!/)", "s3://", super().__str__())

    @property
    def _name(self) -> str:
        return str(self).removeprefix("s3://")

    def _stored(self) -> Stored:
        found = self.objects.get(self._name)
        if found is None:
            raise FileNotFoundError(str(self))
        return found

    def _below(self) -> list[str]:
        return sorted(name for name in list(self.objects.content) if name.startswith(f"{self._name}/"))

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self.objects.get(self._name) is not None

    def is_dir(self) -> bool:
        return bool(self._below())

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> Stat:
        if self.is_dir():
            return Stat(0, 0.0, 0)
        found = self._stored()
        seconds = found.modified.timestamp()
        return Stat(len(found.data), seconds, int(seconds * 10**9))

    def iterdir(self) -> Iterator[BucketPath]:
        start = len(self._name) + 1
        names = sorted({name[start:].partition("/")[0] for name in self._below()})
        return iter([self / name for name in names])

    def rglob(self, pattern: str) -> Iterator[BucketPath]:
        """The prefixes and objects below this one whose last part has this form."""
        start, found = len(self._name) + 1, set[str]()
        for name in self._below():
            parts = name[start:].split("/")
            found |= {"/".join(parts[: end + 1]) for end, part in enumerate(parts) if fnmatch.fnmatch(part, pattern)}
        return iter([self / each for each in sorted(found)])

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """Those of `rglob` that are this many levels below."""
        if pattern.startswith("**/"):
            return self.rglob(pattern[3:])
        depth = pattern.count("/") + 1
        found = (each for each in self.rglob("*") if len(each.parts) == len(self.parts) + depth)
        return iter([each for each in found if fnmatch.fnmatch(str(each), f"{self}/{pattern}")])

    def read_bytes(self) -> bytes:
        return self._stored().data

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> int:
        self.objects.put(self._name, data)
        return len(data)

    def write_text(self, data: str, encoding: str = "utf-8") -> int:
        return self.write_bytes(data.encode(encoding))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: prefixes exist with their objects."""

    def unlink(self, missing_ok: bool = False) -> None:
        if not self.objects.delete(self._name) and not missing_ok:
            raise FileNotFoundError(str(self))

    def remove_tree(self) -> None:
        """Remove all objects below."""
        for name in self._below():
            self.objects.delete(name)


class AnyBackend(ByPath):
    """What `LocalBackend` is in these tests, so that their variants of it reach the bucket, too."""

    settings = ObjectStoreSettings()
    local, objects = LocalBackend(), ObjectBackend(settings)

    def __init__(self) -> None:
        """Set nothing: variants do not call this."""


class InBucket:
    """The plugin of a run in a bucket."""

    def __init__(self, server: StandIn) -> None:
        self._server = server

    @pytest.fixture
    def tmp_path(self, request: pytest.FixtureRequest) -> Iterator[BucketPath]:
        """A prefix that no other test has."""
        name = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-.")[:60]
        path = BucketPath(f"s3://{BUCKET}/test-{next(_numbers)}/{name}")
        yield path
        path.remove_tree()
        assert not os.path.lexists("s3:"), "the test uses the URL as the path of a local file"
        self._server.requests.clear()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip what cannot apply to object stores."""
        for item in items:
            file = item.path.relative_to(REPO_ROOT).as_posix()
            reason = reason_of(file, getattr(item, "originalname", item.name))
            if reason is None and "tmp_path" not in getattr(item, "fixturenames", ()):
                reason = "saves nothing"
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"only on disks: {reason}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--in-bucket`."""
    parser.addoption("--in-bucket", action="store_true", help="tmp_path is a URL in a bucket of the stand-in")


def pytest_configure(config: pytest.Config) -> None:
    """Replace `tmp_path`, if asked to."""
    if config.getoption("in_bucket"):
        stack = contextlib.ExitStack()
        config.add_cleanup(stack.close)
        server = stack.enter_context(StandIn("s3"))
        stack.enter_context(server.named())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        BucketPath.objects = server.objects
        original = LocalBackend  # the name of this module is patched, too
        for module in list(sys.modules.values()):
            is_of_tests = module.__name__.startswith("tests.")
            if module is local or (is_of_tests and getattr(module, "LocalBackend", None) is original):
                patch.setattr(module, "LocalBackend", AnyBackend)
        config.pluginmanager.register(InBucket(server), "in-bucket")

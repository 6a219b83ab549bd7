"""Leftovers of dead processes next to a checkpoint: one that cannot be removed does not stop the others."""

from __future__ import annotations

import errno
import re
from typing import Any

import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store import process_identity
from jaxckpt_train.store.removal import remove_dead_attempts, remove_dead_exports
from tests.support.memory_backend import MemoryBackend

BEFORE_A_POWER_CUT = re.sub(r"^([0-9a-f]+)-[0-9a-f]+-", r"\1-00000000-", process_identity.process_tag())


class Refusing(MemoryBackend):
    """Refuse to remove one path."""

    def __init__(self, refused: str) -> None:
        super().__init__()
        self.refused = refused

    def remove(self, path: str) -> None:
        if path == self.refused:
            raise StorageError(errno.EPERM, "cannot be removed", path)
        super().remove(path)


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_failed_removal_is_raised_after_the_others(refused: int) -> None:
    tag = re.sub(r"-[0-9]+-[0-9]+$", "-1-1", process_identity.process_tag())  # process 1 began at another time
    assert process_identity.is_dead_tag(tag)
    attempts = [f"/run/.c.tmp-{tag}-{number}" for number in range(3)]
    backend = Refusing(attempts[refused])
    for path in ("/run", *attempts, f"/run/.other.tmp-{tag}-0", f"/run/.c.tmp-{process_identity.process_tag()}-0"):
        backend.make_directory(path, parents=True, sync=False)
    with pytest.raises(StorageError, match="cannot be removed"):
        remove_dead_attempts(backend, "/run/c")
    left = {f"/run/{entry.name}" for entry in backend.list("/run")}
    assert left == {attempts[refused], f"/run/.other.tmp-{tag}-0", f"/run/.c.tmp-{process_identity.process_tag()}-0"}
    backend.refused = ""
    remove_dead_attempts(backend, "/run/c")
    assert attempts[refused] not in {f"/run/{entry.name}" for entry in backend.list("/run")}


def test_dead_exports_go_and_checkpoints_stay() -> None:
    tag = re.sub(r"-[0-9]+-[0-9]+$", "-1-1", process_identity.process_tag())
    backend, mine = Refusing(""), process_identity.process_tag()
    gone = [f"/d/.c.tmp-{tag}-{number}" for number in range(2)]
    stay = [f"/d/.c.tmp-{tag}-2", f"/d/.c.tmp-{mine}-0", f"/d/.other.tmp-{tag}-0", "/d/c.tmp"]
    for path in gone + stay:
        backend.make_directory(f"{path}/state", parents=True, sync=False)
        backend.write_new(f"{path}/model.safetensors", b"half")
    backend.write_new(f"{stay[0]}/COMMIT", b"{}")
    backend.refused = gone[0]
    with pytest.raises(StorageError, match="cannot be removed"):
        remove_dead_exports(backend, "/d/c")
    assert {f"/d/{entry.name}" for entry in backend.list("/d")} == {gone[0], *stay}
    backend.refused = ""
    remove_dead_exports(backend, "/d/c")
    assert {f"/d/{entry.name}" for entry in backend.list("/d")} == set(stay)


@pytest.mark.parametrize("pid", ["99999999999999999999", str(1 << 31)])
def test_attempt_with_impossible_pid_is_left_alone(pid: str) -> None:
    foreign = f"/run/.c.tmp-{re.sub(r'-[0-9]+-[0-9]+$', f'-{pid}-1', process_identity.process_tag())}-0"
    backend = Refusing("")
    backend.make_directory(foreign, parents=True, sync=False)
    remove_dead_attempts(backend, "/run/c")
    assert [entry.name for entry in backend.list("/run")] == [foreign.rpartition("/")[2]]


class Unreadable(MemoryBackend):
    """Refuse to open any manifest, as a bad disk does."""

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        if name == "manifest.json":
            raise StorageError(errno.EIO, "cannot be read", f"{directory}/{name}")
        return super().open(directory, name, direct=direct)


def test_attempt_with_unreadable_manifest_is_removed() -> None:
    tag = re.sub(r"-[0-9]+-[0-9]+$", "-1-1", process_identity.process_tag())
    backend, attempt = Unreadable(), f"/run/.c.tmp-{tag}-0"
    backend.make_directory(attempt, parents=True, sync=False)
    assert backend.write_new(f"{attempt}/manifest.json", b"{")
    remove_dead_attempts(backend, "/run/c")
    assert backend.list("/run") == []


class OpenedButUnreadable(MemoryBackend):
    """Open a manifest, but refuse to read it."""

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        source = super().open(directory, name, direct=direct)
        if name == "manifest.json" and ".tmp-" in directory:

            def refuse(*_: object) -> None:
                raise StorageError(errno.EIO, "cannot be read", f"{directory}/{name}")

            source.read_into = refuse  # type: ignore[method-assign]
        return source


def test_foreign_marker_keeps_unreadable_attempt() -> None:
    backend, replaced = OpenedButUnreadable(), f"/run/.c.tmp-{BEFORE_A_POWER_CUT}-0"
    backend.make_directory(f"{replaced}/data", parents=True, sync=False)
    for name, content in (("COMMIT", b""), ("manifest.json", b'{"of": "another"}'), ("data/weights", b"precious")):
        assert backend.write_new(f"{replaced}/{name}", content)
    with pytest.raises(StorageError, match="cannot be read"):
        remove_dead_attempts(backend, "/run/c")
    assert backend.list(f"{replaced}/data") != []

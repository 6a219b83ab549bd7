"""The order of operations that crash safety depends on, and the state after a crash at any point."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from jaxckpt_train.errors import CheckpointExistsError, NotACheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend, side_name
from jaxckpt_train.store.committed import open_committed
from jaxckpt_train.store.removal import final_name
from jaxckpt_train.store.transaction import Transaction
from tests.support.checkpoints import commit, load, written
from tests.support.memory_backend import MemoryBackend
from tests.support.recording import Died, RecordingBackend

OLD = {"x": np.zeros(5000, np.uint8), "y": np.arange(3)}
NEW = {"x": np.ones(5000, np.uint8), "y": np.arange(3) + 1}


def content(backend: object, path: str) -> dict[str, bytes]:
    return {name: found[0].tobytes() for name, found in load(backend, path, StoreSettings()).items()}


def raw(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def test_files_then_directories_then_rename_then_parent() -> None:
    backend = RecordingBackend(MemoryBackend())
    commit(backend, "/runs/a", OLD, StoreSettings())
    steps = backend.operations
    where = {what: [n for n, (op, path) in enumerate(steps) if op == what[0] and path.endswith(what[1])] for what in [
        ("create", "/COMMIT"), ("finish", "/COMMIT"), ("finish synced", ".safetensors"), ("sync", "/manifest.json"),
        ("sync", "/COMMIT"), ("sync", "/state"), ("rename", "/runs/a"), ("sync", "/runs"),
    ]}  # fmt: skip
    attempt = [
        n for n, (op, path) in enumerate(steps) if op == "sync" and path.rpartition("/")[2].startswith(".a.tmp-")
    ]
    assert all(where.values()), where
    assert where["finish synced", ".safetensors"][-1] < where["create", "/COMMIT"][0]
    synced = [where["sync", name][0] for name in ("/manifest.json", "/COMMIT", "/state")] + attempt[:1]
    assert where["finish", "/COMMIT"][0] < min(synced)
    assert max(synced) < where["rename", "/runs/a"][0] < where["sync", "/runs"][-1] == len(steps) - 1
    written = {path for op, path in steps if op == "finish"}
    assert written == {path for op, path in steps[: where["rename", "/runs/a"][0]] if op == "sync" and path in written}


@pytest.mark.parametrize(("durability", "files", "directories"), [("file", True, False), ("none", False, False)])
def test_weaker_durability_omits_its_syncs(durability: str, files: bool, directories: bool) -> None:
    backend = RecordingBackend(MemoryBackend())
    commit(backend, "/runs/a", OLD, StoreSettings(durability=durability))  # type: ignore[arg-type]
    assert any(op == "finish synced" for op, _ in backend.operations) is files
    synced = {path.rpartition("/")[2] for op, path in backend.operations if op == "sync"}
    assert ({"manifest.json", "COMMIT"} <= synced) is files
    assert ("state" in synced) is directories


@pytest.mark.parametrize("local", [False, True])
def test_crash_at_any_point_leaves_nothing_or_all(tmp_path: Path, local: bool) -> None:
    probe = RecordingBackend(MemoryBackend())
    commit(probe, "/runs/a", NEW, StoreSettings())
    for dies_at in range(len(probe.operations)):
        inner = LocalBackend() if local else MemoryBackend()
        final = str(tmp_path / str(dies_at) / "a") if local else "/runs/a"
        with pytest.raises(Died):
            commit(RecordingBackend(inner, dies_at), final, NEW, StoreSettings())
        try:
            assert content(inner, final) == raw(NEW)
        except NotACheckpointError:
            renamed = next(n for n, (op, _) in enumerate(probe.operations) if op == "rename")
            assert dies_at <= renamed


def test_crash_while_overwriting_leaves_old_or_new_one() -> None:
    probe = RecordingBackend(MemoryBackend())
    commit(probe, "/runs/a", OLD, StoreSettings())
    before = len(probe.operations)
    commit(probe, "/runs/a", NEW, StoreSettings(), replace=True)
    seen = set()
    for dies_at in range(before, len(probe.operations)):
        inner = MemoryBackend()
        backend = RecordingBackend(inner, dies_at)
        commit(backend, "/runs/a", OLD, StoreSettings())
        with pytest.raises(Died):
            commit(backend, "/runs/a", NEW, StoreSettings(), replace=True)
        found = content(inner, "/runs/a")
        assert found in (raw(OLD), raw(NEW))
        seen.add(found == raw(NEW))
    assert seen == {False, True}


class _Stuck(MemoryBackend):
    """After two checkpoints are exchanged, refuse to sync the parent and to exchange them back."""

    exchanged = False

    def exchange(self, first: str, second: str, *, sync: bool) -> None:
        if self.exchanged:
            raise StorageError(errno.EIO, "cannot exchange", second)
        super().exchange(first, second, sync=sync)
        self.exchanged = True

    def sync(self, path: str) -> None:
        if self.exchanged and path == "/runs":
            raise StorageError(errno.EIO, "cannot sync", path)
        super().sync(path)


def test_two_disk_failures_keep_the_older_checkpoint() -> None:
    backend = _Stuck()
    commit(backend, "/runs/a", OLD, StoreSettings())
    transaction = Transaction(backend, "/runs/a", StoreSettings())
    manifest = written(transaction, backend, NEW, StoreSettings())
    with pytest.raises(StorageError, match="cannot sync") as caught:
        transaction.commit(manifest, replace=True)
    transaction.abort()
    (left,) = [entry.name for entry in backend.list("/runs") if final_name(entry.name) == "a"]
    assert content(backend, f"/runs/{left}") == raw(OLD)
    assert content(backend, "/runs/a") == raw(NEW)
    notes = "\n".join(caught.value.__notes__)
    assert "/runs/a: " in notes
    assert left in notes


def test_interrupted_exchange_is_recovered_from_side_name(tmp_path: Path) -> None:
    final = str(tmp_path / "a")
    commit(LocalBackend(), final, OLD, StoreSettings())
    LocalBackend().rename(final, side_name(final))
    assert content(LocalBackend(), final) == raw(OLD)


def test_existing_checkpoint_is_not_replaced_by_default(tmp_path: Path) -> None:
    final = str(tmp_path / "a")
    commit(LocalBackend(), final, OLD, StoreSettings())
    with pytest.raises(CheckpointExistsError, match="pass overwrite=True"):
        commit(LocalBackend(), final, NEW, StoreSettings())
    assert content(LocalBackend(), final) == raw(OLD)
    commit(LocalBackend(), final, NEW, StoreSettings(), replace=True)
    assert content(LocalBackend(), final) == raw(NEW)
    left = [path for path in tmp_path.iterdir() if final_name(path.name) == "a"]
    assert len(left) == 1  # by the refused save, which was not aborted


def test_missing_commit_marker_is_reported(tmp_path: Path) -> None:
    final = tmp_path / "a"
    commit(LocalBackend(), str(final), OLD, StoreSettings())
    (final / "COMMIT").rename(final / "elsewhere")
    with pytest.raises(NotACheckpointError, match="has no COMMIT"):
        open_committed(LocalBackend(), str(final))
    with pytest.raises(NotACheckpointError, match=r"expected COMMIT and manifest\.json, found a$"):
        open_committed(LocalBackend(), str(tmp_path))


def test_refused_write_keeps_its_errno(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is where a directory is expected") as caught:
        commit(LocalBackend(), str(tmp_path / "file" / "a"), OLD, StoreSettings())
    assert caught.value.errno == errno.ENOTDIR

"""The file system of a directory: its kind from the mount table, and its space."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxckpt_train.errors import StorageError
from jaxckpt_train.manager import StepManager
from jaxckpt_train.store.backends import local
from jaxckpt_train.store.backends.local import LocalBackend, _mount_of, file_system_of, mount_warnings

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /dev/shm rw - tmpfs tmpfs rw
31 22 0:26 / /data rw master:1 - nfs4 server:/export rw
32 31 0:27 / /data/with\\040space rw - xfs /dev/sdb rw
33 22 0:28 / /data rw - lustre mgs:/fs rw
a malformed line
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/", ("ext4", "/")),
        ("/database", ("ext4", "/")),
        ("/dev/shm/run", ("tmpfs", "/dev/shm")),
        ("/data", ("lustre", "/data")),  # mounted over the other one
        ("/data/run/a", ("lustre", "/data")),
        ("/data/with space/run", ("xfs", "/data/with space")),
    ],
)
def test_longest_then_last_mount_point_wins(path: str, found: tuple[str, str]) -> None:
    assert _mount_of(path, MOUNTS)[:2] == found


def test_reported_space_is_that_of_statvfs(tmp_path: Path) -> None:
    found, expected = file_system_of(str(tmp_path)), os.statvfs(tmp_path)
    assert found.total_bytes == expected.f_blocks * expected.f_frsize
    assert 0 <= found.free_bytes <= found.total_bytes
    assert found.free_files is None or found.free_files > 0
    assert os.path.ismount(found.mount)
    assert found.kind not in ("", "unknown")


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    assert file_system_of(str(tmp_path / "link")).mount == file_system_of("/dev/shm").mount


def test_unreadable_mount_table_gives_unknown_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MOUNTS", str(tmp_path / "gone"))
    assert file_system_of(str(tmp_path)).kind == "unknown"
    with pytest.raises(StorageError, match="cannot inspect the file system"):
        file_system_of(str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("fuse.gcsfuse bucket rw,user_id=0", "gcsfuse"),
        ("fuse mountpoint-s3 rw", "mountpoint-s3"),
        ("fuse.rclone remote: rw", "rclone"),
        ("overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c,volatile", "volatile"),
        ("ext4 /dev/sda1 rw,nobarrier", "nobarrier"),
        ("ext4 /dev/s3fs rw", None),
        ("fuse.mergerfs a:b rw", None),
        ("overlay overlay rw,lowerdir=/a,upperdir=/volatile,workdir=/c", None),
    ],
)
def test_unreliable_mounts_are_named_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, line: str, named: str | None
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"{MOUNTS}40 22 0:40 / {tmp_path} rw,relatime shared:1 - {line}\n")
    monkeypatch.setattr(local, "MOUNTS", str(mounts))
    assert [named in each for each in mount_warnings(str(tmp_path / "run"))] == ([True] if named else [])
    with StepManager(tmp_path / "run", backend=LocalBackend()) as manager:
        manager.own()
    assert [str(named) in each.getMessage() for each in caplog.records] == ([True] if named else [])

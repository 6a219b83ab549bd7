"""Bad input: each kind raises its own error that says what to do, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.checkpoints import rewrite
from tests.support.file_content import content
from tests.support.runs import folder_of

STATE = {"params": {"w": np.arange(5000.0), "b": np.ones(3)}, "step": 7}
READERS: dict[str, Callable[[Path], Any]] = {
    "load": jct.load,
    "load into a target": lambda path: jct.load(path, STATE),
    "load_checkpointables": jct.load_checkpointables,
    "metadata": jct.metadata,
    "verify": jct.verify,
}
every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    jct.save(tmp_path / "c", STATE)
    return tmp_path / "c"


def segment_of(checkpoint: Path) -> Path:
    (segment,) = (folder_of(checkpoint) / "state").glob("*.safetensors")
    return segment


@every_reader
def test_missing_path_is_no_checkpoint(read: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(jct.NotACheckpointError, match=r"missing: .*found nothing"):
        read(tmp_path / "missing")


@every_reader
def test_empty_directory_is_no_checkpoint(read: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(jct.NotACheckpointError, match="found an empty directory"):
        read(tmp_path)


@every_reader
def test_other_directory_is_no_checkpoint(read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1")
    (tmp_path / "data").mkdir()
    before = content(tmp_path)
    with pytest.raises(jct.NotACheckpointError, match=r"found data, model.py"):
        read(tmp_path)
    assert content(tmp_path) == before


@every_reader
def test_directory_of_checkpoints_is_refused(read: Callable[[Path], Any], saved: Path) -> None:
    with pytest.raises(jct.NotACheckpointError, match=f"directory of 1; .* {saved}$"):
        read(saved.parent)


@every_reader
def test_file_is_no_checkpoint(read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x00not msgpack of Flax")
    with pytest.raises(jct.NotACheckpointError, match=r"found (a|another) file"):
        read(tmp_path / "file")


@every_reader
def test_checkpoint_without_commit_is_incomplete(read: Callable[[Path], Any], saved: Path) -> None:
    (saved / "COMMIT").unlink()
    before = content(saved)
    with pytest.raises(jct.IncompleteCheckpointError, match="has no COMMIT"):
        read(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(jct.IncompleteCheckpointError, match="has no COMMIT"):
        read(saved)
    assert content(saved) == {name: data for name, data in before.items() if name != "manifest.json"}


@every_reader
def test_newer_format_version_is_refused(read: Callable[[Path], Any], saved: Path) -> None:
    rewrite(saved, lambda manifest: manifest.update(format_version=3, parts={"of": "tomorrow"}))
    before = content(saved)
    with pytest.raises(jct.FormatVersionError, match=r"version 3, .*up to 2; .*upgrade"):
        read(saved)
    assert content(saved) == before


@every_reader
def test_commit_newer_than_its_manifest_is_damage(read: Callable[[Path], Any], saved: Path) -> None:
    commit = (saved / "COMMIT").read_bytes()
    (saved / "COMMIT").write_bytes(commit.replace(b'"format_version":1', b'"format_version":3'))
    assert (saved / "COMMIT").read_bytes() != commit
    check_corrupt(read, saved, "COMMIT: not valid")


def check_corrupt(read: Callable[[Path], Any], path: Path, reason: str) -> None:
    if read is jct.verify:  # reports instead of raising
        report = jct.verify(path)
        assert not report.ok
        assert any(reason in problem for problem in report.problems), report.problems
        return
    with pytest.raises(jct.CorruptCheckpointError) as caught:
        read(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


@every_reader
def test_truncated_manifest_is_damage(read: Callable[[Path], Any], saved: Path) -> None:
    data = (folder_of(saved) / "manifest.json").read_bytes()
    (folder_of(saved) / "manifest.json").write_bytes(data[:-10])
    check_corrupt(read, saved, f"manifest.json: {len(data) - 10} bytes, but COMMIT says {len(data)}")


@every_reader
def test_edited_manifest_is_damage(read: Callable[[Path], Any], saved: Path) -> None:
    data = (folder_of(saved) / "manifest.json").read_bytes()
    (folder_of(saved) / "manifest.json").write_bytes(data.replace(b'"7"', b'"8"'))
    check_corrupt(read, saved, "manifest.json: damaged: its SHA-256 differs")


@every_reader
def test_missing_manifest_is_damage(read: Callable[[Path], Any], saved: Path) -> None:
    (folder_of(saved) / "manifest.json").unlink()
    check_corrupt(read, saved, "manifest.json: missing")


@every_reader
@pytest.mark.parametrize("text", ["", "{", '"text"', "\x00" * 100, '{"format":"other","format_version":1}', "{}"])
def test_invalid_commit_is_damage(read: Callable[[Path], Any], text: str, saved: Path) -> None:
    (saved / "COMMIT").write_text(text)
    check_corrupt(read, saved, "COMMIT: ")


DATA_READERS = {name: read for name, read in READERS.items() if name != "metadata"}
data_readers = pytest.mark.parametrize("read", DATA_READERS.values(), ids=DATA_READERS)


@data_readers
def test_missing_segment_is_damage(read: Callable[[Path], Any], saved: Path) -> None:
    segment_of(saved).unlink()
    check_corrupt(read, saved, "state/p00000-s000.safetensors: the manifest names this segment, but")
    assert jct.metadata(saved).checkpointables["state"].leaves["step"].value == 7


@data_readers
@pytest.mark.parametrize("at", [4096, 20000, -1])
def test_changed_byte_in_segment_is_damage(read: Callable[[Path], Any], at: int, saved: Path) -> None:
    data = bytearray(segment_of(saved).read_bytes())
    data[at] ^= 4
    segment_of(saved).write_bytes(data)
    check_corrupt(read, saved, "are not what was saved")


@data_readers
@pytest.mark.parametrize("change", [-1, -5000, 1])
def test_segment_of_other_length_is_damage(read: Callable[[Path], Any], change: int, saved: Path) -> None:
    data = segment_of(saved).read_bytes()
    size = len(data)
    segment_of(saved).write_bytes((data + bytes(1))[: size + change])
    check_corrupt(read, saved, f"{size + change} bytes, but the manifest says {size}")


@data_readers
def test_link_instead_of_segment_is_damage(read: Callable[[Path], Any], saved: Path) -> None:
    elsewhere = saved.parent / "elsewhere"
    segment_of(saved).rename(elsewhere)
    (saved / "state" / "p00000-s000.safetensors").symlink_to(elsewhere)
    check_corrupt(read, saved, "state/p00000-s000.safetensors: the manifest names this segment, but")


@every_reader
def test_manifest_naming_a_file_elsewhere_is_damage(read: Callable[[Path], Any], saved: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["segments"][0][0] = "state/../../../etc/passwd"

    rewrite(saved, change)
    check_corrupt(read, saved, "'state/../../../etc/passwd' is not a plain file")


@pytest.mark.parametrize("kind", ["checkpoint", "file", "directory", "full directory", "broken link"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_existing_path_is_never_lost(kind: str, overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "there"
    if kind == "checkpoint":
        jct.save(path, {"old": 1})
    elif kind == "file":
        path.write_text("thesis")
    elif kind == "broken link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
        if kind == "full directory":
            (path / "thesis").write_text("thesis")
    before = content(tmp_path)
    if kind == "checkpoint" and overwrite:
        jct.save(path, STATE, overwrite=True)
        assert jct.load(path, only="step") == {"step": 7}
        return
    wanted = "already exists; pass overwrite=True" if kind == "checkpoint" else "already exists and is not a checkpoint"
    with pytest.raises(jct.CheckpointExistsError, match=f"there: {wanted}"):
        jct.save(path, STATE, overwrite=overwrite)
    assert content(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]


def test_file_as_parent_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("thesis")
    with pytest.raises(jct.StorageError, match="runs"):
        jct.save(tmp_path / "runs" / "c", STATE)
    assert (tmp_path / "runs").read_text() == "thesis"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(jct.StorageError, match="Permission denied"):
        jct.save(tmp_path / "locked" / "c", STATE)

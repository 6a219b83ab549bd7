"""Bad input: for each sort an error of its own that says what to do, and nothing lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.checkpoints import rewrite
from tests.support.file_content import content

STATE = {"params": {"w": np.arange(5000.0), "b": np.ones(3)}, "step": 7}
READERS: dict[str, Callable[[Path], Any]] = {
    "load": jct.load,
    "load into a target": lambda path: jct.load(path, STATE),
    "load_checkpointables": jct.load_checkpointables,
    "metadata": jct.metadata,
    "verify": jct.verify,
}
everyone = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    jct.save(tmp_path / "c", STATE)
    return tmp_path / "c"


def segment_of(checkpoint: Path) -> Path:
    (segment,) = (checkpoint / "state").glob("*.safetensors")
    return segment


@everyone
def test_nothing_there(read: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(jct.NotACheckpointError, match="missing: expected a checkpoint directory, found nothing"):
        read(tmp_path / "missing")


@everyone
def test_an_empty_directory(read: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(jct.NotACheckpointError, match=r"expected COMMIT and manifest.json, found an empty directory"):
        read(tmp_path)


@everyone
def test_a_directory_of_something_else(read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1")
    (tmp_path / "data").mkdir()
    before = content(tmp_path)
    with pytest.raises(jct.NotACheckpointError, match=r"not a checkpoint: expected COMMIT .*, found data, model.py"):
        read(tmp_path)
    assert content(tmp_path) == before


@everyone
def test_a_directory_of_checkpoints(read: Callable[[Path], Any], saved: Path) -> None:
    with pytest.raises(jct.NotACheckpointError, match=f"found a directory of 1; pass one .* {saved}$"):
        read(saved.parent)


@everyone
def test_a_file(read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x00not msgpack of Flax")
    with pytest.raises(jct.NotACheckpointError, match=r"expected a checkpoint directory.*, found (a|another) file"):
        read(tmp_path / "file")


@everyone
def test_checkpoint_without_its_commit_was_copied_in_part(read: Callable[[Path], Any], saved: Path) -> None:
    (saved / "COMMIT").unlink()
    before = content(saved)
    with pytest.raises(jct.IncompleteCheckpointError, match="has no COMMIT: never committed, or copied only in part"):
        read(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(jct.IncompleteCheckpointError, match="has no COMMIT"):
        read(saved)
    assert content(saved) == {name: data for name, data in before.items() if name != "manifest.json"}


@everyone
def test_a_newer_format_version(read: Callable[[Path], Any], saved: Path) -> None:
    rewrite(saved, lambda manifest: manifest.update(format_version=2, parts={"of": "tomorrow"}))
    before = content(saved)
    with pytest.raises(
        jct.FormatVersionError, match=r"format version 2, but .* reads up to 1; upgrade: pip install -U"
    ):
        read(saved)
    assert content(saved) == before


@everyone
def test_a_version_of_commit_that_its_manifest_does_not_know_is_damage(
    read: Callable[[Path], Any], saved: Path
) -> None:
    commit = (saved / "COMMIT").read_bytes()
    (saved / "COMMIT").write_bytes(commit.replace(b'"format_version":1', b'"format_version":3'))
    assert (saved / "COMMIT").read_bytes() != commit
    corrupt(read, saved, "COMMIT: not valid: the manifest states an older")


def corrupt(read: Callable[[Path], Any], path: Path, reason: str) -> None:
    if read is jct.verify:  # reports instead of raising
        report = jct.verify(path)
        assert not report.ok
        assert any(reason in problem for problem in report.problems), report.problems
        return
    with pytest.raises(jct.CorruptCheckpointError) as caught:
        read(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


@everyone
def test_a_truncated_manifest(read: Callable[[Path], Any], saved: Path) -> None:
    data = (saved / "manifest.json").read_bytes()
    (saved / "manifest.json").write_bytes(data[:-10])
    corrupt(read, saved, f"manifest.json: {len(data) - 10} bytes, but COMMIT says {len(data)}")


@everyone
def test_a_manifest_that_was_edited(read: Callable[[Path], Any], saved: Path) -> None:
    data = (saved / "manifest.json").read_bytes()
    (saved / "manifest.json").write_bytes(data.replace(b'"7"', b'"8"'))
    corrupt(read, saved, "manifest.json: damaged: its SHA-256 differs")


@everyone
def test_a_missing_manifest(read: Callable[[Path], Any], saved: Path) -> None:
    (saved / "manifest.json").unlink()
    corrupt(read, saved, "manifest.json: missing, but COMMIT refers to it")


@everyone
@pytest.mark.parametrize("text", ["", "{", '"text"', "\x00" * 100, '{"format":"other","format_version":1}', "{}"])
def test_a_damaged_commit(read: Callable[[Path], Any], text: str, saved: Path) -> None:
    (saved / "COMMIT").write_text(text)
    corrupt(read, saved, "COMMIT: ")


DATA_READERS = {name: read for name, read in READERS.items() if name != "metadata"}
data_readers = pytest.mark.parametrize("read", DATA_READERS.values(), ids=DATA_READERS)


@data_readers
def test_a_missing_segment(read: Callable[[Path], Any], saved: Path) -> None:
    segment_of(saved).unlink()
    corrupt(read, saved, "state/p00000-s000.safetensors: the manifest names this segment, but")
    assert jct.metadata(saved).checkpointables["state"].leaves["step"].value == 7


@data_readers
@pytest.mark.parametrize("at", [4096, 20000, -1])
def test_a_segment_changed_in_one_byte(read: Callable[[Path], Any], at: int, saved: Path) -> None:
    data = bytearray(segment_of(saved).read_bytes())
    data[at] ^= 4
    segment_of(saved).write_bytes(data)
    corrupt(read, saved, "are not what was saved")


@data_readers
@pytest.mark.parametrize("change", [-1, -5000, 1])
def test_a_segment_of_another_length(read: Callable[[Path], Any], change: int, saved: Path) -> None:
    size = segment_of(saved).stat().st_size
    os.truncate(segment_of(saved), size + change)
    corrupt(read, saved, f"{size + change} bytes, but the manifest says {size}")


@data_readers
def test_a_link_in_place_of_a_segment(read: Callable[[Path], Any], saved: Path) -> None:
    elsewhere = saved.parent / "elsewhere"
    segment_of(saved).rename(elsewhere)
    (saved / "state" / "p00000-s000.safetensors").symlink_to(elsewhere)
    corrupt(read, saved, "state/p00000-s000.safetensors: the manifest names this segment, but")


@everyone
def test_a_manifest_that_names_a_file_elsewhere(read: Callable[[Path], Any], saved: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["segments"][0][0] = "state/../../../etc/passwd"

    rewrite(saved, change)
    corrupt(read, saved, "'state/../../../etc/passwd' is not a plain file of a checkpointable")


def test_a_target_with_another_structure(saved: Path) -> None:
    with pytest.raises(jct.MismatchError, match=r"leaf 'params/b': saved float64.3., not in the target") as caught:
        jct.load(saved, {"params": {"w": STATE["params"]["w"]}, "step": 0, "new": jax.ShapeDtypeStruct((2,), jnp.int8)})
    assert caught.value.differences == (
        "leaf 'new': not in the checkpoint, wanted int8[2]",
        "leaf 'params/b': saved float64[3], not in the target",
    )


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


def test_a_file_where_a_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("thesis")
    with pytest.raises(jct.StorageError, match="runs"):
        jct.save(tmp_path / "runs" / "c", STATE)
    assert (tmp_path / "runs").read_text() == "thesis"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(jct.StorageError, match="Permission denied"):
        jct.save(tmp_path / "locked" / "c", STATE)

"""A written checkpoint is read back from disk with the same bytes, and damage to its files is found."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from jaxckpt_train.errors import CorruptCheckpointError, SettingsError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.committed import open_committed
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import read_boxes
from jaxckpt_train.store.verify import verify
from tests.support.checkpoints import commit, load

MIB = 1 << 20


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4 * MIB, 4 * MIB + 1, 23 * MIB + 12345])
def test_sizes_around_blocks_pages_and_buffers_survive_disk(tmp_path: Path, size: int, direct: Any) -> None:
    settings = StoreSettings(direct_io=direct, staging_bytes=2 * MIB, segment_bytes=16 * MIB)
    arrays = {
        "a": np.random.default_rng(size).integers(0, 256, size, np.uint8),
        "b": np.arange(5.0),
        "c": np.random.default_rng(1).random((size // 8 % 1000 + 1, 7)),
    }
    commit(LocalBackend(), str(tmp_path / "a"), arrays, settings)
    found = load(LocalBackend(), str(tmp_path / "a"), settings)
    for name, array in arrays.items():
        assert found[name][0].tobytes() == array.tobytes()
    report = verify(LocalBackend(), str(tmp_path / "a"), settings)
    assert report.ok
    assert report.checked_bytes >= sum(array.nbytes for array in arrays.values())


def test_safetensors_itself_reads_the_same_bytes(tmp_path: Path) -> None:
    arrays = {
        "layer/kernel": np.random.default_rng(0).random((64, 32), np.float32),
        "layer/half": np.arange(10).astype(ml_dtypes.bfloat16),
        "tiny": np.arange(6).astype(ml_dtypes.int4),
        "wide": np.arange(4).astype(np.complex128),
    }
    boxes = {"layer/kernel": [((0, 32), (0, 32)), ((32, 64), (0, 32))]}
    committed = commit(LocalBackend(), str(tmp_path / "a"), arrays, StoreSettings(), boxes=boxes)
    file = tmp_path / "a" / committed.manifest.segments[0].file
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert (8 + header) % 4096 == 0
    with safe_open(str(file), framework="np") as opened:
        assert set(opened.keys()) == {
            "layer/kernel@[0:32,0:32]", "layer/kernel@[32:64,0:32]", "layer/half", "tiny", "wide",
        }  # fmt: skip
        assert opened.get_tensor("layer/kernel@[32:64,0:32]").tobytes() == arrays["layer/kernel"][32:].tobytes()
        assert opened.get_tensor("layer/half").tobytes() == arrays["layer/half"].tobytes()
        assert opened.get_tensor("tiny").tobytes() == arrays["tiny"].tobytes()
        assert opened.get_tensor("wide").shape == (4, 16)


@pytest.mark.parametrize("digest", ["xxh3-128", "sha256", "blake3"])
def test_one_flipped_bit_anywhere_is_found_and_named(tmp_path: Path, digest: Any) -> None:
    settings = StoreSettings(digest=digest)
    arrays = {"big": np.random.default_rng(0).random(3 * MIB // 4), "small": np.arange(7.0)}
    committed = commit(LocalBackend(), str(tmp_path / "a"), arrays, settings)
    file = tmp_path / "a" / committed.manifest.segments[0].file
    clean, start = file.read_bytes(), committed.manifest.segments[0].header_bytes
    chance = random.Random(3)
    places = [start, len(clean) - 1, *(chance.randrange(start, len(clean)) for _ in range(12))]
    for place in places:
        file.write_bytes(clean[:place] + bytes([clean[place] ^ (1 << chance.randrange(8))]) + clean[place + 1 :])
        leaf = "big" if place < start + arrays["big"].nbytes else "small"
        with pytest.raises(CorruptCheckpointError, match=rf"p00000-s000.safetensors: bytes .* of leaf '{leaf}'"):
            load(LocalBackend(), str(tmp_path / "a"), settings)
        assert not verify(LocalBackend(), str(tmp_path / "a"), settings).ok
    for place in (3, 100, start - 1):
        file.write_bytes(clean[:place] + bytes([clean[place] ^ 1]) + clean[place + 1 :])
        assert "header is not what was saved" in verify(LocalBackend(), str(tmp_path / "a"), settings).problems[0]
    file.write_bytes(clean)
    assert verify(LocalBackend(), str(tmp_path / "a"), settings).ok


def test_unused_digest_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"x": np.arange(5000.0)}
    commit(LocalBackend(), str(tmp_path / "a"), arrays, StoreSettings(digest="blake3"))
    monkeypatch.setitem(sys.modules, "blake3", None)
    found = load(LocalBackend(), str(tmp_path / "a"), StoreSettings(verify_on_load=False))
    assert found["x"][0].tobytes() == arrays["x"].tobytes()
    with pytest.raises(SettingsError, match="requires the package blake3"):
        load(LocalBackend(), str(tmp_path / "a"), StoreSettings())


def test_damage_is_unseen_only_without_verification(tmp_path: Path) -> None:
    settings = StoreSettings()
    committed = commit(LocalBackend(), str(tmp_path / "a"), {"x": np.zeros(100, np.uint8)}, settings)
    file = tmp_path / "a" / committed.manifest.segments[0].file
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    found = load(LocalBackend(), str(tmp_path / "a"), StoreSettings(verify_on_load=False))["x"][0]
    assert found[-1] == 1


@pytest.mark.parametrize("change", ["shorter", "longer", "missing", "link", "pipe"])
def test_replaced_segment_file_is_named(tmp_path: Path, change: str) -> None:
    committed = commit(LocalBackend(), str(tmp_path / "a"), {"x": np.arange(9.0)}, StoreSettings())
    file = tmp_path / "a" / committed.manifest.segments[0].file
    data = file.read_bytes()
    file.unlink()
    if change in ("shorter", "longer"):
        file.write_bytes(data[:-1] if change == "shorter" else data + b"\0")
    elif change == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        file.symlink_to(tmp_path / "elsewhere")
    elif change == "pipe":
        os.mkfifo(file)
    with pytest.raises(CorruptCheckpointError, match=r"state/p00000-s000.safetensors: .*(but the manifest says|names)"):
        load(LocalBackend(), str(tmp_path / "a"), StoreSettings())


def test_files_are_all_open_before_the_first_read(tmp_path: Path) -> None:
    """Retention may remove the step in the middle of a load."""
    arrays = {f"x{n}": np.full(MIB, n, np.uint8) for n in range(4)}
    commit(LocalBackend(), str(tmp_path / "a"), arrays, StoreSettings(segment_bytes=MIB))

    class RemovedMeanwhile(LocalBackend):
        def open(self, directory: str, name: str, *, direct: Any) -> Any:
            source = super().open(directory, name, direct=direct)
            if name.endswith("s003.safetensors"):
                super().remove(directory)
            return source

    committed = open_committed(RemovedMeanwhile(), str(tmp_path / "a"))
    wanted = [Wanted(array, [full_box(array.shape)]) for array in committed.manifest.parts[0].arrays]
    found = read_boxes(RemovedMeanwhile(), committed, wanted, StoreSettings())
    assert not (tmp_path / "a").exists()
    assert [content[0][0] for content in found] == [0, 1, 2, 3]

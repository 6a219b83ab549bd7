"""What is written is what is read: any dtype, any cut, any other cut, any settings, on disk and in memory."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from jaxckpt_train.errors import CorruptCheckpointError, SettingsError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.backends.memory import MemoryBackend
from jaxckpt_train.store.boxes import Box, box_shape, full_box, slices_within
from jaxckpt_train.store.committed import open_committed
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.reader import read_boxes
from jaxckpt_train.store.verify import verify
from tests.support.checkpoints import commit, load

MIB = 1 << 20


def random_bytes(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 2, (*shape, dtype.itemsize), np.uint8)
    return np.ascontiguousarray(raw).view(dtype).reshape(shape)


def cut(box: Box, chance: random.Random, depth: int) -> list[Box]:
    """A random tiling: split along a random dimension, and again."""
    wide = [d for d, (start, stop) in enumerate(box) if stop - start > 1]
    if depth == 0 or not wide:
        return [box]
    axis = chance.choice(wide)
    start, stop = box[axis]
    at = chance.randint(start + 1, stop - 1)
    halves = [(*box[:axis], part, *box[axis + 1 :]) for part in ((start, at), (at, stop))]
    return [piece for half in halves for piece in cut(half, chance, depth - chance.randint(1, depth))]


@st.composite
def cases(draw: Any) -> tuple[dict[str, np.ndarray], dict[str, list[Box]], dict[str, list[Box]]]:
    chance = random.Random(draw(st.integers(0, 10**9)))
    arrays, written, wanted = {}, {}, {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        array = random_bytes(shape, dtype, number)
        if draw(st.booleans()) and array.ndim > 1:
            array = np.asfortranarray(array)
        name = f"leaf{number}"
        arrays[name] = array
        if array.size:
            written[name] = cut(full_box(shape), chance, 3)
            wanted[name] = list(dict.fromkeys(cut(full_box(shape), chance, 3)))
    return arrays, written, wanted


@given(cases(), st.sampled_from([1 * MIB, 64 * MIB]), st.integers(1, 3))
def test_any_boxes_come_back_from_any_other_cut(case: Any, staging: int, threads: int) -> None:
    arrays, written, wanted = case
    settings = StoreSettings(staging_bytes=staging, io_threads=threads)
    backend = MemoryBackend()
    commit(backend, "/runs/a", arrays, settings, boxes=written)
    found = load(backend, "/runs/a", settings, wanted)
    for name, array in arrays.items():
        for box, content in zip(wanted.get(name, [full_box(array.shape)]), found[name], strict=True):
            expected = array[slices_within(box, full_box(array.shape))]
            assert content.dtype == array.dtype
            assert content.shape == box_shape(box)
            assert content.tobytes() == expected.tobytes()
            assert content.flags.writeable
            assert content.size == 0 or content.ctypes.data % 64 == 0
    assert verify(backend, "/runs/a", settings).ok


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


def test_big_endian_and_strided_sources_are_stored_row_major_and_little_endian(tmp_path: Path) -> None:
    whole = np.arange(60, dtype=">f8").reshape(6, 10)
    commit(LocalBackend(), str(tmp_path / "a"), {"x": whole[::2, ::3]}, StoreSettings())
    found = load(LocalBackend(), str(tmp_path / "a"), StoreSettings())["x"][0]
    assert found.dtype == np.dtype("<f8")
    assert found.tobytes() == np.ascontiguousarray(whole[::2, ::3]).astype("<f8").tobytes()


def test_a_chunk_larger_than_the_read_budget_is_cut_up_in_bands(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (48, MIB // 2), np.uint8)
    settings = StoreSettings(read_budget_bytes=8 * MIB)
    commit(LocalBackend(), str(tmp_path / "a"), {"x": array}, settings)
    half = MIB // 4
    columns = [((0, 48), (0, half)), ((0, 48), (half, 2 * half))]
    left, right = load(LocalBackend(), str(tmp_path / "a"), settings, {"x": columns})["x"]
    assert left.tobytes() == np.ascontiguousarray(array[:, :half]).tobytes()
    assert right.tobytes() == np.ascontiguousarray(array[:, half:]).tobytes()


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


def test_digest_that_is_not_compared_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"x": np.arange(5000.0)}
    commit(LocalBackend(), str(tmp_path / "a"), arrays, StoreSettings(digest="blake3"))
    monkeypatch.setitem(sys.modules, "blake3", None)
    found = load(LocalBackend(), str(tmp_path / "a"), StoreSettings(verify_on_load=False))
    assert found["x"][0].tobytes() == arrays["x"].tobytes()
    with pytest.raises(SettingsError, match="requires the package blake3"):
        load(LocalBackend(), str(tmp_path / "a"), StoreSettings())


def test_without_verification_damage_goes_unseen_on_request_only(tmp_path: Path) -> None:
    settings = StoreSettings()
    committed = commit(LocalBackend(), str(tmp_path / "a"), {"x": np.zeros(100, np.uint8)}, settings)
    file = tmp_path / "a" / committed.manifest.segments[0].file
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    found = load(LocalBackend(), str(tmp_path / "a"), StoreSettings(verify_on_load=False))["x"][0]
    assert found[-1] == 1


@pytest.mark.parametrize("change", ["shorter", "longer", "missing", "link", "pipe"])
def test_segment_that_is_not_saved_file_is_named(tmp_path: Path, change: str) -> None:
    import os

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
    """A retention that removes the step in the middle of a load does no harm."""
    arrays = {f"x{n}": np.full(MIB, n, np.uint8) for n in range(4)}
    commit(LocalBackend(), str(tmp_path / "a"), arrays, StoreSettings(segment_bytes=MIB))

    class RemovedMeanwhile(LocalBackend):
        def open(self, directory: str, name: str, *, direct: Any) -> Any:
            source = super().open(directory, name, direct=direct)
            if name.endswith("s003.safetensors"):
                super().remove(directory)
            return source

    committed = open_committed(RemovedMeanwhile(), str(tmp_path / "a"))
    from jaxckpt_train.store.read_plan import Wanted

    wanted = [Wanted(array, [full_box(array.shape)]) for array in committed.manifest.parts[0].arrays]
    found = read_boxes(RemovedMeanwhile(), committed, wanted, StoreSettings())
    assert not (tmp_path / "a").exists()
    assert [content[0][0] for content in found] == [0, 1, 2, 3]

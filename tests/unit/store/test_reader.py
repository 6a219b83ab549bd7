"""Reading any boxes of any arrays: right bytes, each read once, within the budget, and all damage is found."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.errors import CorruptCheckpointError, StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store import reader
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.boxes import Box, box_shape, full_box
from jaxckpt_train.store.committed import open_committed
from jaxckpt_train.store.read_plan import Wanted
from jaxckpt_train.store.reader import iter_boxes, read_boxes
from jaxckpt_train.store.verify import verify
from tests.support.checkpoints import commit, load
from tests.support.strategies import arrays, boxes_in, tilings
from tests.support.strict_backend import PAGE, StrictBackend, small_sizes


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    yield from small_sizes()


@st.composite
def small_settings(draw: st.DrawFn) -> StoreSettings:
    return StoreSettings(
        segment_bytes=draw(st.sampled_from([1, 5000, 100_000, 1 << 30])),
        staging_bytes=draw(st.sampled_from([PAGE, 3 * PAGE, 64 * PAGE])),
        read_budget_bytes=draw(st.sampled_from([1, 4 * PAGE, 64 * PAGE, 1 << 30])),
        io_threads=draw(st.integers(1, 3)),
        digest=draw(st.sampled_from(["xxh3-128", "sha256", "blake3"])),
    )


@st.composite
def saves(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], dict[str, list[Box]]]:
    """Draw arrays and the boxes in which they are saved."""
    found = {f"leaf{number}": draw(arrays()) for number in range(draw(st.integers(1, 4)))}
    return found, {name: draw(tilings(array.shape)) for name, array in found.items() if array.size}


def cut_out(array: np.ndarray, box: Box) -> np.ndarray:
    part = array[(*(slice(*side) for side in box), ...)]
    return part.astype(part.dtype.newbyteorder("<"), order="C")


def check(found: dict[str, list[np.ndarray]], saved: dict[str, np.ndarray], boxes: dict[str, Sequence[Box]]) -> None:
    for name, array in saved.items():
        for box, part in zip(boxes.get(name, [full_box(array.shape)]), found[name], strict=True):
            assert part.dtype == array.dtype.newbyteorder("=")
            assert part.shape == box_shape(box)
            assert part.tobytes() == cut_out(array, box).tobytes()
            assert part.flags.writeable
            assert part.flags.c_contiguous
            assert part.size == 0 or part.ctypes.data % 64 == 0


@settings(max_examples=300)
@given(st.data(), saves(), small_settings())
def test_any_boxes_of_anything_come_back(
    data: st.DataObject, save: tuple[dict[str, np.ndarray], dict[str, list[Box]]], chosen: StoreSettings
) -> None:
    saved, cuts = save
    backend = StrictBackend()
    commit(backend, "/runs/a", saved, chosen, boxes=cuts)
    boxes = {
        name: data.draw(st.lists(boxes_in(array.shape), max_size=4, unique=True))
        for name, array in saved.items()
        if array.size
    }
    check(load(backend, "/runs/a", chosen, boxes), saved, boxes)
    assert verify(backend, "/runs/a", chosen).problems == ()
    assert backend.open_files == 0


@settings(max_examples=60)
@given(st.data(), saves(), small_settings(), st.sampled_from(["auto", False]))
def test_any_boxes_come_back_from_disk(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, save: Any, chosen: StoreSettings, direct: Any
) -> None:
    saved, cuts = save
    final = str(tmp_path_factory.mktemp("disk") / "a")
    commit(LocalBackend(), final, saved, chosen, boxes=cuts)
    boxes = {name: data.draw(tilings(array.shape)) for name, array in saved.items() if array.size}
    check(load(LocalBackend(), final, chosen, boxes), saved, boxes)


@settings(max_examples=60)
@given(st.data(), saves(), small_settings())
def test_results_of_disjoint_boxes_share_no_memory(data: st.DataObject, save: Any, chosen: StoreSettings) -> None:
    saved, cuts = save
    backend = StrictBackend()
    commit(backend, "/runs/a", saved, chosen, boxes=cuts)
    boxes = {name: data.draw(tilings(array.shape)) for name, array in saved.items() if array.size}
    parts = [part for found in load(backend, "/runs/a", chosen, boxes).values() for part in found]
    for part in parts:
        part.reshape(-1).view(np.uint8)[:] = 0
    for number, part in enumerate(parts):
        part.reshape(-1).view(np.uint8)[:] = number % 251
    for number, part in enumerate(parts):
        assert (part.reshape(-1).view(np.uint8) == number % 251).all()


@settings(max_examples=100)
@given(st.data(), saves())
def test_each_byte_is_read_once(data: st.DataObject, save: Any) -> None:
    """Except for a page at the border of two reads, which both need."""
    saved, cuts = save
    backend = StrictBackend()
    commit(backend, "/runs/a", saved, StoreSettings(), boxes=cuts)
    boxes = {name: data.draw(tilings(array.shape)) for name, array in saved.items() if array.size}
    check(load(backend, "/runs/a", StoreSettings(), boxes), saved, boxes)
    by_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for path, offset, needed in backend.reads:
        by_file[path].append((offset, offset + needed))
    for ranges in by_file.values():
        for (_, stop), (start, _) in itertools.pairwise(sorted(ranges)):
            assert stop - start < PAGE


def test_one_row_takes_only_blocks_that_hold_it() -> None:
    backend, array = StrictBackend(), np.arange(1 << 20, dtype=np.uint8).reshape(1 << 10, 1 << 10)
    commit(backend, "/runs/a", {"x": array}, StoreSettings())
    first, last = ((3, 4), (0, 1 << 10)), ((1000, 1001), (0, 1 << 10))
    check(load(backend, "/runs/a", StoreSettings(), {"x": [first, last]}), {"x": array}, {"x": [first, last]})
    assert sum(needed for _, _, needed in backend.reads) <= 4 * PAGE


@pytest.mark.parametrize("budget", [16 * PAGE, 64 * PAGE, 200 * PAGE])
@pytest.mark.parametrize("threads", [1, 3])
def test_load_that_cuts_stays_within_the_budget(budget: int, threads: int) -> None:
    backend = StrictBackend()
    saved = {f"x{n}": np.random.default_rng(n).integers(0, 256, (512, 1024), np.uint8) for n in range(4)}
    chosen = StoreSettings(read_budget_bytes=budget, io_threads=threads)
    commit(backend, "/runs/a", saved, chosen)
    columns = {name: [((0, 512), (at, at + 256)) for at in range(0, 1024, 256)] for name in saved}
    check(load(backend, "/runs/a", chosen, columns), saved, columns)
    assert 0 < backend.most_held_bytes <= budget


ROWS = np.random.default_rng(0).integers(0, 256, (1, 300, 1024), np.uint8)


@pytest.mark.parametrize(
    ("array", "cuts"),
    [
        (ROWS[0, :, :1001], [full_box((300, 1001))]),  # unaligned, so it is moved as a whole
        (ROWS[0, :, :1001], [((0, 150), (0, 1001)), ((150, 300), (0, 1001))]),
        (ROWS, [((0, 1), (0, 300), (0, 512)), ((0, 1), (0, 300), (512, 1024))]),  # its leading row is the whole array
        (ROWS.reshape(2, 150, 1024), [((0, 2), (0, 150), (at, at + 256)) for at in range(0, 1024, 256)]),
    ],
)
def test_large_array_respects_budget_in_any_layout(array: np.ndarray, cuts: list[Box]) -> None:
    backend, chosen = StrictBackend(), StoreSettings(read_budget_bytes=32 * PAGE, io_threads=1)
    saved = {"a": np.zeros(3, np.uint8), "x": np.ascontiguousarray(array)}  # the first makes the other unaligned
    (wanted,) = [
        Wanted(x, cuts) for x in commit(backend, "/a", saved, chosen).manifest.parts[0].arrays if x.name == "x"
    ]
    found = read_boxes(backend, open_committed(backend, "/a"), [wanted], chosen)
    check({"x": found[0]}, {"x": saved["x"]}, {"x": cuts})
    assert 0 < backend.most_held_bytes <= 32 * PAGE


def test_verified_page_is_not_read_again() -> None:
    """A disk may return different bytes the second time, and nothing would verify these."""
    backend = StrictBackend()
    saved = {"a": np.zeros(3, np.uint8), "x": np.ascontiguousarray(ROWS[0, :, :1001])}
    arrays_of = commit(backend, "/a", saved, StoreSettings()).manifest.parts[0].arrays
    (wanted,) = [Wanted(array, [full_box(array.shape)]) for array in arrays_of if array.name == "x"]
    found = read_boxes(backend, open_committed(backend, "/a"), [wanted], StoreSettings())
    check({"x": found[0]}, {"x": saved["x"]}, {})
    ranges = sorted((offset, offset + needed) for _, offset, needed in backend.reads)
    assert len(ranges) > 3
    for (_, stop), (start, _) in itertools.pairwise(ranges):
        assert start >= stop


def test_a_checkpoint_of_many_segments_takes_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "OPEN_AT_ONCE", 8)
    backend, chosen = StrictBackend(), StoreSettings(segment_bytes=PAGE, io_threads=2)
    saved = {f"x{n:03d}": np.full(PAGE, n, np.uint8) for n in range(100)}
    segments = commit(backend, "/runs/a", saved, chosen).manifest.segments
    assert len(segments) == 100
    backend.most_open_files = 0
    check(load(backend, "/runs/a", chosen), saved, {})
    assert 8 <= backend.most_open_files <= 8 + 4
    assert backend.open_files == 0


@settings(max_examples=150)
@given(st.data(), saves(), small_settings())
def test_any_changed_byte_names_its_leaf(data: st.DataObject, save: Any, chosen: StoreSettings) -> None:
    saved, cuts = save
    backend = StrictBackend()
    committed = commit(backend, "/runs/a", saved, chosen, boxes=cuts)
    chunks = [(array, chunk) for array in committed.manifest.parts[0].arrays for chunk in array.chunks]
    if not chunks:
        return
    array, chunk = data.draw(st.sampled_from(chunks))
    place = chunk.offset + data.draw(st.integers(0, chunk.length - 1))
    path = f"/runs/a/{committed.manifest.segments[chunk.segment].file}"
    backend._nodes[path].data[place] ^= 1 << data.draw(st.integers(0, 7))  # type: ignore[union-attr]
    message = rf"^{path}: bytes \d+ to \d+ of leaf '{array.name}' .*\({chosen.digest} differs\)"
    with pytest.raises(CorruptCheckpointError, match=message):
        load(backend, "/runs/a", chosen, {array.name: [chunk.box]})
    with pytest.raises(CorruptCheckpointError, match=r"leaf 'leaf\d'"):
        load(backend, "/runs/a", chosen)
    (problem,) = verify(backend, "/runs/a", chosen).problems
    assert f"{path}: bytes" in problem
    assert array.name in problem
    assert backend.open_files == 0


def test_progress_counts_every_data_byte() -> None:
    backend = StrictBackend()
    saved = {f"x{number}": np.zeros(number * 5000, np.uint8) for number in range(1, 9)}
    committed = commit(backend, "/runs/a", saved, StoreSettings())
    wanted = [Wanted(array, [full_box(array.shape)]) for array in committed.manifest.parts[0].arrays]
    counts: list[int] = []
    list(iter_boxes(backend, committed, wanted, StoreSettings(), counts.append))
    assert sum(counts) == sum(array.nbytes for array in saved.values())


def test_nothing_wanted_reads_nothing() -> None:
    backend = StrictBackend()
    committed = commit(backend, "/runs/a", {"x": np.zeros(9)}, StoreSettings())
    (array,) = committed.manifest.parts[0].arrays
    assert read_boxes(backend, committed, [], StoreSettings()) == []
    assert read_boxes(backend, committed, [Wanted(array, [])], StoreSettings()) == [[]]
    ((empty,),) = read_boxes(backend, committed, [Wanted(array, [((3, 3),)])], StoreSettings())
    assert empty.shape == (0,)
    assert backend.reads == []


def test_shrinking_file_is_named() -> None:
    class Shrinking(StrictBackend):
        def open(self, directory: str, name: str, *, direct: Any) -> Any:
            source = super().open(directory, name, direct=direct)
            if name.endswith(".safetensors"):
                del self._nodes[f"{directory}/{name}"].data[-1:]  # type: ignore[union-attr]
            return source

    backend = Shrinking()
    commit(backend, "/runs/a", {"x": np.zeros(100_000, np.uint8)}, StoreSettings())
    with pytest.raises(CorruptCheckpointError, match=r"p00000-s000.safetensors: ends at byte \d+"):
        load(backend, "/runs/a", StoreSettings())
    assert backend.open_files == 0


@pytest.mark.parametrize("code", [13, 24])
def test_system_refusal_is_not_reported_as_damage(code: int) -> None:
    class Refusing(StrictBackend):
        def open(self, directory: str, name: str, *, direct: Any) -> Any:
            if name.endswith(".safetensors"):
                raise StorageError(code, "cannot open the file", name)
            return super().open(directory, name, direct=direct)

    backend = Refusing()
    commit(backend, "/runs/a", {"x": np.zeros(9)}, StoreSettings())
    with pytest.raises(StorageError, match="cannot open the file") as caught:
        load(backend, "/runs/a", StoreSettings())
    assert caught.value.errno == code


def test_moved_checkpoint_is_readable(tmp_path: Path) -> None:
    """A checkpoint may be moved or copied: no path in it is absolute."""
    commit(LocalBackend(), str(tmp_path / "a"), {"x": np.arange(5)}, StoreSettings())
    (tmp_path / "a").rename(tmp_path / "b")
    assert load(LocalBackend(), str(tmp_path / "b"), StoreSettings())["x"][0].tolist() == [0, 1, 2, 3, 4]
    assert open_committed(LocalBackend(), str(tmp_path / "b")).directory == str(tmp_path / "b")

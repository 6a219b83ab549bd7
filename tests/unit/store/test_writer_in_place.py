"""Digests match the written bytes: from staging buffers, across their borders, and in place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxckpt_train.pytree import copies as host_copies
from jaxckpt_train.pytree.snapshot import snapshot
from jaxckpt_train.settings import SnapshotMode, StoreSettings
from jaxckpt_train.store import writer
from jaxckpt_train.store.boxes import full_box
from jaxckpt_train.store.segment import ArraySource, ChunkSource, StableChunkSource
from jaxckpt_train.store.writer import SegmentWriter, WrittenArrays, write_arrays
from tests.support.strict_backend import PAGE, StrictBackend, small_sizes

BLOCKS = (PAGE, 4 * PAGE, 16 * PAGE)


@pytest.fixture(autouse=True, scope="module", params=BLOCKS, ids=["blocks of a page", "of four", "of sixteen"])
def block(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the size of a digest block; some sizes let the border of a window cut a block."""
    for _ in small_sizes():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "BLOCK_BYTES", request.param)
            patch.setattr(writer, "MIN_IN_PLACE_BYTES", PAGE)
            yield request.param


def source(number: int, array: np.ndarray, kind: type[ChunkSource] = ChunkSource) -> ArraySource:
    return ArraySource(f"leaf{number}", array.shape, array.dtype, [kind(full_box(array.shape), array)])


def write(
    backend: Any, sources: list[ArraySource], chosen: StoreSettings, before_digest: Callable[[], None] = lambda: None
) -> WrittenArrays:
    """Write to `/runs/a`, and assert that no cut block is kept."""
    writers: list[SegmentWriter] = []
    made = SegmentWriter.__init__

    def note(self: SegmentWriter, *arguments: Any) -> None:
        writers.append(self)
        made(self, *arguments)
        digest = self._digest
        self._digest = lambda data: (before_digest(), str(digest(data)))[1]  # type: ignore[func-returns-value]

    backend.make_directory("/runs/a/state", parents=True, sync=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentWriter, "__init__", note)
        written = write_arrays(backend, "/runs/a", "state", sources, chosen, first_segment=0)
    assert [writer._cut_blocks for writer in writers] == [{}] * len(writers)
    return written


def check(backend: Any, written: WrittenArrays, block: int, arrays: list[np.ndarray] | None = None) -> None:
    """Fail unless the digests match the file, and the bytes match the arrays if these are given."""
    (segment,) = written.segments
    file = bytes(backend._nodes[f"/runs/a/{segment.file}"].data)
    for number, record in enumerate(written.arrays):
        (chunk,) = record.chunks
        found = file[chunk.offset : chunk.offset + chunk.length]
        blocks = [found[at : at + block] for at in range(0, len(found), block)]
        assert chunk.digests == "".join(hashlib.sha256(each).hexdigest() for each in blocks)
        assert arrays is None or found == arrays[number].tobytes()


class Watching(StrictBackend):
    """Call `watch` before every write, with the memory that is written."""

    def __init__(self, watch: Callable[[np.ndarray], None]) -> None:
        super().__init__()
        self._watch = watch

    def create(self, path: str, *, direct: Any) -> Any:
        sink = super().create(path, direct=direct)
        write_at = sink.write_at

        def watch_and_write(offset: int, data: np.ndarray) -> None:
            self._watch(data)
            write_at(offset, data)

        sink.write_at = watch_and_write
        return sink


def is_inside(data: np.ndarray, array: np.ndarray) -> bool:
    return bool(array.ctypes.data <= data.ctypes.data < array.ctypes.data + array.nbytes)


def paged(size: int, shift: int, seed: int) -> np.ndarray:
    """Return random bytes that begin at an offset from the start of a page."""
    memory = np.empty(size + 2 * PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE + shift
    memory[start : start + size] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return memory[start : start + size]


LEAVES = st.tuples(
    st.sampled_from([1, 5, PAGE, 3 * PAGE, 7 * PAGE, 24 * PAGE, 9 * PAGE + 64]), st.sampled_from([0, 64]), st.booleans()
)
STAGING = st.sampled_from([PAGE, 5 * PAGE, 20 * PAGE, 100 * PAGE])


@settings(max_examples=150)
@given(st.lists(LEAVES, min_size=1, max_size=6), STAGING, st.integers(1, 3), st.booleans())
def test_only_own_memory_is_written_in_place(
    block: int, made: list[tuple[int, int, bool]], staging: int, threads: int, direct: bool
) -> None:
    arrays = [paged(size, shift, number) for number, (size, shift, _) in enumerate(made)]
    kinds = [StableChunkSource if own else ChunkSource for _, _, own in made]
    sources = [source(n, array, kind) for n, (array, kind) in enumerate(zip(arrays, kinds, strict=True))]
    others = [array for array, kind in zip(arrays, kinds, strict=True) if kind is ChunkSource]
    wrong: list[np.ndarray] = []
    backend = Watching(lambda data: wrong.extend(array for array in others if is_inside(data, array)))
    io: Any = {"io_threads": threads, "direct_io": "auto" if direct else False}
    written = write(backend, sources, StoreSettings(staging_bytes=staging, digest="sha256", **io))
    check(backend, written, block, arrays)
    assert wrong == []


@pytest.mark.parametrize("in_blocks", [False, True], ids=["large buffers", "buffers of a block"])
def test_page_aligned_memory_needs_no_staging(block: int, in_blocks: bool) -> None:
    staging = 3 * block if in_blocks else 48 * PAGE
    arrays, seen = [paged(40 * PAGE, 0, seed) for seed in range(3)], list[int]()
    backend = Watching(lambda data: seen.append(len(data) if any(is_inside(data, array) for array in arrays) else 0))
    sources = [source(n, array, StableChunkSource) for n, array in enumerate(arrays)]
    written = write(backend, sources, StoreSettings(staging_bytes=staging, digest="sha256", io_threads=2))
    check(backend, written, block, arrays)
    assert sum(seen) >= 3 * 40 * PAGE - max(8 * PAGE, block)  # except the window that holds the header, and a cut block


@settings(max_examples=100)
@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=4), STAGING, st.integers(1, 3))
def test_digests_match_files_while_source_changes(block: int, sizes: list[int], staging: int, threads: int) -> None:
    """The owner changes the saved memory at every write to the disk, and before every digest."""
    owned = [np.full(size, number, np.uint8) for number, size in enumerate(sizes)]

    def change() -> None:
        for array in owned:
            array ^= 255

    backend, sources = Watching(lambda _: change()), [source(n, array) for n, array in enumerate(owned)]
    chosen = StoreSettings(staging_bytes=staging, io_threads=threads, digest="sha256")
    written = write(backend, sources, chosen, before_digest=change)
    check(backend, written, block)


def test_host_snapshot_copies_are_stable_and_paged() -> None:
    large_bytes = host_copies.LEAST_PAGED_BYTES
    state = {f"x{n}": jnp.arange(n * large_bytes // 8 + 7) for n in range(6)}
    kinds: dict[SnapshotMode, type[ChunkSource]] = {"auto": ChunkSource, "host": StableChunkSource}
    for mode, kind in kinds.items():
        taken = snapshot(state, mode)
        chunks = [array.chunks[0] for array in taken.arrays]
        assert {type(chunk) for chunk in chunks} == {kind}
        if mode == "host":
            large = [np.asarray(chunk.data) for chunk in chunks if np.asarray(chunk.data).nbytes >= large_bytes]
            assert len(large) == 4
            assert all(copy.ctypes.data % PAGE == 0 for copy in large)

"""Writing segments: bytes, digests, memory use, and the state after a refused write."""

from __future__ import annotations

import errno
import gc
import hashlib
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from jaxckpt_train.errors import StorageError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.boxes import Box, full_box
from jaxckpt_train.store.segment import ArraySource, ChunkSource, chunk_name, plan_segments
from jaxckpt_train.store.writer import FILLING_THREADS, SegmentWriter, WrittenArrays, _cut, shared_pool, write_arrays
from tests.support.strategies import arrays, tilings
from tests.support.strict_backend import BLOCK, PAGE, StrictBackend, small_sizes


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    yield from small_sizes()


def source(name: str, array: np.ndarray, boxes: Any = None) -> ArraySource:
    cuts = boxes or [full_box(array.shape)]
    chunks = [ChunkSource(box, array[(*(slice(*side) for side in box), ...)]) for box in cuts]
    return ArraySource(name, array.shape, array.dtype, chunks)


def write(backend: Any, sources: list[ArraySource], chosen: StoreSettings, progress: Any = None) -> WrittenArrays:
    backend.make_directory("/runs/a/state", parents=True, sync=False)
    return write_arrays(backend, "/runs/a", "state", sources, chosen, first_segment=0, progress=progress)


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[np.ndarray, list[Box]]:
    array = draw(arrays())
    return array, draw(tilings(array.shape)) if array.size else []


@settings(max_examples=150)
@given(
    st.lists(cut_arrays(), max_size=3),
    st.sampled_from([1, 9000, 1 << 30]),
    st.sampled_from([PAGE, 5 * PAGE]),
    st.integers(1, 3),
)
def test_files_hold_chunks_with_their_digests(cases: Any, segment_bytes: int, staging: int, threads: int) -> None:
    backend = StrictBackend()
    sources = [source(f"leaf{n}", array, boxes) for n, (array, boxes) in enumerate(cases)]
    chosen = StoreSettings(segment_bytes=segment_bytes, staging_bytes=staging, io_threads=threads, digest="sha256")
    written = write(backend, sources, chosen)
    for (array, boxes), record in zip(cases, written.arrays, strict=True):
        assert (record.shape, record.dtype) == (array.shape, array.dtype.newbyteorder("=").name)
        assert sorted(chunk.box for chunk in record.chunks) == sorted(boxes)
        for chunk in record.chunks:
            part = array[(*(slice(*side) for side in chunk.box), ...)]
            expected = part.astype(part.dtype.newbyteorder("<"), order="C").tobytes()
            file = bytes(backend._nodes[f"/runs/a/{written.segments[chunk.segment].file}"].data)  # type: ignore[union-attr]
            assert file[chunk.offset : chunk.offset + chunk.length] == expected
            blocks = [expected[at : at + BLOCK] for at in range(0, len(expected), BLOCK)]
            assert chunk.digests == "".join(hashlib.sha256(block).hexdigest() for block in blocks)
            assert bytes(dict(deserialize(file))[chunk_name(record.name, chunk.box, record.shape)]["data"]) == expected
    for segment in written.segments:
        file = bytes(backend._nodes[f"/runs/a/{segment.file}"].data)  # type: ignore[union-attr]
        assert len(file) == segment.bytes
        assert hashlib.sha256(file[: segment.header_bytes]).hexdigest() == segment.header_digest
        assert file[segment.header_bytes - 1 : segment.header_bytes] in (b" ", b"}")
    assert written.data_bytes == sum(map(len, files_of(backend, written)))
    heads = sum(segment.header_bytes for segment in written.segments)
    assert written.data_bytes - heads == sum(array.nbytes for array, _ in cases)
    assert backend.open_files == 0


def test_segment_numbers_begin_at_the_first_segment() -> None:
    backend = StrictBackend()
    backend.make_directory("/runs/a/state", parents=True, sync=False)
    sources = [source(f"x{n}", np.zeros(PAGE, np.uint8)) for n in range(3)]
    chosen = StoreSettings(segment_bytes=PAGE)
    written = write_arrays(backend, "/runs/a", "state", sources, chosen, first_segment=7)
    assert [segment.file for segment in written.segments] == [f"state/p00000-s00{n}.safetensors" for n in range(3)]
    assert [array.chunks[0].segment for array in written.arrays] == [7, 8, 9]


def test_progress_counts_every_file_byte() -> None:
    backend, counts = StrictBackend(), list[int]()
    sources = [source(f"x{n}", np.zeros(n * 5000, np.uint8)) for n in range(6)]
    written = write(backend, sources, StoreSettings(staging_bytes=2 * PAGE), counts.append)
    assert sum(counts) == sum(segment.bytes for segment in written.segments)
    assert len(counts) > 3


class FullBackend(StrictBackend):
    """Accept a number of writes, then refuse."""

    def __init__(self, takes: int) -> None:
        super().__init__()
        self.writes, self.takes = 0, takes

    def create(self, path: str, *, direct: Any) -> Any:
        sink = super().create(path, direct=direct)
        inner = sink.write_at

        def write_at(offset: int, data: np.ndarray) -> None:
            with self.count_lock:
                self.writes += 1
                if self.writes > self.takes:
                    raise StorageError(errno.ENOSPC, "cannot write: No space left on device", path)
            inner(offset, data)

        sink.write_at = write_at
        return sink


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("takes", [0, 1, 10])
def test_first_refusal_stops_writes_and_frees_buffers(takes: int, threads: int) -> None:
    backend = FullBackend(takes)
    sources = [source(f"x{n}", np.zeros(10 * PAGE, np.uint8)) for n in range(20)]
    buffers = threads + FILLING_THREADS
    chosen = StoreSettings(segment_bytes=20 * PAGE, staging_bytes=buffers * PAGE, io_threads=threads)
    with pytest.raises(StorageError, match="No space left") as caught:
        write(backend, sources, chosen)
    assert caught.value.errno == errno.ENOSPC
    assert backend.writes <= takes + buffers
    assert backend.open_files == 0
    with shared_pool(chosen.staging_bytes).buffer(chosen.staging_bytes):
        pass  # all of it was returned
    backend.takes = 1 << 30
    backend.remove("/runs/a")
    again = write(backend, sources, chosen)
    assert sum(segment.bytes - segment.header_bytes for segment in again.segments) == 200 * PAGE


def test_error_of_progress_line_stops_save() -> None:
    def broken(_: int) -> None:
        raise ZeroDivisionError("in the progress line")

    backend = StrictBackend()
    with pytest.raises(ZeroDivisionError, match="in the progress line"):
        write(backend, [source("x", np.zeros(50 * PAGE, np.uint8))], StoreSettings(), broken)
    assert backend.open_files == 0


def test_filled_buffers_stay_within_staging() -> None:
    class Watching(StrictBackend):
        most = now = 0

        def create(self, path: str, *, direct: Any) -> Any:
            sink = super().create(path, direct=direct)
            inner = sink.write_at

            def write_at(offset: int, data: np.ndarray) -> None:
                with self.count_lock:
                    self.now += len(data)
                    self.most = max(self.most, self.now)
                meet.wait()
                inner(offset, data)
                with self.count_lock:
                    self.now -= len(data)

            sink.write_at = write_at
            return sink

    meet = threading.Barrier(2, timeout=30)
    backend, chosen = Watching(), StoreSettings(staging_bytes=12 * PAGE, io_threads=2)
    windows = 1 + 2 + 30 * 4  # pages: the first windows are smaller; an even number of writes, so that all meet
    write(backend, [source("x", np.zeros((windows - 1) * PAGE, np.uint8))], chosen)
    assert 4 * PAGE < backend.most <= 8 * PAGE


def test_large_array_is_not_copied_whole() -> None:
    """A large row-major array passes through the staging buffers without a copy of the whole."""
    array = np.zeros(1 << 24, np.uint8)
    held = source("x", array)
    assert held.chunks[0].data.base is array or held.chunks[0].data is array

    class Forgetful(StrictBackend):
        def create(self, path: str, *, direct: Any) -> Any:
            sink = super().create(path, direct=direct)
            sink.write_at = lambda offset, data: None
            return sink

    tracemalloc.start()
    try:
        write(Forgetful(), [held], StoreSettings(staging_bytes=16 * PAGE))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=5), st.integers(1, 40))
def test_windows_cover_files_once_and_fit_buffer(sizes: list[int], pages: int) -> None:
    sources = [source(f"x{n}", np.zeros(size, np.uint8)) for n, size in enumerate(sizes)]
    layouts = list(plan_segments(sources, 50_000))
    writers = [SegmentWriter(StrictBackend(), "/x", layout, StoreSettings()) for layout in layouts]
    jobs = list(_cut(writers, pages * PAGE))
    for writer in writers:
        windows = [window for other, window in jobs if other is writer]
        assert [start for start, _ in windows] == [0, *[stop for _, stop in windows[:-1]]]
        assert windows[-1][1] == writer.layout.size
        assert all(start % PAGE == 0 and 0 < stop - start <= pages * PAGE for start, stop in windows)
    assert jobs[0][1][1] <= max(pages // 4, 1) * PAGE, "the first write begins before a whole buffer is filled"


class Fetched:
    """Count the fetched arrays that are in host memory."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.RLock()  # a finalizer may run while it is held

    def count(self, difference: int) -> None:
        with self._lock:
            self.now += difference
            self.most = max(self.most, self.now)


class LazyArray:
    """An array that is fetched into host memory once."""

    def __init__(self, fetched: Fetched, content: np.ndarray) -> None:
        self.content, self.fetches, self._fetched = content, 0, fetched
        self.shape, self.dtype, self.size, self.nbytes = content.shape, content.dtype, content.size, content.nbytes

    def fetch(self) -> np.ndarray:
        self.fetches += 1
        copy = self.content.copy(order="K")
        self._fetched.count(+1)
        weakref.finalize(copy, self._fetched.count, -1)
        return copy


class Gone(LazyArray):
    """An array on a lost device; only the first fetch raises the cause."""

    def fetch(self) -> np.ndarray:
        self.fetches += 1
        raise RuntimeError("the device is lost" if self.fetches == 1 else "fetched already")


def test_every_use_of_failed_fetch_raises_its_cause() -> None:
    gone = Gone(Fetched(), np.zeros(20 * PAGE, np.uint8))
    (layout,) = plan_segments([ArraySource("x", gone.shape, gone.dtype, [ChunkSource(full_box(gone.shape), gone)])], 1)
    backend = StrictBackend()
    backend.make_directory("/runs", parents=True, sync=False)
    writer = SegmentWriter(backend, "/runs/x", layout, StoreSettings(direct_io=False))
    while (window := writer.next_window(4 * PAGE)) is not None:
        with pytest.raises(RuntimeError, match="the device is lost"):
            writer.write(window, shared_pool(4 * PAGE), 4 * PAGE, threading.Semaphore(1))
    assert gone.fetches == 1
    writer.abandon()


def files_of(backend: StrictBackend, written: WrittenArrays) -> list[bytes]:
    return [bytes(backend._nodes[f"/runs/a/{segment.file}"].data) for segment in written.segments]  # type: ignore[union-attr]


def assert_written(backend: StrictBackend, written: WrittenArrays, contents: list[np.ndarray]) -> None:
    """Fail unless the files hold these arrays, each in one chunk, with the digests of their blocks."""
    files = files_of(backend, written)
    for content, record in zip(contents, written.arrays, strict=True):
        expected = content.tobytes()
        (chunk,) = record.chunks or [None]
        if chunk is None:
            assert not expected
            continue
        assert files[chunk.segment][chunk.offset : chunk.offset + chunk.length] == expected
        blocks = [expected[at : at + BLOCK] for at in range(0, len(expected), BLOCK)]
        assert chunk.digests == "".join(hashlib.sha256(block).hexdigest() for block in blocks)


sizes_around_pages = st.one_of(
    st.integers(1, 300), st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 64]), st.just(0)
)


@settings(max_examples=150)
@given(
    st.lists(sizes_around_pages, min_size=1, max_size=80), st.lists(st.integers(0, 4)), st.integers(1, 6), st.booleans()
)
def test_small_leaves_survive_window_borders(sizes: list[int], kinds: list[int], pages: int, several: bool) -> None:
    """Leaves in host memory, of the other byte order, and not fetched yet share windows of a few pages."""
    random, fetched, contents, sources = (
        np.random.default_rng(pages),
        Fetched(),
        list[np.ndarray](),
        list[ArraySource](),
    )
    for number, size in enumerate(sizes):
        content = random.integers(0, 256, size, np.uint8)
        kind = kinds[number % len(kinds)] if kinds else 0
        if kind == 1 and size % 2 == 0:
            content = content.view(">u2")
        if kind == 4:
            content = np.repeat(content, 2)[::2]
        contents.append(content.astype(content.dtype.newbyteorder("<")))
        data: Any = LazyArray(fetched, content) if kind == 2 else memoryview(content) if kind in (3, 4) else content
        chunks = [ChunkSource(full_box(content.shape), data)]
        sources.append(ArraySource(f"x{number}", content.shape, contents[-1].dtype, chunks))
    backend, threads = StrictBackend(), 3 if several else 1
    buffers = threads + FILLING_THREADS
    chosen = StoreSettings(staging_bytes=pages * buffers * PAGE, io_threads=threads, digest="sha256")
    written = write(backend, sources, chosen)
    assert_written(backend, written, contents)
    fetches = [chunk.data.fetches for each in sources for chunk in each.chunks if isinstance(chunk.data, LazyArray)]
    assert set(fetches) <= {0, 1}
    assert sum(fetches) == sum(
        each.chunks[0].data.nbytes > 0 for each in sources if isinstance(each.chunks[0].data, LazyArray)
    )
    assert fetched.now == 0


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("size", [900, 3 * PAGE + 8, 10 * PAGE])
def test_fetched_arrays_are_dropped_after_last_window(threads: int, size: int) -> None:
    """Also if many windows and threads share an array; otherwise a save would hold the whole state."""
    fetched, buffers, count = Fetched(), threads + FILLING_THREADS, 150
    contents = [np.random.default_rng(n).integers(0, 256, size, np.uint8) for n in range(count)]
    places = [LazyArray(fetched, content) for content in contents]
    sources = [
        ArraySource(f"x{n}", (size,), np.dtype(np.uint8), [ChunkSource(full_box((size,)), place)])
        for n, place in enumerate(places)
    ]
    backend = StrictBackend()
    chosen = StoreSettings(staging_bytes=2 * buffers * PAGE, io_threads=threads, digest="sha256")
    written = write(backend, sources, chosen)
    assert_written(backend, written, contents)
    assert [place.fetches for place in places] == [1] * count
    assert fetched.now == 0
    in_a_window = 2 * PAGE // size + 2
    assert fetched.most <= (buffers + 1) * in_a_window


def test_fetched_arrays_are_dropped_when_save_fails() -> None:
    fetched = Fetched()
    contents = [np.zeros(10 * PAGE, np.uint8) for _ in range(20)]
    box = full_box((10 * PAGE,))
    places: list[Any] = [LazyArray(fetched, content) for content in contents]
    sources = [
        ArraySource(f"x{n}", (10 * PAGE,), np.dtype(np.uint8), [ChunkSource(box, p)]) for n, p in enumerate(places)
    ]
    with pytest.raises(StorageError, match="No space left"):
        write(FullBackend(5), sources, StoreSettings(staging_bytes=6 * PAGE, io_threads=2))
    gc.collect()  # the traceback of the error held some
    assert fetched.now == 0
    assert sum(place.fetches for place in places) < 20


@pytest.mark.parametrize("more", [-1, 1])
def test_fetched_array_of_wrong_size_fails_save(more: int) -> None:
    array = LazyArray(Fetched(), np.zeros(5 * PAGE, np.uint8))
    array.content = np.zeros(5 * PAGE + more, np.uint8)
    sources = [ArraySource("x", (5 * PAGE,), array.dtype, (ChunkSource(full_box((5 * PAGE,)), array),))]
    with pytest.raises(ValueError, match=f"returned {5 * PAGE + more} bytes, expected {5 * PAGE}"):
        write(StrictBackend(), sources, StoreSettings(staging_bytes=2 * PAGE))

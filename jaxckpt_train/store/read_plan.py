"""Plan a load: which byte runs of which segments to read, each byte once, and where in memory they go."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxckpt_train.store.boxes import Box, box_elements, element_span, intersect, is_contiguous_within, row_major_range
from jaxckpt_train.store.manifest import BLOCK_BYTES, WHOLE_CHUNKS, ArrayRecord, ChunkRecord, Manifest
from jaxckpt_train.store.segment import ALIGNMENT
from jaxckpt_train.store.threads import unlocked_cached_property

COALESCE_BYTES = 16 << 20
GAP_BYTES = 64 << 10
"""Gaps up to this size are read too: that is faster than a second request."""
APART_BYTES = 1 << 20
"""Reads of this size are not coalesced if one can stay where it was read and the other cannot."""
PARTS_BYTES = 4 << 20
"""Data that is only copied elsewhere is read in pieces of this size, or in blocks, into reused and so cached memory."""
VIEW_ALIGNMENT = 64
"""On the CPU, JAX uses host memory with this alignment without a copy."""


class Wanted(NamedTuple):
    """Boxes of one array that a load needs on this host; no box twice.

    `passing` means that the boxes are temporary in host memory, on their way to other devices or another dtype: their
    memory counts against the read budget until nothing refers to it. (A box that is assembled from several chunks
    counts once it is complete.)

    `target` is the memory for the only box, a flat uint8 array of its size; None: the load allocates it. Passing boxes
    have no target, because the budget counts the owner of the memory.
    """

    array: ArrayRecord
    boxes: Sequence[Box]
    passing: bool = False
    target: np.ndarray | None = None


class Use(NamedTuple):
    """The purpose of a chunk's bytes: all or part of box number `box` of wanted array number `wanted`.

    `whole`: the box has no target and is one contiguous piece of the chunk, so that it can be a view of what was read.
    """

    wanted: int
    box: int
    common: Box
    whole: bool


class ChunkRead(NamedTuple):
    """Bytes [start, stop) of a file, from block `first_block` of a chunk on, and their uses."""

    chunk: ChunkRecord
    first_block: int
    start: int
    stop: int
    uses: Sequence[Use]


@dataclasses.dataclass(frozen=True)
class Run:
    """One contiguous range of one segment, read into one piece of memory; `start` and `stop` are page-aligned."""

    segment: int
    start: int
    stop: int
    needed: int
    reads: Sequence[ChunkRead]
    passing: bool

    @unlocked_cached_property
    def is_destination(self) -> bool:
        """Whether nearly all of its memory becomes results, so that little other memory is kept alive."""
        size, views = self.stop - self.start, self._whole[0]
        return 2 * views >= size and size - views <= max(2 * ALIGNMENT, size // 16)

    @property
    def moved_bytes(self) -> int:
        """The space for copies of whole boxes that cannot stay where they were read."""
        _, in_line, out_of_line = self._whole
        return out_of_line + (0 if self.passing or self.is_destination else in_line)

    @unlocked_cached_property
    def is_parts(self) -> bool:
        """Whether all of it is copied, so that none of its memory is kept."""
        return all(map(_is_parts, self.reads))

    @unlocked_cached_property
    def _whole(self) -> tuple[int, int, int]:
        """Sizes of whole boxes: of those that can be views; the space for copies of these, and of the others."""
        views = in_line = out_of_line = 0
        for read in self.reads:
            for use in read.uses:
                if use.whole:
                    size = _use_bytes(read.chunk, use)
                    room = -(-size // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
                    if _is_aligned(read.chunk, use):
                        views, in_line = views + size, in_line + room
                    else:
                        out_of_line += room
        return views, in_line, out_of_line


def _is_parts(read: ChunkRead) -> bool:
    return not any(use.whole for use in read.uses)


def _can_stay(read: ChunkRead) -> bool:
    """Whether most of a read can be returned as views."""
    views = sum(_use_bytes(read.chunk, use) for use in read.uses if use.whole and _is_aligned(read.chunk, use))
    return 2 * views > read.stop - read.start


def _use_bytes(chunk: ChunkRecord, use: Use) -> int:
    if use.common is chunk.box:
        return chunk.length
    return box_elements(use.common) * (chunk.length // box_elements(chunk.box))


def _is_aligned(chunk: ChunkRecord, use: Use) -> bool:
    start = chunk.offset
    if use.common is not chunk.box and use.common != chunk.box:
        start += element_span(use.common, chunk.box)[0] * (chunk.length // box_elements(chunk.box))
    return start % VIEW_ALIGNMENT == 0


def plan_reads(
    manifest: Manifest, wanted: Sequence[Wanted], band_bytes: int, gap_bytes: int | None = None
) -> list[Run]:
    """The runs that serve all wanted boxes, in file order, with gaps of up to `gap_bytes` (None: `GAP_BYTES`).

    Every byte is read once, except where more than `band_bytes` of temporary memory would be needed at once. A chunk
    from which several boxes pass to devices is then read box by box, and adjacent boxes share a digest block. A chunk
    that must be cut up or moved is then read in bands of whole blocks. A chunk that is only copied elsewhere is always
    read in small bands, which all use the same cached memory, and bands without wanted data are skipped.
    """
    reads: list[ChunkRead] = []
    for number, want in enumerate(wanted):
        for chunk in want.array.chunks:
            is_view = chunk.length <= band_bytes or chunk.offset % VIEW_ALIGNMENT == 0
            is_all = len(want.boxes) == 1 and want.boxes[0] == chunk.box
            if is_view and is_all and want.target is None:  # true for most leaves
                use = Use(number, 0, chunk.box, True)
                reads.append(ChunkRead(chunk, 0, chunk.offset, chunk.offset + chunk.length, (use,)))
                continue
            uses = tuple(_uses(number, want, chunk))
            if uses:
                reads.extend(_chunk_reads(manifest, chunk, uses, band_bytes, want.passing))
    reads.sort(key=lambda read: (read.chunk.segment, read.start))
    most, most_copied = min(COALESCE_BYTES, band_bytes), min(parts_bytes(manifest.block_bytes), band_bytes)
    return list(_coalesce(reads, wanted, most, most_copied, GAP_BYTES if gap_bytes is None else gap_bytes))


def _uses(number: int, want: Wanted, chunk: ChunkRecord) -> Iterator[Use]:
    for index, box in enumerate(want.boxes):
        common = intersect(box, chunk.box)
        if common is not None:
            whole = common == box and is_contiguous_within(box, chunk.box) and want.target is None
            yield Use(number, index, common, whole)


def _chunk_reads(
    manifest: Manifest, chunk: ChunkRecord, uses: Sequence[Use], band_bytes: int, passing: bool
) -> Iterator[ChunkRead]:
    item = chunk.length // box_elements(chunk.box)
    is_whole = all(use.whole and _is_aligned(chunk, use) for use in uses)
    if not any(use.whole for use in uses) and is_read_by_bands(chunk):
        band_bytes = min(band_bytes, parts_bytes(manifest.block_bytes))
    if chunk.length <= band_bytes or is_whole:
        for near in _clusters(uses, chunk, item, manifest.block_bytes, band_bytes if passing else chunk.length):
            yield _chunk_read(manifest, chunk, item, near)
        return
    step = max(band_bytes // manifest.block_bytes, 1) * manifest.block_bytes // item
    elements = box_elements(chunk.box)
    for start in range(0, elements, step):
        inside = tuple(_uses_within(uses, row_major_range(chunk.box, start, min(start + step, elements))))
        if inside:
            yield _chunk_read(manifest, chunk, item, inside)


def step_bytes(manifest: Manifest) -> int:
    """The size whose multiples limit the parts of a chunk that are read: the block that has a digest."""
    return manifest.block_bytes if manifest.block_bytes < WHOLE_CHUNKS else BLOCK_BYTES


def parts_bytes(block_bytes: int) -> int:
    """How much data that is only copied elsewhere is read at a time, in multiples of the digest block."""
    return max(PARTS_BYTES // block_bytes, 1) * block_bytes


def is_read_by_bands(chunk: ChunkRecord) -> bool:
    """Whether the parts of a chunk can be read without the data between them, because bands start and end at pages."""
    return chunk.offset % ALIGNMENT == 0


def _uses_within(uses: Sequence[Use], boxes: Iterable[Box]) -> Iterator[Use]:
    for box in boxes:
        for use in uses:
            common = intersect(use.common, box)
            if common is not None:
                yield use._replace(common=common, whole=False)


def _clusters(
    uses: Sequence[Use], chunk: ChunkRecord, item: int, block_bytes: int, most_bytes: int
) -> Iterator[list[Use]]:
    """Group the uses, so that unneeded digest blocks are not read and no group of several uses exceeds `most_bytes`."""
    cluster: list[Use] = []
    begin, end = 0, -1
    for use in sorted(uses, key=lambda use: element_span(use.common, chunk.box)):
        first, last = element_span(use.common, chunk.box)
        if cluster and (first * item // block_bytes > end or (last - begin) * item > most_bytes):
            yield cluster
            cluster, end = [], -1
        begin = begin if cluster else first
        cluster.append(use)
        end = max(end, (last * item - 1) // block_bytes + 1)
    yield cluster


def _chunk_read(manifest: Manifest, chunk: ChunkRecord, item: int, uses: Sequence[Use]) -> ChunkRead:
    spans = [element_span(use.common, chunk.box) for use in uses]
    block = step_bytes(manifest)
    first_block = min(first for first, _ in spans) * item // block
    end = -(-max(last for _, last in spans) * item // block) * block
    return ChunkRead(
        chunk, first_block, chunk.offset + first_block * block, chunk.offset + min(end, chunk.length), uses
    )


def _coalesce(
    reads: Sequence[ChunkRead], wanted: Sequence[Wanted], most: int, most_copied: int, gap_bytes: int
) -> Iterator[Run]:
    """Join reads into runs of at most `most` bytes, or `most_copied` bytes if all of it is copied elsewhere."""
    group: list[ChunkRead] = []
    passing, are_parts = False, True
    stays: bool | None = None  # whether the large reads of the group can be returned as views
    for read in reads:
        passes = wanted[read.uses[0].wanted].passing
        is_large = read.stop - read.start >= APART_BYTES
        read_stays = _can_stay(read) if is_large else stays
        is_parts = _is_parts(read)
        if group:
            last = group[-1]
            joined = read.stop - group[0].start
            near = 0 <= read.start - last.stop <= gap_bytes
            alike = read.chunk.segment == last.chunk.segment and passes == passing and stays in (None, read_stays)
            is_too_much = joined > (most_copied if are_parts and is_parts else most)
            if not alike or is_too_much or not near:
                yield _run(group, passing)
                group, stays, are_parts = [], None, True
        passing, stays, are_parts = passes, read_stays if is_large else stays, are_parts and is_parts
        group.append(read)
    if group:
        yield _run(group, passing)


def _run(reads: Sequence[ChunkRead], passing: bool) -> Run:
    start = reads[0].start // ALIGNMENT * ALIGNMENT
    stop = -(-reads[-1].stop // ALIGNMENT) * ALIGNMENT
    return Run(reads[0].chunk.segment, start, stop, reads[-1].stop - start, tuple(reads), passing)


def straight_target(run: Run, wanted: Sequence[Wanted]) -> np.ndarray | None:
    """The part of a target that a run can be read into directly; None if it has to be copied.

    The run must be one contiguous piece of the chunk and of the target, in whole pages of both.
    """
    if len(run.reads) != 1 or len(run.reads[0].uses) != 1:
        return None
    (use,), chunk = run.reads[0].uses, run.reads[0].chunk
    target, box = wanted[use.wanted].target, wanted[use.wanted].boxes[use.box]
    if target is None or not (is_contiguous_within(use.common, chunk.box) and is_contiguous_within(use.common, box)):
        return None
    itemsize = chunk.length // box_elements(chunk.box)
    first, last = (chunk.offset + element * itemsize for element in element_span(use.common, chunk.box))
    at = element_span(use.common, box)[0] * itemsize
    if (run.start, run.stop) != (first, last) or (target.ctypes.data + at) % ALIGNMENT:
        return None
    return target[at : at + last - first]

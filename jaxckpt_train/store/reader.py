"""Reads boxes of arrays of one checkpoint, on several threads, each box handed out as soon as it is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import numpy as np

from jaxckpt_train.errors import CheckpointTimeoutError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.answers import answer_of, have_closed
from jaxckpt_train.store.backend import Opener
from jaxckpt_train.store.boxes import Box, box_elements, box_shape
from jaxckpt_train.store.dtypes import DTYPES
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.read_budget import ReadBudget
from jaxckpt_train.store.read_plan import Wanted, plan_reads
from jaxckpt_train.store.reading import ReadBox, Reading
from jaxckpt_train.store.sources import Sources
from jaxckpt_train.store.staging import empty_array
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.store.warm_memory import WarmMemory
from jaxckpt_train.store.workers import shared_workers

# A reading thread waits for the disk about half of its time; the other half it touches fresh memory and digests.
READS_PER_THREAD = 2
Progress = Callable[[int], None]
T = TypeVar("T")
R = TypeVar("R")


def iter_boxes(
    files: Opener,
    committed: Committed,
    wanted: Sequence[Wanted],
    settings: StoreSettings,
    progress: Progress | None = None,
    budget: ReadBudget | None = None,
) -> Generator[ReadBox]:
    """Read boxes of arrays of one committed checkpoint, and hand out each box as soon as it is complete.

    Use `contextlib.closing` around the iterator: it holds open files and running threads until it ends.

    Args:
        files: where.
        committed: the opened checkpoint.
        wanted: which boxes of which arrays.
        settings: threads, budget, verification.
        progress: called with numbers of bytes read, from several threads, and with 0 by who waits for them, at least
            once a second; what it raises ends the load.
        budget: what the reading memory is counted in; None: one of its own, of the settings' size.

    Yields:
        Every wanted box, in any order, as a writable, row-major numpy array, 64-byte aligned unless it has a target.

    Raises:
        CorruptCheckpointError: a segment is missing, has another size, or its bytes differ from their digest.
        StorageError: the file system refused.
        CheckpointTimeoutError: it has not answered for ten minutes.
    """
    runs = plan_reads(committed.manifest, wanted, band_bytes(settings))
    sources = Sources(files, committed, settings, [run.segment for run in runs])
    budget = budget or ReadBudget(settings.read_budget_bytes)
    reading = Reading(sources, committed, wanted, settings, progress, budget, WarmMemory())
    try:
        yield from _empty_boxes(wanted)
        reading.prepare(runs)
        answer_of(f"{committed.directory}: segments", sources.open, progress)
        each = run_reads(
            committed.directory, settings, reading.read_one_less, runs, give_up=reading.give_up, moved=reading.moved
        )
        with contextlib.closing(each) as results:
            for completed in results:
                yield from reading.hand_over(completed)
    finally:
        have_closed(sources.end())


def band_bytes(settings: StoreSettings) -> int:
    """How much may be in memory for one read, beside its destination, so that all stay within the budget."""
    return max(1, settings.read_budget_bytes // (2 * _threads(settings)))


def run_reads(
    directory: str,
    settings: StoreSettings,
    read: Callable[[T], R],
    items: Sequence[T],
    *,
    give_up: Callable[[], None],
    moved: Callable[[], object],
) -> Generator[R]:
    """What each of some reads gives: as `Workers.run_each`, on the threads that read.

    Raises:
        CheckpointTimeoutError: nothing was done for ten minutes; names the directory.
    """
    readers = shared_workers(_threads(settings), "jaxckpt-read")
    try:
        with contextlib.closing(readers.run_each(read, items, give_up=give_up, moved=moved)) as results:
            yield from results
    except CheckpointTimeoutError as error:
        raise CheckpointTimeoutError(f"{directory}: {error}") from None


def _threads(settings: StoreSettings) -> int:
    return READS_PER_THREAD * settings.known_io_threads


def read_boxes(
    files: Opener,
    committed: Committed,
    wanted: Sequence[Wanted],
    settings: StoreSettings,
    progress: Progress | None = None,
) -> list[list[np.ndarray]]:
    """As `iter_boxes`, all at once: for every wanted array one numpy array per box."""
    found: list[dict[int, np.ndarray]] = [{} for _ in wanted]
    with contextlib.closing(iter_boxes(files, committed, wanted, settings, progress)) as boxes:
        for read in boxes:
            found[read.wanted][read.box] = read.data
    return [[arrays[number] for number in range(len(arrays))] for arrays in found]


def read_box(
    files: Opener, committed: Committed, array: ArrayRecord, box: Box, target: np.ndarray, settings: StoreSettings
) -> None:
    """Read one box of one array on the calling thread, which may be one that reads for somebody else.

    Args:
        files: where.
        committed: the opened checkpoint.
        array: of which.
        box: which.
        target: flat uint8, of the size of the box.
        settings: verification.

    Raises:
        As `iter_boxes`, but for the time limit.
    """
    if not len(target):
        return
    wanted = [Wanted(array, [box], target=target)]
    runs = plan_reads(committed.manifest, wanted, band_bytes(settings))
    sources = Sources(files, committed, settings, [run.segment for run in runs])
    budget = ReadBudget(settings.read_budget_bytes)
    reading = Reading(sources, committed, wanted, settings, None, budget, WarmMemory())
    try:
        for run in runs:
            reading.read_run(run)
    finally:
        for source in sources.end():
            source.close()


def _empty_boxes(wanted: Sequence[Wanted]) -> Generator[ReadBox]:
    for number, want in enumerate(wanted):
        for index, box in enumerate(want.boxes):
            if box_elements(box) == 0:
                yield ReadBox(number, index, empty_array(box_shape(box), DTYPES[want.array.dtype]))

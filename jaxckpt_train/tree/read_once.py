"""Which arrays of a load the processes of a job read once together, and through which coordinator they agree on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import jax

from jaxckpt_train.jobs.coordinator import Coordinator
from jaxckpt_train.jobs.near_memory import NearMemory
from jaxckpt_train.jobs.neighbours import Neighbours, neighbours
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.manifest import ArrayRecord
from jaxckpt_train.store.read_repeats import RepeatedReads
from jaxckpt_train.store.read_shares import stored_bytes
from jaxckpt_train.tree.host_values import spans_processes
from jaxckpt_train.tree.job_needs import JobNeeds
from jaxckpt_train.tree.near_windows import memory_bytes
from jaxckpt_train.tree.placement import Placement
from jaxckpt_train.tree.share_ways import Shared

NOTICEABLE = 50
"""What would be read again is worth a transfer from a fiftieth of all on."""
WORTH_BYTES = 64 << 20
"""And from so many bytes on: less comes from most storages before the first transfer has begun."""


class ReadTogether(NamedTuple):
    """How the processes of a job read what several of them need.

    Attributes:
        shared: the arrays of which each reads a share.
        cached: numbers of those that each reads for itself, but through the page cache of their machine.
        memory: in which the processes see each other's shares, to be closed; None: these go over devices.
    """

    shared: Sequence[Shared]
    cached: Sequence[int]
    memory: NearMemory | None


class JobLoads:
    """The loads of one call, in a job, with an order of their own.

    Args:
        job: None: there is no job.
        settings: whether its processes read together, and how long they wait for each other.
        order: which they have already; None: begun where it is needed.

    Attributes:
        process: number of this one.
        processes: how many take part.
    """

    def __init__(self, job: Coordinator | None, settings: StoreSettings, order: Coordinator | None = None) -> None:
        self._job = None if job is None or job.processes == 1 or settings.read_once is False else job
        self._settings, self._order = settings, order
        self.process, self.processes = (0, 1) if self._job is None else (self._job.process, self._job.processes)

    def expect(self, shardings: Iterable[jax.sharding.Sharding | None]) -> None:
        """Have an order if arrays are wanted that span processes, before anything can fail in this process alone.

        All processes count these orders: one without it would be out of step with the others at each later load.
        """
        if self._job is not None and self._order is None and any(map(spans_processes, shardings)):
            self._order = self._job.within("load", self._settings.barrier_timeout_s)

    def neighbours(self, block_bytes: int) -> Neighbours:
        """Whether all processes run on one machine, and see each other's memory there; each time it is other memory.

        Args:
            block_bytes: of the checkpoint.
        """
        settings = self._settings
        size = memory_bytes(settings.read_budget_bytes, settings.known_io_threads, block_bytes)
        return neighbours(self.order, size)

    @property
    def order(self) -> Coordinator:
        """Through which the processes agree."""
        assert self._order is not None
        return self._order

    @contextlib.contextmanager
    def told_on_error(self) -> Iterator[None]:
        """All of the loads: what fails within is told to the other processes, some of which may wait for this one.

        It may be what they know already: after a failure of all of them one may try again, where another one gives up.
        """
        try:
            yield
        except BaseException as error:
            if self._order is not None and not getattr(error, "lost", ()):  # who is lost may be who would be asked
                _tell(self._order, error)
            raise
        finally:
            if self._order is not None:
                self._order.end()


def _tell(order: Coordinator, error: BaseException) -> None:
    def give() -> bytes:
        raise error

    with contextlib.suppress(type(error)):
        order.exchange("loading", give)


def read_together(
    arrays: Sequence[tuple[ArrayRecord, Placement]],
    read_once: bool | Literal["auto"],
    loads: JobLoads,
    block_bytes: int,
) -> ReadTogether:
    """Those of which the processes would otherwise read bytes that another one reads, too.

    It follows from the checkpoint and the shardings, so that all processes come to the same result. Only where there
    are any they ask each other whether they all run on one machine: what one of them has read there is in memory, and
    comes to the others sooner than over any network.

    Args:
        arrays: of the load, each with the place where it goes.
        read_once: False: none; "auto": none unless it is worth it.
        loads: of the job.
        block_bytes: of the checkpoint.
    """
    if read_once is False or loads.processes == 1:
        return ReadTogether([], [], None)
    needs, reads = JobNeeds(loads.processes), RepeatedReads(block_bytes)
    found, stored, repeated = list[Shared](), 0, 0
    for number, (array, place) in enumerate(arrays):
        if not spans_processes(place.sharding) or not array.chunks:
            continue
        assert place.sharding is not None
        size = stored_bytes(array)
        of_each = needs.of(array.shape, place.sharding)
        again = reads.job_bytes(array, of_each) - size
        stored, repeated = stored + size, repeated + max(0, again)
        if again * NOTICEABLE > size or (read_once is True and again > 0):
            numbers = [place.boxes.index(box) for box in of_each[loads.process]]
            found.append(Shared(number, array, of_each, numbers))
    is_worth_it = repeated >= WORTH_BYTES and repeated * NOTICEABLE >= stored
    if not found or not (read_once is True or is_worth_it):
        return ReadTogether([], [], None)
    are_near, memory = loads.neighbours(block_bytes)
    if are_near and memory is None and read_once == "auto":
        return ReadTogether([], [each.number for each in found], None)
    return ReadTogether(found, [], memory)

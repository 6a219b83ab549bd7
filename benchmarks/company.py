"""Company: the other processes that have a turn at the same time, with whom a process begins at the same moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Company(Protocol):
    """The processes of a turn.

    Attributes:
        leads: whether this one does what is to be done once.
    """

    is_primary: bool

    def prepare(self, work: Callable[[], T]) -> T | None:
        """Have one process do what comes before the clock starts; all come back at once, the others with None."""


class SingleProcess:
    """A process that has nobody to wait for."""

    is_primary = True

    def prepare(self, work: Callable[[], T]) -> T:
        return work()


class Job:
    """The processes of a job of `jax.distributed`, whose CPU devices are joined by gloo.

    Args:
        member: the arguments of `jax.distributed.initialize`.
    """

    def __init__(self, member: Mapping[str, Any]) -> None:
        import jax
        from jax.experimental import multihost_utils

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(**member)
        self.is_primary = jax.process_index() == 0
        self._meet = multihost_utils.sync_global_devices

    def prepare(self, work: Callable[[], T]) -> T | None:
        self._meet("all are here")
        done = work() if self.is_primary else None
        self._meet("prepared")
        return done

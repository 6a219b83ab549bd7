"""The Coordinator: who am I, how many are we, barriers, agreement. The only place that touches jax.distributed."""

from __future__ import annotations

from typing import Protocol, TypeVar

import jax

from jaxckpt_train.errors import CheckpointError

T = TypeVar("T")


class Coordinator(Protocol):
    """What the processes of one job agree through. Every method is called by all of them, in the same order.

    Attributes:
        process: number of this process, from 0.
        processes: how many there are.
    """

    process: int
    processes: int

    def barrier(self, phase: str) -> None:
        """Wait until all processes are here; `phase` names the place for error messages."""

    def agree(self, phase: str, flag: bool) -> bool:
        """Whether any process says yes: all then do, at the same step."""

    def broadcast(self, phase: str, value: T) -> T:
        """The value of process 0."""


class SingleProcess:
    """The coordinator of a job of one process: it always agrees with itself."""

    process = 0
    processes = 1

    def barrier(self, phase: str) -> None:
        """Nobody to wait for."""

    def agree(self, phase: str, flag: bool) -> bool:
        """This process decides."""
        return flag

    def broadcast(self, phase: str, value: T) -> T:
        """This process is process 0."""
        return value


def current() -> Coordinator:
    """The coordinator of this job.

    Raises:
        CheckpointError: the job has several processes, which this version does not save together.
    """
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        raise CheckpointError(
            f"this job has {jax.process_count()} processes; this version of jaxckpt_train saves jobs of one process "
            "(with any number of devices)"
        )
    return SingleProcess()

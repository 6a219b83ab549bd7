"""Neighbours: whether all processes of a job run on one machine, and memory there in which they see each other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from jaxckpt_train.jobs.coordinator import Coordinator
from jaxckpt_train.jobs.near_memory import NearMemory
from jaxckpt_train.store.machine import machine_id

_FAR = b""
_BLIND = b"!"


class Neighbours(NamedTuple):
    """What the processes of a job are to each other.

    Attributes:
        are_near: whether all run on one machine.
        memory: in which they see each other. None: not all see that of all others, as from containers that are shut off
            from each other.
    """

    are_near: bool
    memory: NearMemory | None


class _Here(msgspec.Struct, array_like=True):
    machine: str
    address: bytes


def neighbours(order: Coordinator, size: int) -> Neighbours:
    """What they are; all of them ask, each for memory of `size` bytes of its own. Whoever gets some closes it.

    Raises:
        As `Coordinator.exchange`.
    """
    with contextlib.ExitStack() as unless_joined:
        own: NearMemory | None = None
        with contextlib.suppress(OSError):
            own = NearMemory(size)
            unless_joined.callback(own.close)
        with contextlib.ExitStack() as hidden:
            if own is not None:
                hidden.callback(own.hide)
            here = _Here(machine_id(), b"" if own is None else own.address)
            doing = "asking on which machines the processes of this job are"
            told = order.exchange(doing, lambda: msgspec.msgpack.encode(here), _on_one_machine)
            if told == _FAR:
                return Neighbours(False, None)
            addresses = msgspec.msgpack.decode(told, type=list[bytes])
            if own is None or not all(addresses):
                return Neighbours(True, None)

            def look() -> bytes:
                try:
                    own.join(addresses, order.process)
                except OSError:
                    return _BLIND
                return b""

            if order.exchange("looking at the memory of the processes of this job", look, b"".join):
                return Neighbours(True, None)
        unless_joined.pop_all()
        return Neighbours(True, own)


def _on_one_machine(told: Sequence[bytes]) -> bytes:
    found = [msgspec.msgpack.decode(each, type=_Here) for each in told]
    if not found[0].machine or len({each.machine for each in found}) > 1:
        return _FAR
    return msgspec.msgpack.encode([each.address for each in found])

"""Whether all processes of a job are about to load the same, asked before the first transfer between them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from jaxckpt_train.errors import OtherProcessError
from jaxckpt_train.jobs.coordinator import always
from jaxckpt_train.store.read_repeats import Needs
from jaxckpt_train.store.transaction import Committed
from jaxckpt_train.tree.share_ways import Shared

SHOWN = 5
_DIFFERS = b"differs"


class _Begun(msgspec.Struct, array_like=True):
    """What a process is about to load."""

    directory: str
    sha256: str
    leaves: str
    budget_bytes: int


class Together(Protocol):
    """Does something in all processes of the job, as `Coordinator.exchange`."""

    def __call__(
        self, doing: str, act: Callable[[], bytes | None], merge: Callable[[Sequence[bytes]], bytes] = always
    ) -> bytes:
        """What `merge` makes of it in process 0."""


def agree(together: Together, committed: Committed, shared: Sequence[Shared], budget_bytes: int) -> int:
    """The least of the budgets of all processes.

    Raises:
        OtherProcessError: another one loads something else; names it, and what.
        CheckpointTimeoutError: another one did not come.
    """
    directory = committed.directory.encode(errors="backslashreplace").decode()
    leaves = _leaves(shared)
    mine = _Begun(directory, committed.manifest_sha256, _digest(leaves), budget_bytes)
    doing = f"beginning to load {directory}"
    told = together(doing, lambda: msgspec.msgpack.encode(mine), _agreed)
    if told == _DIFFERS:
        together(doing, lambda: msgspec.msgpack.encode(leaves), _refuse_differences)
    return int(told)


def _agreed(values: Sequence[bytes]) -> bytes:
    found = [msgspec.msgpack.decode(value, type=_Begun) for value in values]
    for process, each in enumerate(found):
        if each.sha256 == found[0].sha256:
            continue
        if each.directory == found[0].directory:
            raise OtherProcessError(
                f"{each.directory}: process {process} has opened another checkpoint there than process 0: it was "
                "replaced meanwhile, so load it again; or that directory is not on storage that all of them share"
            )
        raise OtherProcessError(
            f"process {process} loads {each.directory}, but process 0 loads {found[0].directory}, which is another "
            "checkpoint; all processes of a job load the same, in the same order"
        )
    if any(each.leaves != found[0].leaves for each in found):
        return _DIFFERS
    return b"%d" % min(each.budget_bytes for each in found)


def _refuse_differences(values: Sequence[bytes]) -> bytes:
    found = [dict(msgspec.msgpack.decode(value, type=list[tuple[str, str]])) for value in values]
    lines = []
    for name in {name: None for each in found for name in each}:
        others = [number for number, each in enumerate(found) if each.get(name) != found[0].get(name)]
        if others:
            lines.append(f"leaf {name!r}: {_told(others[0], found[others[0]].get(name), found[0].get(name))}")
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    raise OtherProcessError(f"the processes of this job do not load the same: {'; '.join(lines[:SHOWN])}{more}")


def _told(process: int, its: str | None, first: str | None) -> str:
    if its is None or first is None:
        who, other = (process, 0) if first is None else (0, process)
        return f"process {who} loads it together with the others, process {other} does not"
    return f"process {process} loads it onto other devices than process 0"


def _leaves(shared: Sequence[Shared]) -> list[tuple[str, str]]:
    """The name of each array, and a digest of what the processes need of it."""
    known = dict[int, str]()
    found = []
    for each in shared:
        if id(each.needs) not in known:
            known[id(each.needs)] = _digest(each.needs)
        found.append((each.array.name, known[id(each.needs)]))
    return found


def _digest(found: Needs | list[tuple[str, str]]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(found)).hexdigest()

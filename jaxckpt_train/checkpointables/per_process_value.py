"""Values that each process of a job has for itself: one file of each, or one for all where all are equal."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxckpt_train.checkpointables.contract import Json, Saved, Staged
from jaxckpt_train.checkpointables.iterator_state import decode_state, encode_state
from jaxckpt_train.errors import CorruptCheckpointError, MismatchError
from jaxckpt_train.multihost import current


@dataclasses.dataclass(frozen=True)
class PerProcess:
    """Marks plain data that each process of a job has for itself, and that may differ, as a NumPy generator's state.

    Each process saves its own and gets its own back, in a job of as many processes. Where all were equal, any number
    of processes gets it. None, bool, int, float, str, bytes, lists, tuples, dicts, NumPy scalars and arrays. As the
    target of a load give `PerProcess(None)`.

    For example:

        manager.save(step, {"state": state, "rng": PerProcess(generator.bit_generator.state)})
    """

    value: Any


class PerProcessHandler:
    """A PerProcess."""

    kind = "per_process"
    early = True

    def handles(self, value: object) -> bool:
        """Whether it is marked so."""
        return isinstance(value, PerProcess)

    def is_current(self, value: PerProcess) -> bool:
        """Whether it stays the current one, as what changes in place does: it does not."""
        return False

    def stage(self, value: PerProcess) -> Staged:
        """The data as it is now.

        Raises:
            UnsupportedLeafError: it is no plain data.
        """
        return stage_own(value.value)

    def restore(self, target: Any, saved: Saved) -> PerProcess:
        """What this process has saved.

        Raises:
            MismatchError: there is a target, and another number of processes has saved what is not equal in all.
        """
        return PerProcess(own_value(saved, is_wanted=target is not None))


def stage_own(value: Any) -> Staged:
    """Plain data of this process."""
    same = {"processes": current().processes, "state": encode_state(value)}
    return Staged(value=same, same=same["state"])


def refuse_missing(saved: Saved, processes: object) -> None:
    """Raise CorruptCheckpointError if there are neither one value for all nor one of each of so many processes."""
    if saved.values > 1 and saved.values != processes:
        raise CorruptCheckpointError(
            f"{saved.name!r}: expected a value of each of {processes} processes, or one for all, found {saved.values}"
        )


def own_value(saved: Saved, *, is_wanted: bool = True) -> Any:
    """What `stage_own` took in this process; without `is_wanted`, of any process where there is none of this one.

    Raises:
        MismatchError: another number of processes has saved what is not equal in all.
        CorruptCheckpointError: the saved data is not what `stage_own` gives.
    """
    data: Json = saved.value()
    if not isinstance(data, dict) or "state" not in data:
        raise CorruptCheckpointError(f"{saved.name!r}: expected a dict with processes, state; found {data!s:.200}")
    refuse_missing(saved, data.get("processes"))
    if is_wanted and saved.values > 1 and saved.values != current().processes:
        raise MismatchError(
            f"{saved.name!r}: each of {saved.values} processes saved a value of its own, found {current().processes} "
            f"processes; restart with {saved.values}, or leave it out of what is restored, to begin it anew"
        )
    try:
        return decode_state(data["state"])
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{saved.name!r}: the saved value cannot be read: {error}") from error

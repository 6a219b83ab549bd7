"""The state that this process had of its Grain iterator, in what Orbax has saved of all of them."""

from __future__ import annotations

from typing import Any

from jaxckpt_train.checkpointables.contract import Json, Saved
from jaxckpt_train.errors import CorruptCheckpointError, IteratorStateError
from jaxckpt_train.formats.orbax_grain import STATE_FILE, state_of


def own_state(saved: Saved, processes: int, process: int) -> Any:
    """The state of one process, as Grain takes it back.

    Args:
        saved: the states of all, by the names of their files.
        processes: how many there are now.
        process: the number of this one.

    Raises:
        IteratorStateError: another number of processes has saved them.
        CorruptCheckpointError: the one of this process is not there, or is no state.
    """
    states = saved.value()
    found = _by_process(states, saved.name)
    counts = sorted({count for count, _ in found})
    if processes not in counts:
        several = "" if counts == [1] else "es"
        raise IteratorStateError(
            f"iterator {saved.name!r}: saved with Orbax by {' or '.join(map(str, counts))} process{several}, found "
            f"{processes}; each was at a position in its own share of the data: restart with {counts[-1]}, or leave it "
            "out of what is restored, to start the data from the beginning"
        )
    name = found.get((processes, process))
    if name is None:
        raise CorruptCheckpointError(f"iterator {saved.name!r}: lacks the file of process {process} of {processes}")
    try:
        return state_of(states[name])
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"iterator {saved.name!r}: expected a state of Grain in {name}, which is JSON, but: {error}"
        ) from error


def _by_process(states: Json, name: str) -> dict[tuple[int, int], str]:
    """The names of the files by the number of processes, and of which of them each is."""
    matches = [STATE_FILE.fullmatch(file) for file in states] if isinstance(states, dict) else []
    if not matches or None in matches:
        raise CorruptCheckpointError(
            f"iterator {name!r}: expected states by names such as process_0-of-1.json; found {states!s:.200}"
        )
    return {(int(match["processes"]), int(match["process"])): match.string for match in matches if match is not None}

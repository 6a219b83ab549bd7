"""The data of a loop that cannot go on where it was, or cannot be saved: refused, or, by request, begun anew."""

from __future__ import annotations

import logging
from typing import Any, Literal

from jaxckpt_train.checkpointables.fingerprint import DATA_NAME
from jaxckpt_train.checkpointables.saving import SaveTimes, stage_all
from jaxckpt_train.errors import IteratorStateError, UnsupportedLeafError
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.store.reader import Progress

OnMismatch = Literal["error", "restart", "skip"]
_log = logging.getLogger("jaxckpt_train")


def refuse_unsavable(data: Any) -> None:
    """Raise UnsupportedLeafError if the data (None: there is none) cannot be saved: now, and not at the first save."""
    if data is None:
        return
    try:
        stage_all({DATA_NAME: data}, SaveTimes(), StoreSettings())
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(
            f"{error}\nresume: data: expected an iterator with get_state() and set_state(state), "
            f"which save its position, found {type(data).__name__}; for others give CountedIterator(items_from)"
        ) from error


def restore_values(
    manager: StepManager, values: dict[str, Any], on_mismatch: OnMismatch, progress: Progress | None
) -> dict[str, Any]:
    """Restore the newest step that is whole into what a loop works with.

    Args:
        manager: of the run.
        values: the checkpointables by name.
        on_mismatch: what is done if the position of `data` does not fit its iterator, such as that of a share of the
            data in a job of another number of processes: "error"; "restart": the data begins anew, and the rest goes
            on; "skip": so it does, and as many elements as updates were completed are taken from it and dropped.
        progress: called with numbers of bytes.

    Raises:
        IteratorStateError: it does not fit, and "error" is asked for.
        As `StepManager.restore`.
    """
    data: Any = values.get(DATA_NAME)
    is_watched = on_mismatch != "error" and hasattr(data, "get_state") and hasattr(data, "set_state")
    before = data.get_state() if is_watched else None  # in a job it may be set in those processes that do not refuse
    try:
        return manager.restore(values, progress=progress)
    except IteratorStateError as error:
        if on_mismatch == "error" or DATA_NAME not in values:
            raise
        _log.warning("the data does not go on where it was, by request (%s): %s", on_mismatch, error)
    if is_watched:
        manager.all_do("setting the data back", lambda: _set_back(data, before))
    rest = manager.restore({name: value for name, value in values.items() if name != DATA_NAME}, progress=progress)
    if on_mismatch == "skip":
        count = manager.restored_step or 0
        manager.all_do(f"skipping {count} elements of the data", lambda: _skip(data, count))
    return {name: rest.get(name, value) for name, value in values.items()}


def _set_back(data: Any, before: Any) -> None:
    """One that has refused the saved position is where it was."""
    try:
        is_there = bool(data.get_state() == before)
    except ValueError:  # arrays in it
        is_there = False
    if not is_there:
        data.set_state(before)


def _skip(data: Any, count: int) -> None:
    for number in range(count):
        try:
            next(data)
        except StopIteration:
            raise IteratorStateError(
                f"data: expected {count} elements to skip, one for each completed update, found {number}; give an "
                'iterator that repeats, or data_on_mismatch="restart"'
            ) from None

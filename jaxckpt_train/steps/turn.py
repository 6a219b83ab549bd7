"""The turn of a save: the one before it has ended, and the run takes this step; in a job as process 0 finds."""

from __future__ import annotations

import time

from jaxckpt_train.errors import CheckpointError, CheckpointTimeoutError
from jaxckpt_train.steps.in_flight import InFlight
from jaxckpt_train.steps.run_directory import RunDirectory
from jaxckpt_train.steps.together import Together


def wait_for_turn(
    together: Together,
    run: RunDirectory,
    in_flight: InFlight,
    step: int,
    *,
    force: bool,
    timeout_s: float | None,
    overwrite: bool,
) -> str | None:
    """Wait until it is the turn of a step, or say why it is skipped; the same in all processes of a job.

    Raises:
        As `InFlight.wait_for_turn` and `RunDirectory.refuse`.
    """

    def take_turn() -> str | None:
        why_not = in_flight.wait_for_turn(step, force, timeout_s)
        if why_not is None:
            run.refuse(step, overwrite=overwrite)
        return why_not

    try:
        found: str | None = together.led("waiting to save", take_turn, time.monotonic)
    except CheckpointError as error:
        if not together.leads and not isinstance(error, CheckpointTimeoutError):
            in_flight.tell_outcome(is_told=True)
        raise
    if not together.leads and found is None:
        in_flight.tell_outcome()  # within `telling_later`: this process takes part first, or all would miss each other
    return found

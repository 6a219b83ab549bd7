"""`jaxckpt pin`: keeps a step of a run whatever its policies say."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxckpt_train.cli.arguments import BACKEND, Json, Run, absolute
from jaxckpt_train.cli.output import print_json, told_errors
from jaxckpt_train.steps.owned_run import owned_run
from jaxckpt_train.steps.step_names import check_step
from jaxckpt_train.store.answers import answer_of

PinnedStep = Annotated[int, typer.Argument(metavar="STEP", help="The number of the step.", show_default=False)]
Off = Annotated[bool, typer.Option("--off", help="Unpin it: the policies decide again.")]


def pin(run: Run, step: PinnedStep, off: Off = False, as_json: Json = False) -> None:
    """Pin a step: no policy, and no `jaxckpt prune`, deletes it. With --off it may go again.

    Refused with 4 while a live process owns the run: pin it there, by `manager.pin(step)`. Ends with 3 if there is no
    such step.
    """
    with told_errors(as_json):
        directory, number, pinned = absolute(run), check_step(step), not off
        with owned_run(BACKEND, directory) as owned:
            was_pinned = owned.candidates(number)[0].pinned
            answer_of(directory, lambda moved: owned.note_step(number, {"pin": pinned}))
        if as_json:
            print_json({"run": directory, "step": number, "pinned": pinned, "was_pinned": was_pinned})
        else:
            already = " already" if was_pinned == pinned else ""
            print(f"step {number} is {'pinned' if pinned else 'not pinned'}{already}")

"""What a job that was asked to leave does in the time left: finishes a save, begins one, or keeps the last."""

from __future__ import annotations

import dataclasses

MARGIN, MARGIN_S = 1.2, 0.1  # a save may take longer than each of the last ones did
ENDING_S = 5.0  # to end a process in which JAX has been at work
UNKNOWN_S = 30.0  # what is set aside of a time limit as long as no save was seen


@dataclasses.dataclass(frozen=True)
class Situation:
    """What is known when a job has been asked to leave.

    Attributes:
        left_s: seconds in which all must be done; None: nobody has said, or no time is left to lose.
        unsaved: the last completed update, if no save of it is committed or under way.
        running: the step of a save under way.
        running_for_s: seconds since it began.
        committed: the step that was committed last.
        save_s: seconds that a save takes until it is committed; None: not known.
        step_s: seconds that an update takes; None: not known.
    """

    left_s: float | None
    unsaved: int | None
    running: int | None = None
    running_for_s: float = 0.0
    committed: int | None = None
    save_s: float | None = None
    step_s: float | None = None


@dataclasses.dataclass(frozen=True)
class LeavingPlan:
    """What is done, once the save under way has ended if there is one.

    Attributes:
        saves: whether the last completed update is saved.
        why: as text, for the log and the history.
        waits: whether there is a save under way; once it has ended more is known.
        loses: whether there is no time to save updates for which that would be worth it.
    """

    saves: bool
    why: str
    waits: bool = False
    loses: bool = False


def choose(now: Situation) -> LeavingPlan:
    """What loses the least and can be finished: a save that cannot end in time is not begun.

    A save under way is always waited for. It is enough if the updates since can be done again in the time that another
    save would take; else, and where none is under way, another one follows if that can be committed in time. What is
    not known is tried, and so is whatever can be where nothing is committed yet.
    """
    if now.unsaved is None:
        why = "nothing new to save" if now.running is None else f"finishing the save of step {now.running}"
        return LeavingPlan(False, why, now.running is not None)
    new, waits = f"saving step {now.unsaved}", now.running is not None
    first = f"finishing the save of step {now.running}, then " if waits else ""
    if now.left_s is None:
        return LeavingPlan(True, f"{first}{new}: no time limit is known, or it is over already", waits)
    if now.save_s is None:
        return LeavingPlan(True, f"{first}{new}: how long a save takes is not known yet", waits)
    if now.running is not None and now.step_s is not None:
        behind = now.unsaved - now.running
        if behind * now.step_s <= now.save_s:
            return LeavingPlan(
                False,
                f"finishing the save of step {now.running}, which is fresh enough: doing {_updates(behind)} again "
                f"takes {behind * now.step_s:.3g} s, saving step {now.unsaved} {now.save_s:.3g} s",
                waits,
            )
    rest_s = 0.0 if now.running is None else max(0.0, now.save_s - now.running_for_s)
    needed_s = MARGIN * (rest_s + now.save_s) + MARGIN_S
    time = f"{needed_s:.3g} s of {now.left_s:.3g} s are needed"
    if needed_s <= now.left_s or (now.committed is None and now.running is None):
        return LeavingPlan(True, f"{first}{new}: {time}", waits)
    kept = f"finishing the save of step {now.running}" if waits else f"step {now.committed} stays the last one"
    return LeavingPlan(False, f"{kept}: no time to save step {now.unsaved}, {time}", waits, loses=True)


def _updates(number: int) -> str:
    return "1 update" if number == 1 else f"{number} updates"


def leave_early_s(save_s: float | None, step_s: float | None, limit_s: float) -> float:
    """How many seconds before a time limit a job has to be asked to leave, for its last save to end within it.

    Args:
        save_s: that a save takes until it is committed; None: not known.
        step_s: that an update takes; None: not known.
        limit_s: the time limit, of which half is left to train in, or no job would ever get further.
    """
    # One save may be under way, and one is begun after an update.
    early_s = UNKNOWN_S if save_s is None else ENDING_S + MARGIN * 2 * save_s + 2 * (step_s or 0.0)
    return min(early_s, limit_s / 2)

"""Cuts the power of a real file system under ours and Orbax: right after a save was acknowledged, and at random.

The cuts, and the file systems, are those of `tests/nightly/faults/power_cut.py`. The file system is mounted again, and
what was acknowledged is loaded.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any, get_args

from benchmarks.faults_trial import LONGEST_S, SUBJECTS, Row, outcome, save, state_of
from tests.nightly.faults.loop_disk import LoopDisk
from tests.nightly.faults.power_cut import LATEST_CUT_S, Timer, When
from tests.support.forking import Tell, forked

WHEN: tuple[When, ...] = get_args(When)
MOST_SAVES, NEW_DISK = 12, 10
_NAMES = {"acknowledged": "right after the acknowledgement", "random": "at random"}


def power_cuts(name: str, when: When, trials: int, seed: int, disk: LoopDisk) -> Row:
    """Cut the power repeatedly while one subject saves, and check each time that all acknowledged saves exist."""
    row, chance = Row(f"power cut {_NAMES[when]}, {disk.kind}", name), random.Random(f"{seed} {when}")
    for number in range(trials):
        if number % NEW_DISK == 0:
            disk.unmount()
            disk.make_new()
        first, after_s = number * MOST_SAVES, 0.0 if when == "acknowledged" else chance.uniform(0, 2 * LATEST_CUT_S)
        folder = disk.path / f"run{number}"
        answers, _ = forked(
            lambda tell, f=folder, s=first, a=after_s: _save(name, when, disk, f, s, a, tell), LONGEST_S
        )  # type: ignore[misc]
        acknowledged = [value for what, value in answers if what == "acknowledged"]
        if ("cut", None) not in answers:
            row.add("save failed", str(answers)[-300:])
            continue
        disk.unmount()
        disk.mount()
        seen, _ = forked(lambda tell, f=folder, steps=acknowledged: _look(name, f, steps, tell), LONGEST_S)  # type: ignore[misc]
        ends = [value for what, value in seen if what == "end"]
        lost = [end for end in ends if end[0] != "right"]
        if len(ends) != len(acknowledged):
            row.add("lost: error", str(seen)[-300:])
        else:
            row.add(*((f"lost: {lost[-1][0]}", lost[-1][1]) if lost else ("right", "")))
    return row


def _save(name: str, when: When, disk: LoopDisk, folder: Path, first: int, after_s: float, tell: Tell) -> None:
    """Save until the power is cut: at random means while the second save, or a later one, may be under way."""
    subject: Any = SUBJECTS[name]()
    states = [state_of(first + each) for each in range(1 if when == "acknowledged" else MOST_SAVES)]
    folder.mkdir()
    save(subject, folder / f"step{first}", states.pop(0))
    if when == "acknowledged":
        disk.cut_power()
        tell("acknowledged", first)
        tell("cut", None)
        return
    tell("acknowledged", first)
    cut, is_over = Timer(disk, "nothing flushed", after_s), threading.Event()

    def wait_for_it() -> None:
        cut.join()
        tell("cut", None)
        is_over.set()

    cut.start()
    threading.Thread(target=wait_for_it, daemon=True).start()
    try:
        for each, state in enumerate(states, 1):
            save(subject, folder / f"step{first + each}", state)
            if cut.is_near.is_set():
                break  # whether it was acknowledged before the cut, nobody knows
            tell("acknowledged", first + each)
    except Exception as error:  # noqa: BLE001  # whatever a subject raises on a disk without power
        tell("refused", f"{type(error).__name__}: {error}"[:200])
    is_over.wait(LONGEST_S)


def _look(name: str, folder: Path, steps: list[int], tell: Tell) -> None:
    subject = SUBJECTS[name]()
    for step in steps:
        tell("end", outcome(subject, folder / f"step{step}", step))

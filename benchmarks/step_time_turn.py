"""One subject's turn in a process of its own: quiet steps and steps during a save, in alternation."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import host_memory, page_cache
from benchmarks.step_time_model import Size, Training
from benchmarks.step_time_subjects import Subject, Wait, make_subject

WARM_STEPS = 3
MOST_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Cycle:
    """Some quiet steps, then a save with steps while it is under way and after.

    Attributes:
        quiet_s: steps with no save under way.
        during_s: the first step after the call, however short the save, and those that began while it was under way;
            the last one may have outlived it.
        after_s: the other steps of the block.
        blocking_s: the call that began the save.
        save_s: from that call until the save was finished.
        quiet_wall_s: all of the quiet block, with what lies between steps.
        block_wall_s: from the call to the end of the last step.
    """

    quiet_s: list[float]
    during_s: list[float]
    after_s: list[float]
    blocking_s: float
    save_s: float
    quiet_wall_s: float
    block_wall_s: float


class _Watch:
    """Waits for a save on a thread of its own, and remembers when it was finished."""

    def __init__(self, wait: Wait) -> None:
        self._wait, self._error = wait, None
        self.finished: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._wait()
        except Exception as error:  # noqa: BLE001  # a thread's edge: raised by join()
            self._error = error
        self.finished = time.perf_counter()

    def join(self) -> float:
        """Wait; when the save was finished."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self.finished is not None
        return self.finished


def run_cycle(training: Training, subject: Subject, path: Path, steps: int, *, is_quick: bool = False) -> Cycle:
    """Measure one save to the new directory `path`, which is removed again, between `steps` steps before and after.

    `is_quick`: do not wait until the machine has given memory back to its host, and has it again.
    """
    page_cache.settle()
    host_memory.make_present(training.nbytes, is_quick=is_quick)  # as below, so that both blocks begin alike
    training.step()
    quiet_began = time.perf_counter()
    quiet = [training.step() for _ in range(steps)]
    quiet_ended = time.perf_counter()
    host_memory.make_present(training.nbytes, is_quick=is_quick)
    training.step()
    began = time.perf_counter()
    wait = subject.start_save(path, training.state)
    returned = time.perf_counter()
    watch = _Watch(wait)
    block: list[tuple[float, float]] = []
    while len(block) < steps or (watch.finished is None and len(block) < MOST_STEPS):
        block.append(training.step())
    block_ended = time.perf_counter()
    finished = watch.join()
    shutil.rmtree(path, ignore_errors=True)
    disturbed = max(1, sum(start < finished for start, _ in block))
    return Cycle(
        quiet_s=[end - start for start, end in quiet],
        during_s=[end - start for start, end in block[:disturbed]],
        after_s=[end - start for start, end in block[disturbed:]],
        blocking_s=returned - began,
        save_s=finished - began,
        quiet_wall_s=quiet_ended - quiet_began,
        block_wall_s=block_ended - began,
    )


def run_turn(
    make: Callable[[], Subject], size: Size, directory: Path, *, saves: int, steps: int
) -> tuple[int, list[Cycle]]:
    """One cycle that does not count and `saves` that do; the bytes of the state, and the cycles."""
    training, subject = Training(size), make()
    for _ in range(WARM_STEPS):
        training.step()
    cycles = [run_cycle(training, subject, directory / f"save-{number}", steps) for number in range(saves + 1)]
    return training.nbytes, cycles[1:]


def turn_in_child(subject: str, size: dict[str, int], directory: str, saves: int, steps: int) -> dict[str, Any]:
    """`run_turn` with what JSON can hold."""
    state_bytes, cycles = run_turn(
        lambda: make_subject(subject), Size(**size), Path(directory), saves=saves, steps=steps
    )
    return {"state_bytes": state_bytes, "cycles": [dataclasses.asdict(cycle) for cycle in cycles]}

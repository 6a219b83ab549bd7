"""`jaxckpt verify` and `jaxckpt scrub`: is every byte what was saved?"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from jaxckpt_train.cli.arguments import BACKEND, Checkpoint, Json, Run, Step, absolute
from jaxckpt_train.cli.output import Code, bytes_text, print_json, progress, told_errors
from jaxckpt_train.errors import CheckpointError, NotACheckpointError, SettingsError
from jaxckpt_train.looking.opening import open_at
from jaxckpt_train.looking.run_look import StepLook, look_at_run
from jaxckpt_train.opened import OURS
from jaxckpt_train.store.latch import Latch
from jaxckpt_train.store.verify import first_damage, verify_opened

Rate = Annotated[
    float | None,
    typer.Option(
        "--mib-per-second", "-r", help="Read no faster than this; else as fast as it goes.", show_default=False
    ),
]
MIB = 1 << 20


def verify(path: Checkpoint, step: Step = None, as_json: Json = False) -> None:
    """Read every byte of a checkpoint and compare it with its digests. Ends with 1 if something is damaged."""
    with told_errors(as_json):
        opened = open_at(BACKEND, absolute(path), step)
        if opened.kind != OURS:
            raise NotACheckpointError(f"{opened.path}: of {opened.kind}, which keeps no digests to compare with")
        with progress("verifying", None, as_json) as advance:
            report = verify_opened(BACKEND, opened.committed, opened.settings, advance)
        if as_json:
            told = {"path": opened.path, "ok": report.ok, "bytes": report.checked_bytes, "problems": report.problems}
            print_json(told)
        else:
            print(*report.problems, sep="\n", end="\n" if report.problems else "")
            print(f"{opened.path}: {'ok' if report.ok else 'DAMAGED'}, {bytes_text(report.checked_bytes)} compared")
        if not report.ok:
            raise typer.Exit(int(Code.WRONG))


def scrub(run: Run, rate: Rate = None, as_json: Json = False) -> None:
    """Read every byte of all steps of a run, the newest first, and compare it with its digests.

    Changes nothing: a training that restores sets damaged steps aside by itself. Ends with 1 if a step is damaged.
    """
    with told_errors(as_json):
        if rate is not None and not rate > 0:
            raise SettingsError(f"--mib-per-second: expected a number above 0, found {rate:g}")
        directory = absolute(run)
        looks = look_at_run(BACKEND, directory)
        if not looks:
            raise NotACheckpointError(f"{directory}: expected a run, found no steps in it")
        pace = _Pace(None if rate is None else rate * MIB)
        with progress("verifying", sum(look.nbytes or 0 for look in looks), as_json) as advance:

            def read(nbytes: int) -> None:
                pace(nbytes)
                advance(nbytes)

            found = _scrub(directory, looks, read)
        damaged = {name: problem for name, problem in found.items() if problem is not None}
        if as_json:
            print_json({"run": directory, "steps": [{"name": name, "problem": each} for name, each in found.items()]})
        else:
            for name, problem in damaged.items():
                print(f"{name}: {problem}")
            print(f"{len(found)} steps, {len(damaged)} damaged, {bytes_text(pace.nbytes)} read")
        if damaged:
            raise typer.Exit(int(Code.WRONG))


class _Pace:
    """Keeps reads to a rate, in bytes a second; None: as fast as they go."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._began, self.nbytes, self._latch = rate, time.monotonic(), 0, Latch()

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._rate is not None:
            ahead_s = self.nbytes / self._rate - (time.monotonic() - self._began)
            if ahead_s > 0:
                self._latch.wait(ahead_s)


def _scrub(directory: str, looks: list[StepLook], pace: Any) -> dict[str, str | None]:
    """What is wrong with each step, in the order in which they were looked at."""
    return {look.name: _problem(directory, look, pace) for look in reversed(looks)}


def _problem(directory: str, look: StepLook, pace: Any) -> str | None:
    if look.problem is not None:
        return look.problem
    try:
        return first_damage(BACKEND, f"{directory}/{look.name}", pace)
    except CheckpointError as error:
        return str(error)

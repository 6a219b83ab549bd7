"""`jaxckpt verify` and `jaxckpt scrub`: is every byte what was saved?"""

from __future__ import annotations

import time
from typing import Annotated, Any, NamedTuple

import typer

from jaxckpt_train.cli.arguments import BACKEND, Checkpoint, Json, Run, Step, absolute, step_number
from jaxckpt_train.cli.output import Code, bytes_text, print_json, print_text, progress, told_errors
from jaxckpt_train.errors import CheckpointError, NotACheckpointError, SettingsError, StepNotFoundError
from jaxckpt_train.looking.opening import open_at
from jaxckpt_train.looking.run_look import StepLook, look_at_run
from jaxckpt_train.opened import OURS
from jaxckpt_train.store.backend import is_refusal
from jaxckpt_train.store.latch import Latch
from jaxckpt_train.store.local import file_exists
from jaxckpt_train.store.verify import first_damage, verify_opened

Rate = Annotated[
    float | None,
    typer.Option(
        "--mib-per-second", "-r", help="Read no faster than this; else as fast as it goes.", show_default=False
    ),
]
MIB = 1 << 20


def verify(path: Checkpoint, step: Step = None, as_json: Json = False) -> None:
    """Read every byte of a checkpoint and compare it with its digests.

    Ends with 1 if something is damaged, also a newer step of the run, with 4 if some of it cannot be read.
    """
    with told_errors(as_json):
        opened = open_at(BACKEND, absolute(path), step_number(step))
        if opened.kind != OURS:
            raise NotACheckpointError(f"{opened.path}: of {opened.kind}, which keeps no digests to compare with")
        with progress("verifying", None, as_json) as advance:
            report = verify_opened(BACKEND, opened.committed, opened.settings, advance)
        if not report.ok and not file_exists(opened.path):
            raise StepNotFoundError(f"{opened.path}: was removed while it was being read")
        total, compared = opened.committed.data_bytes, bytes_text(report.checked_bytes)
        compared += "" if report.checked_bytes == total else f" of {bytes_text(total)}"
        state = "ok" if report.ok else "DAMAGED" if report.is_damaged else "CANNOT BE READ"
        if as_json:
            told = {"path": opened.path, "ok": report.ok, "bytes": report.checked_bytes, "problems": report.problems}
            print_json({**told, "damaged": report.is_damaged, "skipped": opened.skipped})
        else:
            for problem in report.problems:
                print_text(problem)
            print_text(f"{opened.path}: {state}, {compared} compared")
        if report.is_damaged or (report.ok and opened.skipped):
            raise typer.Exit(int(Code.WRONG))
        if not report.ok:
            raise typer.Exit(int(Code.REFUSED))


def scrub(run: Run, rate: Rate = None, as_json: Json = False) -> None:
    """Read every byte of all steps of a run, the newest first, and compare it with its digests.

    Changes nothing: a training that restores sets damaged steps aside by itself. Ends with 1 if a step is damaged, with
    4 if none is and one cannot be read.
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
        damaged, refused = sum(each.is_damaged for each in found), sum(each.is_refused for each in found)
        if as_json:
            steps = [{"name": each.name, "problem": each.problem, "damaged": each.is_damaged} for each in found]
            print_json({"run": directory, "steps": steps})
        else:
            for each in found:
                if each.problem is not None:
                    print_text(f"{each.name}: {each.problem}")
            unread = f", {refused} cannot be read" if refused else ""
            print(f"{len(found)} steps, {damaged} damaged{unread}, {bytes_text(pace.nbytes)} read")
        if damaged or refused:
            raise typer.Exit(int(Code.WRONG if damaged else Code.REFUSED))


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


class _Scrubbed(NamedTuple):
    """What was found of a step: a problem, or none; whether it is only that the storage has refused to read it."""

    name: str
    problem: str | None
    is_refused: bool = False

    @property
    def is_damaged(self) -> bool:
        return self.problem is not None and not self.is_refused


def _scrub(directory: str, looks: list[StepLook], pace: Any) -> list[_Scrubbed]:
    """What is wrong with each step, the newest first; nothing of those that their owner has deleted meanwhile."""
    found = []
    for look in reversed(looks):
        each = _scrubbed(directory, look, pace)
        if each.problem is None or look.name in {entry.name for entry in BACKEND.list(directory)}:
            found.append(each)
    return found


def _scrubbed(directory: str, look: StepLook, pace: Any) -> _Scrubbed:
    if look.problem is not None:
        return _Scrubbed(look.name, look.problem, look.refusal is not None)
    try:
        return _Scrubbed(look.name, first_damage(BACKEND, f"{directory}/{look.name}", pace))
    except CheckpointError as error:
        return _Scrubbed(look.name, str(error), is_refusal(error))

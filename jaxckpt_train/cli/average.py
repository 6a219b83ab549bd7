"""`jaxckpt average`: makes a checkpoint of the mean of several steps of a run."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

from jaxckpt_train.cli.arguments import BACKEND, Json, Run, absolute, checked_step, step_number
from jaxckpt_train.cli.exporting import Only, prepared, to_be_written, to_be_written_text
from jaxckpt_train.cli.importing import READ_BUDGET_MIB, Budget, Out, make_room, now_text, write_prepared
from jaxckpt_train.cli.operations import DryRun, plan_json, print_plan
from jaxckpt_train.cli.output import bytes_text, print_json, print_text, told_errors
from jaxckpt_train.errors import SettingsError, StepNotFoundError
from jaxckpt_train.looking.opening import metadata_of, open_at, told_of_import
from jaxckpt_train.looking.run_look import StepLook, look_at_run
from jaxckpt_train.surgery.averaging import Average

LAST = 5
LEAVES = "params/**"
_log = logging.getLogger("jaxckpt_train")


def _checked_steps(steps: list[str] | None) -> list[str] | None:
    for step in steps or ():
        checked_step(step)
    return steps


Last = Annotated[
    int | None, typer.Option("--last", "-l", min=2, help="How many of the newest whole steps.", show_default=str(LAST))
]
Steps = Annotated[
    list[str] | None,
    typer.Option(
        "--step", "-s", metavar="NUMBER", callback=_checked_steps, help="Which steps, instead.", show_default=False
    ),
]
LeavesToAverage = Annotated[
    str, typer.Option("--leaves", help="Leaf path or pattern to average; the rest is that of the newest step.")
]
PartToAverage = Annotated[
    str | None,
    typer.Option("--part", "-p", help="The checkpointable; else 'state', or the only tree.", show_default=False),
]


def average(
    run: Run,
    out: Out,
    last: Last = None,
    step: Steps = None,
    leaves: LeavesToAverage = LEAVES,
    part: PartToAverage = None,
    only: Only = None,
    dry_run: DryRun = False,
    read_budget_mib: Budget = READ_BUDGET_MIB,
    as_json: Json = False,
) -> None:
    """Make a checkpoint whose parameters are the mean of those of the last steps of a run.

    Floating-point leaves are summed in double precision and rounded once. All else is that of the newest of the steps.
    """
    with told_errors(as_json):
        path, final = absolute(run), absolute(out)
        looks, skipped = _steps(path, last, step)
        paths = [f"{path}/{look.name}" for look in looks]
        opened = open_at(BACKEND, paths[-1])
        operation = Average(leaves, paths[:-1], opened.part(part).name)
        source, name, plan = prepared(opened, part, only, (operation,))
        steps = [look.step for look in looks]
        summary: dict[str, Any] = {
            "run": path,
            "steps": steps,
            "to": final,
            "plan": plan_json(plan),
            "skipped": skipped,
        }
        if not as_json:
            print_plan(plan)
        parts = [each.name for each in source.committed.manifest.parts] if part is None else [name]
        if dry_run:
            summary |= to_be_written(source, parts)
        else:
            make_room(final)
            about = {key: value for key, value in metadata_of(opened).items() if key not in ("metrics", "temporary")}
            info = {**about, "created": now_text(), **told_of_import(opened), "averaged_steps": steps}
            summary["bytes"] = write_prepared(source, final, info, parts, read_budget_mib, as_json)
        if as_json:
            print_json(summary)
        else:
            written = f"{final}: {bytes_text(summary['bytes'])}, the mean of steps {', '.join(map(str, steps))}"
            print_text(to_be_written_text(summary) if dry_run else written)


def _steps(path: str, last: int | None, chosen: list[str] | None) -> tuple[list[StepLook], list[str]]:
    """The steps to average, the newest last, and the names of those that are damaged and passed over."""
    looks = look_at_run(BACKEND, path)
    whole = [look for look in looks if look.entry is not None and look.is_current and look.problem is None]
    if chosen:
        if last is not None:
            raise SettingsError("--last and --step: expected one of them, found both")
        return _named(path, whole, chosen), []
    count = LAST if last is None else last
    if len(whole) < max(2, last or 0):
        raise StepNotFoundError(f"{path}: expected {max(2, last or 0)} whole steps to average, found {len(whole)}")
    taken = whole[-count:]
    bad = [each for each in looks if each.problem is not None and each.step > taken[0].step]
    for look in bad:
        if look.refusal is not None:
            raise look.refusal  # it may be whole
        _log.warning("%s/%s is passed over: %s", path, look.name, look.problem)
    return taken, [look.name for look in bad]


def _named(path: str, whole: list[StepLook], chosen: list[str]) -> list[StepLook]:
    wanted = {step_number(step) for step in chosen}
    found = [look for look in whole if look.step in wanted]
    missing = wanted.difference(look.step for look in found)
    if missing:
        there = ", ".join(str(look.step) for look in whole[-LAST:]) or "none"
        raise StepNotFoundError(f"{path}: has no whole step {', '.join(map(str, missing))}; the last ones are {there}")
    if len(found) < 2:
        raise SettingsError(f"--step: expected two steps or more, found {', '.join(chosen)}")
    return found

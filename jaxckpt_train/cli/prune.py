"""`jaxckpt prune`: lets steps of a run go that a policy does not keep."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

import typer

from jaxckpt_train.cli.arguments import BACKEND, Json, Run, absolute
from jaxckpt_train.cli.output import Code, bytes_text, print_columns, print_json, print_text, progress, told_errors
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.looking.prune_plan import PrunePlan, plan_pruning
from jaxckpt_train.steps.lock import OwnerLock
from jaxckpt_train.steps.owned_run import owned_run
from jaxckpt_train.steps.policy_context import PreservationPolicy
from jaxckpt_train.steps.preservation_policies import BestN, EveryNSteps, LatestN
from jaxckpt_train.steps.pruning import Pruning
from jaxckpt_train.value_checks import stated_mode

KeepLatest = Annotated[
    int | None, typer.Option("--keep-latest", min=1, metavar="N", help="Keep the N highest steps.", show_default=False)
]
KeepEvery = Annotated[
    int | None,
    typer.Option("--keep-every", min=1, metavar="N", help="Keep steps that are multiples of N.", show_default=False),
]
KeepBest = Annotated[
    int | None,
    typer.Option("--keep-best", min=1, metavar="N", help="Keep the N best steps by --metric.", show_default=False),
]
Metric = Annotated[
    str | None,
    typer.Option("--metric", metavar="NAME", help="The metric that says which are best.", show_default=False),
]
Mode = Annotated[
    Literal["min", "max"] | None,
    typer.Option("--mode", help="Whether the lowest or the highest value is best.", show_default="min"),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check/--no-check", help="Read all bytes of the newest step first: only what is whole may replace others."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete them; else nothing is changed.")]


def prune(
    run: Run,
    keep_latest: KeepLatest = None,
    keep_every: KeepEvery = None,
    keep_best: KeepBest = None,
    metric: Metric = None,
    mode: Mode = None,
    check: Check = True,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Let steps of a run go that none of the given rules keeps. Only tells which, unless --yes is given.

    Always kept: the newest step, the newest that is whole, pinned steps, what a link in the run stands for, and what
    cannot be judged. Nothing is deleted while a live process owns the run: that ends with 4. Ends with 1 if the newest
    step is damaged, or cannot be read.
    """
    with told_errors(as_json):
        directory, pruning = absolute(run), Pruning(_policies(keep_latest, keep_every, keep_best, metric, mode))
        if yes:
            with owned_run(BACKEND, directory, pruning) as owned:
                plan = _plan(directory, pruning, check, as_json)
                owned.retain(is_durable=False)  # what stays is on the disk before the others go
        else:
            plan = _plan(directory, pruning, check, as_json)
        there = {entry.name for entry in BACKEND.list(directory)} if yes else set[str]()
        failed = [each.look.name for each in plan.going if each.look.name in there]
        owner = None if yes else OwnerLock(BACKEND, directory).owner()
        owned_by = owner.name if owner is not None and owner.is_alive else None
        if as_json:
            print_json(_json_of(directory, pruning, plan, yes, failed, owned_by))
        else:
            _print(plan, yes, failed, owned_by)
        if failed:
            raise typer.Exit(int(Code.REFUSED))
        if plan.damaged or plan.refused:
            raise typer.Exit(int(Code.WRONG))


def _policies(
    latest: int | None, every: int | None, best: int | None, metric: str | None, mode: Literal["min", "max"] | None
) -> dict[str, PreservationPolicy]:
    if best is None and (metric is not None or mode is not None):
        raise SettingsError("--metric and --mode: expected --keep-best N with them, which they are for")
    if best is not None and metric is None:
        raise SettingsError("--keep-best: expected --metric NAME with it, which says which steps are better")
    policies: dict[str, PreservationPolicy] = {}
    policies |= {} if latest is None else {f"--keep-latest {latest}": LatestN(latest)}
    policies |= {} if every is None else {f"--keep-every {every}": EveryNSteps(every)}
    if best is not None and metric is not None:
        stated = stated_mode("--mode", mode, metric)
        policies[f"--keep-best {best} --metric {metric} --mode {stated}"] = BestN(metric, best, stated)
    if not policies:
        raise SettingsError("expected at least one of --keep-latest, --keep-every and --keep-best, found none")
    return policies


def _plan(directory: str, pruning: Pruning, check: bool, as_json: bool) -> PrunePlan:
    now = datetime.datetime.now(datetime.UTC)
    with progress("verifying the newest step", None, as_json) as advance:
        return plan_pruning(BACKEND, directory, pruning, now, every_byte=check, reading=advance)


def _json_of(
    directory: str, pruning: Pruning, plan: PrunePlan, yes: bool, failed: list[str], owned_by: str | None
) -> dict[str, Any]:
    return {
        "run": directory,
        "kept_by": list(pruning.policies),
        "deleted": yes,
        "bytes": plan.freed_bytes,
        "failed": failed,
        "owner": owned_by,
        "steps": [
            {
                "step": each.look.step,
                "name": each.look.name,
                "bytes": each.look.nbytes,
                "goes": each.goes,
                "why": list(each.why),
            }
            for each in plan.steps
        ],
    }


def _print(plan: PrunePlan, yes: bool, failed: list[str], owned_by: str | None) -> None:
    gone = "gone" if yes else "goes"
    rows = []
    for each in plan.steps:
        fate = "stays" if not each.goes else "refused" if each.look.name in failed else gone
        rows.append([str(each.look.step), bytes_text(each.look.nbytes), fate, "; ".join(each.why)])
    print_columns(["step", "size", "", "why"], rows, [True, True, False, False])
    count, freed = f"{len(plan.going):,} of {len(plan.steps):,} steps", bytes_text(plan.freed_bytes)
    if failed:
        print(f"{len(failed):,} steps could not be deleted; the warnings say why. The next process of the run tries it")
    elif yes:
        print(f"{count} are deleted: {freed}")
    else:
        print(f"{count} would go: {freed}. Nothing is deleted yet: --yes does it")
        if owned_by is not None:
            print_text(f"{owned_by} owns the run: --yes is refused while it lives")

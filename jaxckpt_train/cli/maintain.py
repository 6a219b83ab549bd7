"""The commands that verify, keep, delete and move steps: `jaxckpt verify`, `scrub`, `prune`, `pin`, `cp` and `mv`."""

from __future__ import annotations

import datetime
import errno
import math
import os
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from jaxckpt_train._validation import is_url, stated_mode
from jaxckpt_train.cli.output import (
    BACKEND,
    Checkpoint,
    Code,
    Json,
    Run,
    Step,
    absolute,
    argument,
    option,
    print_columns,
    print_json,
    print_text,
    progress,
)
from jaxckpt_train.errors import CheckpointError, NotACheckpointError, SettingsError, StepNotFoundError, StorageError
from jaxckpt_train.inspection.copying import (
    copy_checked,
    destination,
    refuse_other_tools,
    refuse_to_remove_checkpoint,
    refuse_to_remove_step,
    remove_checkpoint,
)
from jaxckpt_train.inspection.health import PrunePlan, plan_pruning
from jaxckpt_train.inspection.runs import StepStatus, current_names, inspect_run, open_at
from jaxckpt_train.inspection.units import bytes_text
from jaxckpt_train.opened import Opened
from jaxckpt_train.policies.context import PreservationPolicy
from jaxckpt_train.policies.preservation import BestN, EveryNSteps, LatestN
from jaxckpt_train.run.directory import RunDirectory
from jaxckpt_train.run.entry import check_step, parse_step_name
from jaxckpt_train.run.lock import OwnerLock
from jaxckpt_train.run.maintenance import DELETE_GRACE_S, Pruning, owned_run
from jaxckpt_train.run.record import Annotation
from jaxckpt_train.store.backends.base import is_storage_failure
from jaxckpt_train.store.committed import Committed, checkpoint_path, is_gone
from jaxckpt_train.store.files import file_exists
from jaxckpt_train.store.verify import IntactFiles, first_damage, verify_opened

Source = Annotated[str, argument("SRC", "A checkpoint, a step, or a run, which means its newest valid step.")]
Destination = Annotated[
    str, argument("DST", "The new path. In a run, or in a directory with a / at the end, the source keeps its name.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")]
MIB = 1 << 20
_LATER = (
    f"Readers may have opened the data, so it is removed {DELETE_GRACE_S / 60:.0f} minutes later, by the next process "
    "that owns the run for that long, such as a training. To wait for it: `jaxckpt prune --yes --wait "
    f"{DELETE_GRACE_S:.0f}`"
)


def cp(
    src: Source,
    dst: Destination,
    step: Step = None,
    check: Annotated[bool, typer.Option("--check", help="Read the whole copy again before it gets its name.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint, or one step of a run, and verify it.

    Every byte is compared with its digest on the way. The step number, metrics, custom metadata and shardings are
    copied too. If the source is damaged, nothing is copied, and the command exits with 1.
    """
    source = open_at(BACKEND, absolute(src), step)
    final = destination(BACKEND, dst, source)
    done = _copy(source, final, overwrite, check, as_json)
    _print_copy(source, done, {"read_again": check}, "copied", as_json)


def _print_copy(source: Opened, done: Committed, how: dict[str, bool], what: str, as_json: bool) -> None:
    final = checkpoint_path(done.directory)
    if as_json:
        document = {"source": source.location, "path": final, "bytes": done.data_bytes}
        print_json({**document, **how, "skipped": source.skipped})
    else:
        print_text(f"{source.location} -> {final}: {bytes_text(done.data_bytes)} {what}")


def _copy(source: Opened, final: str, overwrite: bool, check: bool, as_json: bool) -> Committed:
    with progress("copying", source.committed.data_bytes * (1 + check), as_json) as advance:
        return copy_checked(BACKEND, source, final, replace=overwrite, every_byte=check, progress=advance)


def mv(src: Source, dst: Destination, step: Step = None, overwrite: Overwrite = False, as_json: Json = False) -> None:
    """Move a checkpoint, or one step of a run: copy it like `jaxckpt cp --check`, then remove the source.

    The newest step of a run and pinned steps cannot be moved. Exits with 4 while a live process owns the run.
    """
    source = open_at(BACKEND, absolute(src), step)
    final = destination(BACKEND, dst, source)
    refuse_other_tools(source)
    run, name = os.path.split(source.path)
    if parse_step_name(name) is None:
        refuse_to_remove_checkpoint(BACKEND, source)
        done = _copy(source, final, overwrite, True, as_json)
        remove_checkpoint(BACKEND, source)
    else:
        if is_url(run) and os.path.dirname(final) == run:
            raise SettingsError(f"{final}: expected a path outside of the run of the step, found one in it")
        with owned_run(BACKEND, run) as owned:
            refuse_to_remove_step(BACKEND, owned, run, name)
            done = _copy(source, final, overwrite, True, as_json)
            owned.held.deleter.delete([name])  # ends before the run is released
    is_step_at_url = is_url(run) and parse_step_name(name) is not None
    if name in current_names(BACKEND, run) if is_step_at_url else file_exists(BACKEND, source.path):
        raise StorageError(errno.EBUSY, f"was copied to {final}, but the source was not removed", source.location)
    _print_copy(source, done, {"removed": True}, "moved", as_json)
    if is_step_at_url and not as_json:
        print(_LATER)


def pin(
    run: Run,
    step: Annotated[int, argument("STEP", "The number of the step.")],
    off: Annotated[bool, typer.Option("--off", help="Remove the pin, so that the policies decide again.")] = False,
    as_json: Json = False,
) -> None:
    """Pin a step, so that no policy and no `jaxckpt prune` deletes it. --off removes the pin.

    Exits with 4 while a live process owns the run; use `manager.pin(step)` in that process. Exits with 3 if the step
    does not exist.
    """
    directory, number, pinned = absolute(run), check_step(step), not off
    with owned_run(BACKEND, directory) as owned:
        was_pinned = owned.candidates(number)[0].pinned
        owned.annotate_step(number, Annotation(pin=pinned))
    if as_json:
        print_json({"run": directory, "step": number, "pinned": pinned, "was_pinned": was_pinned})
    else:
        change = "already" if was_pinned == pinned else "now"
        print(f"step {number} is {change} {'pinned' if pinned else 'unpinned'}")


def prune(
    run: Run,
    keep_latest: Annotated[int | None, option("Keep the N highest steps.", metavar="N", least=1)] = None,
    keep_every: Annotated[int | None, option("Keep steps that are multiples of N.", metavar="N", least=1)] = None,
    keep_best: Annotated[int | None, option("Keep the N best steps by --metric.", metavar="N", least=1)] = None,
    metric: Annotated[str | None, option("The metric that ranks the steps.", metavar="NAME")] = None,
    mode: Annotated[
        Literal["min", "max"] | None,
        typer.Option(help="Whether the lowest or the highest value is the best.", show_default="min"),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Verify the newest step first: only a valid step may replace others."),
    ] = True,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete the steps. Without it, nothing changes.")] = False,
    wait: Annotated[
        float | None,
        option("At a URL: wait for readers, this many seconds, then remove the data of all deleted steps.", "--wait"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete the steps of a run that none of the given rules keeps. Without --yes, only list them.

    The newest step, the newest valid step, pinned steps, targets of links in the run, and steps that cannot be judged
    are always kept. Exits with 4 and deletes nothing while a live process owns the run. Exits with 1 if the newest step
    is damaged or cannot be read.
    """
    directory, pruning = absolute(run), Pruning(_policies(keep_latest, keep_every, keep_best, metric, mode))
    failed, owned_by, is_later = list[str](), None, is_url(directory) and wait is None
    if wait is not None and not (yes and is_url(directory) and 0 <= wait < math.inf):
        raise SettingsError("--wait: expected seconds, with --yes and the URL of a run; on a disk, nothing has to wait")
    if yes:
        with owned_run(BACKEND, directory, pruning, delete_grace_s=DELETE_GRACE_S if wait is None else wait) as owned:
            plan = _plan(directory, pruning, check, as_json)
            owned.retain()  # syncs the kept steps before it deletes others
            if wait is not None:
                _remove_data(owned, wait)
        there = current_names(BACKEND, directory)
        failed = [step.name for step in plan.going if step.name in there]
    else:
        plan = _plan(directory, pruning, check, as_json)
        owner = OwnerLock(BACKEND, directory).owner()
        owned_by = owner.name if owner is not None and owner.is_alive else None
    if as_json:
        document = {"run": directory, "kept_by": list(pruning.policies), "deleted": yes, "bytes": plan.freed_bytes}
        steps = [
            {"step": step.step, "name": step.name, "bytes": step.nbytes, "goes": fate.goes, "why": fate.why}
            for step, fate in plan.steps
        ]
        print_json({**document, "data_stays": yes and is_later, "failed": failed, "owner": owned_by, "steps": steps})
    else:
        _print(plan, yes, failed, owned_by, is_later)
    if failed:
        raise typer.Exit(int(Code.REFUSED))
    if plan.broken:
        raise typer.Exit(int(Code.WRONG))


def _remove_data(owned: RunDirectory, wait_s: float) -> None:
    """Remove the data of deleted steps on an object store, also that of earlier deletions, after a time for readers."""
    owned.held.deleter.look_back()
    owned.held.deleter.wait()  # from here the time runs
    time.sleep(wait_s)
    owned.held.deleter.remove_due()  # ends before the run is released


def _policies(
    latest: int | None, every: int | None, best: int | None, metric: str | None, mode: Literal["min", "max"] | None
) -> dict[str, PreservationPolicy]:
    if best is None and (metric is not None or mode is not None):
        raise SettingsError("--metric and --mode: expected --keep-best N too, found none")
    if best is not None and metric is None:
        raise SettingsError("--keep-best: expected --metric NAME too, which ranks the steps, found none")
    policies: dict[str, PreservationPolicy] = {}
    if latest is not None:
        policies[f"--keep-latest {latest}"] = LatestN(latest)
    if every is not None:
        policies[f"--keep-every {every}"] = EveryNSteps(every)
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


def _print(plan: PrunePlan, yes: bool, failed: list[str], owned_by: str | None, is_later: bool) -> None:
    deleted = "deleted" if yes else "delete"
    rows = []
    for step, fate in plan.steps:
        action = "keep" if not fate.goes else "failed" if step.name in failed else deleted
        rows.append([str(step.step), bytes_text(step.nbytes), action, "; ".join(fate.why)])
    print_columns(["step", "size", "", "why"], rows, [True, True, False, False])
    count, freed = f"{len(plan.going):,} of {len(plan.steps):,} steps", bytes_text(plan.freed_bytes)
    if failed:
        print(f"{len(failed):,} steps could not be deleted; see the warnings. The next process of the run tries again.")
    elif yes and is_later and plan.going:
        print(f"{count} deleted, {freed} to be freed. {_LATER}")
    elif yes:
        print(f"{count} deleted, {freed} freed")
    else:
        print(f"{count} would be deleted, {freed} freed. Nothing is deleted without --yes.")
        if owned_by is not None:
            print_text(f"{owned_by} owns the run: --yes is refused while it is alive")


def verify(path: Checkpoint, step: Step = None, as_json: Json = False) -> None:
    """Read every byte of a checkpoint and compare it with its digests.

    Exits with 1 if the checkpoint or a newer step of its run is damaged, and with 4 if a file cannot be read.
    """
    opened = open_at(BACKEND, absolute(path), step)
    refuse_other_tools(opened)
    with progress("verifying", None, as_json):
        report = verify_opened(BACKEND, opened.committed, opened.settings)
    if not report.ok and _is_removed(opened.path):
        raise StepNotFoundError(f"{opened.location}: was removed while it was being read")
    if as_json:
        document = {
            "path": opened.location,
            "ok": report.ok,
            "bytes": report.checked_bytes,
            "problems": report.problems,
        }
        print_json({**document, "damaged": report.is_damaged, "skipped": opened.skipped})
    else:
        for problem in report.problems:
            print_text(problem)
        total, compared = opened.committed.data_bytes, bytes_text(report.checked_bytes)
        compared += "" if report.checked_bytes == total else f" of {bytes_text(total)}"
        state = "ok" if report.ok else "DAMAGED" if report.is_damaged else "CANNOT BE READ"
        print_text(f"{opened.location}: {state}, {compared} compared")
    if report.is_damaged or (report.ok and opened.skipped):
        raise typer.Exit(int(Code.WRONG))
    if not report.ok:
        raise typer.Exit(int(Code.REFUSED))


def _is_removed(path: str) -> bool:
    """Return whether a checkpoint is gone. On an object store its data may stay for a while."""
    return is_gone(BACKEND, path) if is_url(path) else not file_exists(BACKEND, path)


def scrub(
    run: Run,
    rate: Annotated[float | None, option("The highest read rate. Default: none.", "--mib-per-second", "-r")] = None,
    as_json: Json = False,
) -> None:
    """Read every byte of all steps of a run, the newest first, and compare it with its digests.

    Changes nothing; a run that restores sets damaged steps aside itself. Exits with 1 if a step is damaged, and with 4
    if no step is damaged and one cannot be read.
    """
    if rate is not None and not rate > 0:
        raise SettingsError(f"--mib-per-second: expected a number above 0, found {rate:g}")
    directory = absolute(run)
    statuses = inspect_run(BACKEND, directory)
    if not statuses:
        raise NotACheckpointError(f"{directory}: expected a run, found no steps in it")
    with progress("verifying", sum(each.nbytes or 0 for each in statuses), as_json) as advance:
        pace = _Pace(None if rate is None else rate * MIB, advance)
        found = _scrub(directory, statuses, pace)
    problems = [each for each in found if each["problem"] is not None]
    damaged = sum(each["damaged"] for each in problems)
    if as_json:
        print_json({"run": directory, "steps": found})
    else:
        for each in problems:
            print_text(f"{each['name']}: {each['problem']}")
        unread = f", {len(problems) - damaged} cannot be read" if len(problems) > damaged else ""
        print(f"{len(found)} steps, {damaged} damaged{unread}, {bytes_text(pace.nbytes)} read")
    if problems:
        raise typer.Exit(int(Code.WRONG if damaged else Code.REFUSED))


class _Pace:
    """Counts read bytes, and limits reads to a rate in bytes per second. None: no limit."""

    def __init__(self, rate: float | None, advance: Callable[[int], None]) -> None:
        self._rate, self.advance, self._started = rate, advance, time.monotonic()
        self.nbytes = 0

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._rate is not None:
            time.sleep(max(0.0, self.nbytes / self._rate - (time.monotonic() - self._started)))
        self.advance(nbytes)


def _scrub(directory: str, statuses: list[StepStatus], pace: _Pace) -> list[dict[str, Any]]:
    """Verify each step, the newest first, and drop the results of steps that their owner deletes meanwhile."""
    found, intact = [], IntactFiles()
    for status in reversed(statuses):
        known_bytes = intact.unread_bytes
        problem, is_damaged = status.problem, status.problem is not None and status.refusal is None
        if problem is None:
            try:
                problem = first_damage(BACKEND, f"{directory}/{status.name}", pace, intact)
                is_damaged = problem is not None
            except CheckpointError as error:
                problem, is_damaged = str(error), not is_storage_failure(error)
        pace.advance(intact.unread_bytes - known_bytes)
        if problem is None or status.name in current_names(BACKEND, directory):
            found.append({"name": status.name, "problem": problem, "damaged": is_damaged})
    return found

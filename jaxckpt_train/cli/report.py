"""`jaxckpt report`: one page about a run."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from jaxckpt_train.cli.output import (
    BACKEND,
    Code,
    Json,
    Run,
    absolute,
    bytes_text,
    print_error,
    print_json,
    print_text,
    progress,
    reported_errors,
)
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.inspection.copying import refuse_within_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxckpt_train.report.gather import Gathered

PAGE = "report.html"
Output = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help=f"The page to write; else {PAGE}, with --json none.", show_default=False
    ),
]
ChangePairs = Annotated[
    int | None,
    typer.Option(
        "--changes",
        help="Compare the leaves of the last so many pairs of steps, 0: none; else of a few that are read quickly.",
        min=0,
        show_default=False,
    ),
]
MeasureDisk = Annotated[
    bool,
    typer.Option("--measure-disk", help="Write 256 MiB beside the steps three times: what the disk takes."),
]


def report(
    run: Run, output: Output = None, changes: ChangePairs = None, disk: MeasureDisk = False, as_json: Json = False
) -> None:
    """Write an HTML page about a run: its timeline, where the time went, its steps, metrics and tree.

    The page needs nothing else to be opened, and fetches nothing. Only a report of before is replaced by it. With
    --json the data is printed. Ends with 1 if a step that the run goes on from cannot be restored; the page says which.
    """
    with reported_errors(as_json):
        directory = absolute(run)
        page = absolute(output) if output is not None else None if as_json else absolute(PAGE)
        page_of = _checked_page_of(page) if page is not None else None
        gathered = _gathered(directory, changes, disk, as_json)
        if page is not None and page_of is not None:
            _write(page, page_of(gathered), as_json)
        if as_json:
            _print(gathered)
        if gathered.damaged:
            for step in gathered.damaged if not as_json else ():
                print_error(f"{step.name}: {step.problem}")
            raise typer.Exit(int(Code.WRONG))


def _print(gathered: Gathered) -> None:
    from jaxckpt_train.report.gather import gathered_json

    print_json(gathered_json(gathered))


def _checked_page_of(path: str) -> Callable[[Gathered], str]:
    """What makes a page; that it can be made and written there is seen to before anything that takes long."""
    try:
        from jaxckpt_train.report.page import check_place, page_of
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "bokeh":
            raise
        raise SettingsError(
            "report: a page needs the package bokeh: pip install jaxckpt-train[report]; --json needs nothing more"
        ) from None
    refuse_within_checkpoint(path)
    check_place(BACKEND, path)
    return page_of


def _gathered(directory: str, changes: int | None, disk: bool, as_json: bool) -> Gathered:
    # Here, as no other command needs it.
    from jaxckpt_train.report.changes import plan_changes
    from jaxckpt_train.report.gather import gather, read_run
    from jaxckpt_train.report.series import measure_disk

    now = datetime.datetime.now(datetime.UTC)
    read = read_run(BACKEND, directory, now)
    plan = plan_changes(read.looks, changes)
    rate = measure_disk(BACKEND, directory) if disk else None
    with progress("comparing", plan.bytes, as_json) as advance:
        return gather(BACKEND, read, plan, now, rate, advance)


def _write(path: str, page: str, as_json: bool) -> None:
    from jaxckpt_train.report.page import write_page

    write_page(BACKEND, path, page)
    if not as_json:
        print_text(f"{path}: {bytes_text(len(page.encode()))}")

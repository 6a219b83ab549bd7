"""The command `jaxckpt report`, which writes an HTML page about a run."""

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
        "--output",
        "-o",
        metavar="FILE",
        help=f"The page to write. Default: {PAGE}, or none with --json.",
        show_default=False,
    ),
]
ChangePairs = Annotated[
    int | None,
    typer.Option(
        "--changes",
        help="The number of last pairs of steps whose leaves are compared; 0: none. Default: a few that read quickly.",
        min=0,
        show_default=False,
    ),
]
MeasureDisk = Annotated[
    bool,
    typer.Option("--measure-disk", help="Measure the disk: write 256 MiB next to the steps three times."),
]


def report(
    run: Run, output: Output = None, changes: ChangePairs = None, disk: MeasureDisk = False, as_json: Json = False
) -> None:
    """Write an HTML page about a run: its timeline, where the time went, its steps, metrics and tree.

    The page is self-contained and loads nothing. An existing file is replaced only if it is a report. With --json the
    data is printed. Exits with 1 if a step of the current branch cannot be restored; the page says which.
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
    """Return the function that makes the page, after checking early that bokeh is installed and the file is allowed."""
    try:
        from jaxckpt_train.report.page import check_place, page_of
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "bokeh":
            raise
        raise SettingsError(
            "report: a page needs the package bokeh: pip install 'jaxckpt-train[report]', or use --json without a page"
        ) from None
    refuse_within_checkpoint(path)
    check_place(BACKEND, path)
    return page_of


def _gathered(directory: str, changes: int | None, disk: bool, as_json: bool) -> Gathered:
    # Imported late, because no other command needs these modules.
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

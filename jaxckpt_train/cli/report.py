"""The command `jaxckpt report`, which writes an HTML page about a run."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from jaxckpt_train.cli.output import (
    BACKEND,
    Code,
    Json,
    Run,
    absolute,
    option,
    print_error,
    print_json,
    print_text,
    progress,
)
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.inspection.copying import refuse_within_checkpoint
from jaxckpt_train.inspection.units import bytes_text

PAGE = "report.html"


def report(
    run: Run,
    output: Annotated[
        str | None, option(f"The page. Default: {PAGE}, or none with --json.", "--output", "-o", metavar="FILE")
    ] = None,
    changes: Annotated[
        int | None, option("The number of last pairs of steps to compare. Default: a few that read quickly.", least=0)
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page about a run: its timeline, where the time went, its steps, metrics and tree.

    The page is self-contained and loads nothing. An existing file is replaced only if it is a report. With --json the
    data is printed. Exits with 1 if a step of the current branch cannot be restored; the page says which.
    """
    # Imported late, because no other command needs these modules.
    from jaxckpt_train.report.changes import plan_changes
    from jaxckpt_train.report.gather import gather, gathered_json, read_run

    directory, now = absolute(run), datetime.datetime.now(datetime.UTC)
    page = absolute(output) if output is not None else None if as_json else absolute(PAGE)
    if page is not None:
        _check_page(page)
    read = read_run(BACKEND, directory)
    plan = plan_changes(read.looks, changes)
    with progress("comparing", plan.bytes, as_json) as advance:
        gathered = gather(BACKEND, read, plan, now, advance)
    if page is not None:
        from jaxckpt_train.report.page import page_of, write_page

        text = page_of(gathered)
        write_page(BACKEND, page, text)
        if not as_json:
            print_text(f"{page}: {bytes_text(len(text.encode()))}")
    if as_json:
        print_json(gathered_json(gathered))
    if gathered.damaged:
        for step in gathered.damaged if not as_json else ():
            print_error(f"{step.name}: {step.problem}")
        raise typer.Exit(int(Code.WRONG))


def _check_page(path: str) -> None:
    """Check early that bokeh and jinja2 are installed, and that the file may be written."""
    try:
        from jaxckpt_train.report.page import check_place
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("bokeh", "jinja2"):
            raise
        raise SettingsError(
            f"report: a page needs the package {package}: pip install 'jaxckpt-train[report]', or use --json without a "
            "page"
        ) from None
    refuse_within_checkpoint(path)
    check_place(BACKEND, path)

"""The command `jaxckpt`: its subcommands, each in a module of its own."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from jaxckpt_train.cli.cp import cp
from jaxckpt_train.cli.diff import diff
from jaxckpt_train.cli.doctor import doctor
from jaxckpt_train.cli.exporting import export
from jaxckpt_train.cli.importing import import_
from jaxckpt_train.cli.ls import ls
from jaxckpt_train.cli.mv import mv
from jaxckpt_train.cli.output import flush_output, print_any_text
from jaxckpt_train.cli.pin import pin
from jaxckpt_train.cli.prune import prune
from jaxckpt_train.cli.report import report
from jaxckpt_train.cli.show import show
from jaxckpt_train.cli.stats import stats
from jaxckpt_train.cli.verify import scrub, verify


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(importlib.metadata.version("jaxckpt-train"))
        raise typer.Exit


def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Look at runs and checkpoints, verify them, move them, and change them into other formats and back."""


app = typer.Typer(
    name="jaxckpt",
    callback=_before,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (ls, show, stats, diff, verify, scrub, prune, pin, cp, mv, report, doctor):
    app.command()(command)
app.command("export")(export)
app.command("import")(import_)


def main() -> None:
    """Run it."""
    print_any_text()
    try:
        app()
    finally:
        flush_output()

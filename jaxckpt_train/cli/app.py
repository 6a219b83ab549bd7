"""The command `jaxckpt`: its subcommands, each in a module of its own."""

from __future__ import annotations

import typer

from jaxckpt_train.cli.diff import diff
from jaxckpt_train.cli.ls import ls
from jaxckpt_train.cli.report import report
from jaxckpt_train.cli.show import show
from jaxckpt_train.cli.stats import stats
from jaxckpt_train.cli.verify import scrub, verify

app = typer.Typer(
    name="jaxckpt",
    help="Look at runs and checkpoints, verify them, move them, and change them into other formats and back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (ls, show, stats, diff, verify, scrub, report):
    app.command()(command)


def main() -> None:
    """Run it."""
    app()

"""The command `jaxckpt`: its subcommands, each in a module of its own that is imported when it is asked for."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jaxckpt_train.cli.output import Code, print_json
from jaxckpt_train.cli.streams import standard_streams

COMMANDS = {
    "ls": "ls:ls",
    "show": "show:show",
    "stats": "stats:stats",
    "diff": "diff:diff",
    "verify": "verify:verify",
    "scrub": "verify:scrub",
    "prune": "prune:prune",
    "pin": "pin:pin",
    "cp": "cp:cp",
    "mv": "mv:mv",
    "report": "report:report",
    "doctor": "doctor:doctor",
    "export": "exporting:export",
    "import": "importing:import_",
}
"""Where each is: module of this package, and function."""


_WANTS_JSON = "jaxckpt_train.json"
_UsageError: Any = typer.BadParameter.__base__  # of typer itself or of click, by the version of typer


@contextlib.contextmanager
def _told_misuse(ctx: Any) -> Iterator[None]:
    """Within: who wants JSON is told so of a wrong call, too."""
    try:
        yield
    except _UsageError as error:
        if not ctx.meta[_WANTS_JSON]:
            raise
        message = error.format_message()
        print_json({"error": "UsageError", "message": message, "notes": [], "exit_code": int(Code.USAGE)})
        raise typer.Exit(int(Code.USAGE)) from None


class _OnDemand(TyperGroup):
    """Commands that are imported one by one: all of them together take as long as Python and numpy do."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(cmd_name, context_settings=_HELP)(
            getattr(importlib.import_module(f"jaxckpt_train.cli.{module}"), function)
        )
        return typer.main.get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta[_WANTS_JSON] = "--json" in itertools.takewhile(lambda each: each != "--", args)
        with _told_misuse(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _told_misuse(ctx):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:  # one that is nearly that is suggested
            self.commands.update({name: self.get_command(ctx, name) for name in COMMANDS})
        return super().resolve_command(ctx, args)


_HELP = {"help_option_names": ["-h", "--help"]}


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        import importlib.metadata

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
    cls=_OnDemand,
    callback=_before,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)


def main() -> None:
    """Run it."""
    gc.set_threshold(100_000)  # what is imported stays: to look through it again and again takes a tenth of a start
    with standard_streams():
        app()

"""The command `jaxckpt`: its subcommands, each in a module of its own that is imported when it is asked for."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import keyword
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from jaxckpt_train.cli.output import Code, print_json
from jaxckpt_train.cli.plain_parameters import PlainCommand, PlainGroup
from jaxckpt_train.cli.streams import standard_streams

COMMANDS = {
    "ls": "List the steps of a run: size, age, metrics, and what keeps a step from being restored.",
    "show": "Show a checkpoint: leaf paths, shapes, dtypes, shardings, sizes, and JSON items. Reads no arrays.",
    "stats": "Tell minimum, maximum, mean, norm and a histogram of arrays, and how many values are not finite.",
    "diff": "Compare two checkpoints: structure and every value, bit by bit. Equal leaves are folded into one line.",
    "verify": "Read every byte of a checkpoint and compare it with its digests.",
    "scrub": "Read every byte of all steps of a run, the newest first, and compare it with its digests.",
    "prune": "Let steps of a run go that none of the given rules keeps. Only tells which, unless --yes is given.",
    "pin": "Pin a step: no policy, and no `jaxckpt prune`, deletes it. With --off it may go again.",
    "cp": "Copy a checkpoint, or one step of a run, and verify it.",
    "mv": "Move a checkpoint, or one step of a run: copy it as `jaxckpt cp --check` does, then remove the source.",
    "report": "Make one HTML page about a run: what happened when, where the time went, its steps, metrics and tree.",
    "doctor": "Look at a run and its disk: versions, room, speed, owner, damaged steps, and what a crash would cost.",
    "export": "Write the tree of a checkpoint for another tool: safetensors files, or a step that Orbax restores.",
    "import": "Make a checkpoint of what Orbax, PyTorch, safetensors or Flax have written; operations may change it.",
    "average": "Make a checkpoint whose parameters are the mean of those of the last steps of a run.",
}
"""What the help says of each: told here, as to import all of them takes longer than to tell it."""
_ELSEWHERE = {"scrub": "verify", "export": "exporting", "import": "importing"}  # modules of another name
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


class _OnDemand(PlainGroup):
    """Commands that are imported one by one: all of them together take as long as Python and numpy do."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._is_telling = False  # of all of them, none of which is called

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self._is_telling:
            return PlainCommand(cmd_name, help=COMMANDS[cmd_name])
        module = _ELSEWHERE.get(cmd_name, cmd_name)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        imported = importlib.import_module(f"jaxckpt_train.cli.{module}")
        function = getattr(imported, f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name)
        single.command(cmd_name, cls=PlainCommand, context_settings=_HELP)(function)
        return typer.main.get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta[_WANTS_JSON] = "--json" in itertools.takewhile(lambda each: each != "--", args)
        with _told_misuse(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _told_misuse(ctx):
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._telling():
            super().format_help(ctx, formatter)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Within: commands have a name and a help."""
        self._is_telling = True
        try:
            yield
        finally:
            self._is_telling = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:  # one that is nearly that is suggested
            with self._telling():
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

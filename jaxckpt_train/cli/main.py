"""The command `jaxckpt` and its subcommands, whose modules are imported when a subcommand is called."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from jaxckpt_train.cli.output import Code, code_of, print_error, print_json, standard_streams
from jaxckpt_train.errors import CheckpointError

_MODULES = {
    "inspect": ("ls", "show", "stats", "diff", "report"),
    "maintain": ("verify", "scrub", "prune", "pin", "cp", "mv"),
    "convert": ("export", "import"),
    "doctor": ("doctor",),
}
_WANTS_JSON = "jaxckpt_train.json"
_UsageError: Any = typer.BadParameter.__base__  # typer's own class or click's, depending on the version
_HELP = {"help_option_names": ["-h", "--help"]}


COMMANDS = {
    "ls": "List the steps of a run: size, age, metrics, and visible damage. Reads no arrays.",
    "show": "Show a checkpoint: leaf paths, shapes, dtypes, shardings, sizes, and JSON items. Reads no arrays.",
    "stats": "Print minimum, maximum, mean, norm and a histogram of arrays, and count the values that are not finite.",
    "diff": "Compare two checkpoints: structure and every value, bit by bit. Equal leaves are folded into one line.",
    "verify": "Read every byte of a checkpoint and compare it with its digests.",
    "scrub": "Read every byte of all steps of a run, the newest first, and compare it with its digests.",
    "prune": "Delete the steps of a run that none of the given rules keeps. Without --yes, only list them.",
    "pin": "Pin a step, so that no policy and no `jaxckpt prune` deletes it. --off removes the pin.",
    "cp": "Copy a checkpoint, or one step of a run, and verify it.",
    "mv": "Move a checkpoint, or one step of a run: copy it like `jaxckpt cp --check`, then remove the source.",
    "report": "Write an HTML page about a run: its timeline, where the time went, its steps, metrics and tree.",
    "doctor": "Examine a run and its disk: versions, free space, speed, owner, damaged steps, and the cost of a crash.",
    "export": "Write the tree of a checkpoint for another tool: as safetensors files, or as a step for Orbax.",
    "import": "Convert a checkpoint of Orbax, PyTorch, safetensors or Flax, and transform its tree if asked to.",
}
"""The help text of each command. It is here because importing every command would slow down `jaxckpt --help`."""


class _OnDemand(TyperGroup):
    """Imports the module of a command when the command is called, and reports errors.

    Importing all modules takes as long as importing NumPy.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lists_help = False  # whether only names and help texts are needed

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self._lists_help:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name])
        module = next(module for module, commands in _MODULES.items() if cmd_name in commands)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        imported = importlib.import_module(f"jaxckpt_train.cli.{module}")
        function = getattr(imported, "import_" if cmd_name == "import" else cmd_name)
        single.command(cmd_name, context_settings=_HELP)(function)
        return typer.main.get_command(single)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta[_WANTS_JSON] = "--json" in itertools.takewhile(lambda each: each != "--", args)
        with self._reporting(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with self._reporting(ctx):
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _reporting(self, ctx: Any) -> Iterator[None]:
        """Print errors of this package, and usage errors if JSON is wanted, and exit with the code of the error."""
        as_json = ctx.meta[_WANTS_JSON]
        try:
            yield
            return
        except CheckpointError as error:
            name, code, message, notes = (
                type(error).__name__,
                code_of(error),
                str(error),
                getattr(error, "__notes__", []),
            )
        except _UsageError as error:
            if not as_json:
                raise
            name, message, notes = "UsageError", error.format_message(), list[str]()
            code = Code.USAGE
        if as_json:
            print_json({"error": name, "message": message, "notes": notes, "exit_code": int(code)})
        else:
            print_error(message, *notes)
        raise typer.Exit(int(code))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._lists_help = True
        super().format_help(ctx, formatter)


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
    """Inspect, verify, copy, move, prune and convert checkpoints and runs."""


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
    """Run the command."""
    with standard_streams():
        app()

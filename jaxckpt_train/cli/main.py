"""The command `jaxckpt`: its subcommands, each in a module of its own that is imported when it is asked for.

Has typer hand on what needs no conversion: for any other it imports pydantic, a fifth of a command's start.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import keyword
import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from jaxckpt_train.cli.output import Code, print_json, standard_streams

_PLAIN = (str, int, float)
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")  # in other forms they are left to typer, as is what is no number
_MODULES = {
    "inspect": ("ls", "show", "stats", "diff"),
    "maintain": ("verify", "scrub", "prune", "pin", "cp", "mv"),
    "convert": ("export", "import", "average"),
    "report": ("report",),
    "doctor": ("doctor",),
}
_MODULE_OF = {command: module for module, commands in _MODULES.items() for command in commands}
_WANTS_JSON = "jaxckpt_train.json"
_UsageError: Any = typer.BadParameter.__base__  # of typer itself or of click, by the version of typer
_HELP = {"help_option_names": ["-h", "--help"]}


class PlainCommand(TyperCommand):
    """A command that has only those values converted that are not of the types of their parameters already.

    Text is, and so are defaults, and what is not given; a whole number takes no library either. A typer that converts
    in another way than from 0.29 on is left alone; it imports no pydantic.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """As click's."""
        return [_taken(each) for each in super().get_params(ctx)]


class PlainGroup(TyperGroup):
    """As `PlainCommand`, of a group."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As click's."""
        return [_taken(each) for each in super().get_params(ctx)]


class _Conversion:
    """What converts the values of a parameter."""

    def __init__(self, parameter: Any) -> None:
        self._annotation, self._get_other = parameter.type_descriptor.annotation, parameter.get_runtime_param
        self._least, self._most = (getattr(parameter.type_descriptor.parameter_info, each) for each in ("min", "max"))
        self._is_several = bool(parameter.multiple) or parameter.nargs == -1

    def coerce(self, value: Any, **context: Any) -> Any:
        """As typer's: the value as the parameter has it."""
        if value is None:
            return () if self._is_several else None
        if self._annotation in _PLAIN and type(value) is self._annotation:
            return value
        if self._annotation == list[str] and isinstance(value, list | tuple) and all(type(e) is str for e in value):
            return [*value]
        if self._annotation is int and isinstance(value, str) and _WHOLE.fullmatch(value) and self._allows(int(value)):
            return int(value)
        return self._get_other().coerce(value, **context)

    def _allows(self, number: int) -> bool:
        return (self._least is None or number >= self._least) and (self._most is None or number <= self._most)


def _taken(parameter: Any) -> Any:
    is_known = hasattr(parameter, "get_runtime_param") and hasattr(parameter, "type_descriptor")
    if is_known and "get_runtime_param" not in vars(parameter):
        conversion = _Conversion(parameter)
        parameter.get_runtime_param = lambda: conversion
    return parameter


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
        module = _MODULE_OF[cmd_name]
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

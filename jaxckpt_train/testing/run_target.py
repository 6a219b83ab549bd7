"""What a proof runs: a function that a fresh process finds by its file and name, or a script with arguments."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import operator
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec

from jaxckpt_train.errors import SettingsError

DIRECTORY = "{directory}"
"""What stands in the arguments of a script for the directory of the run."""
_INTERPRETERS = ("python", "python3")
_PLAIN = "None, bool, int, float, str, and lists and dicts of these"

MakeRun = Callable[..., object] | Sequence[str]


class FunctionTarget(msgspec.Struct, frozen=True, tag="function"):
    """A function at the top of a module, and the arguments that follow the directory."""

    file: str
    module: str
    name: str
    arguments: dict[str, Any]


class ScriptTarget(msgspec.Struct, frozen=True, tag="script"):
    """What follows `python` on a command line."""

    command: tuple[str, ...]


Target = FunctionTarget | ScriptTarget


def target_of(make_run: MakeRun) -> Target:
    """What to run.

    Raises:
        SettingsError: a fresh process could not find it, or would not know where to save.
    """
    if callable(make_run):
        return _function_target(make_run)
    if isinstance(make_run, str) or not isinstance(make_run, Sequence):
        _refuse("a function or a list of text", repr(make_run))
    if not make_run or not all(isinstance(word, str) for word in make_run):
        _refuse("a script and its arguments, all of them text", repr(make_run))
    return _script_target(list(make_run))


def _refuse(expected: str, found: str) -> NoReturn:
    raise SettingsError(f"resume proof: make_run: expected {expected}; found {found}")


def _function_target(make_run: Callable[..., object]) -> FunctionTarget:
    arguments: dict[str, Any] = {}
    function: Any = make_run
    if isinstance(make_run, functools.partial):
        if make_run.args:
            _refuse("a partial function with arguments by name only", f"positional ones, {make_run.args!r}")
        function, arguments = make_run.func, dict(make_run.keywords)
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    wanted = "a function at the top of a module that is a file: a fresh process must find it"
    if module is None or file is None or not name.replace(".", "").isidentifier():
        _refuse(
            wanted, f"{make_run!r}; define it there, and give what it needs by functools.partial(function, name=value)"
        )
    try:
        is_there = operator.attrgetter(name)(module) is function
    except AttributeError:
        is_there = False
    if not is_there:
        _refuse(wanted, f"{make_run!r}, and {module.__name__}.{name} is not it (is it decorated?)")
    _check_arguments(function, arguments)
    return FunctionTarget(os.path.abspath(file), _module_name(module), name, arguments)


def _module_name(module: ModuleType) -> str:
    """Its name; that of a script that was started by `python -m` is known from there."""
    spec = getattr(module, "__spec__", None)
    return spec.name if module.__name__ == "__main__" and spec is not None else module.__name__


def _check_arguments(function: Callable[..., object], arguments: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind("directory", **arguments)
    except TypeError as error:
        _refuse(
            "a function that can be called with a directory" + (" and its arguments" if arguments else ""), str(error)
        )
    try:
        same = msgspec.json.decode(msgspec.json.encode(arguments)) == arguments
    except (TypeError, ValueError) as error:
        _refuse(f"arguments that another process can be given ({_PLAIN})", str(error))
    if not same:
        _refuse(f"arguments that another process can be given ({_PLAIN})", repr(arguments))


def _script_target(command: list[str]) -> ScriptTarget:
    if command[0] == sys.executable or command[0] in _INTERPRETERS:
        del command[0]
    if command[:1] == ["-m"]:
        if len(command) < 2:
            _refuse("the name of a module after -m", "nothing")
    elif not command or not Path(command[0]).is_file():
        _refuse("a Python script, or -m and a module", f"{command[:1]!r}, which is no file in {Path.cwd()}")
    if not any(DIRECTORY in word for word in command):
        _refuse(f'"{DIRECTORY}" in one of the arguments: there the run must save', repr(command))
    return ScriptTarget(tuple(command))


def run(target: Target, directory: Path) -> None:
    """Run it in this process."""
    if isinstance(target, FunctionTarget):
        function = operator.attrgetter(target.name)(_module_of(target))
        sys.argv = [target.file]
        function(directory, **target.arguments)
        return
    command = [word.replace(DIRECTORY, str(directory)) for word in target.command]
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


def _module_of(target: FunctionTarget) -> ModuleType:
    """The module by its name, if that leads to its file; else of its file, as pytest imports test files."""
    is_main = target.module == "__main__"
    if not is_main and (origin := _origin(target.module)) is not None and os.path.samefile(origin, target.file):
        return importlib.import_module(target.module)
    name = "__mp_main__" if is_main else target.module  # multiprocessing's name for it, too
    spec = importlib.util.spec_from_file_location(name, target.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _origin(module: str) -> str | None:
    """The file that is imported by a name."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return None if spec is None or not spec.has_location else spec.origin

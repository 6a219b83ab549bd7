"""Processes of a proof: started anew with this one's import path, waited for, and ended with all that they started.

The files of one watched process: its plan, its log, its records, and the values of its leaves.

What a proof runs: a function that a fresh process finds by its file and name, or a script with arguments.

What is recorded of a run that is watched: what it went on from, and each of its updates, in digests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import operator
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

import msgspec

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.store.files import digest_function

SMALL_BYTES = 64
OBJECT = "object "  # how the kind begins of what only has a type that can be compared
DIRECTORY = "{directory}"
"""What stands in the arguments of a script for the directory of the run."""
_INTERPRETERS = ("python", "python3")
_PLAIN = "None, bool, int, float, str, and lists and dicts of these"
MakeRun = Callable[..., object] | Sequence[str]
How = Literal["kill", "preempt", "raise"]
MOST_VALUE_BYTES = 256 << 20
"""So much of the values one process keeps before the update from which on they are wanted, and again from there."""
LOG_LINES = 30
# The path comes first: a fresh process imports this package, and the user's modules, from where this one does.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from jaxckpt_train.testing.recorder import main
main(sys.argv.pop())
"""


class Leaf(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One array or value.

    Attributes:
        kind: its dtype; "key<...>" of a PRNG key, "python float" and the like of a Python value.
        shape: of an array, or of the data of keys.
        digest: of its bytes.
        content: its bytes, if there are few.
        at: where they begin in the file of values; -1: they are not there.
    """

    kind: str
    shape: tuple[int, ...]
    digest: str
    content: bytes = b""
    at: int = -1

    def same(self, other: Leaf) -> bool:
        """Whether dtype, shape and bytes are equal."""
        return (self.kind, self.shape, self.digest) == (other.kind, other.shape, other.digest)

    def form(self) -> str:
        """Dtype and shape as text."""
        is_value = self.kind.startswith("python") or self.kind in ("none", "empty")
        return self.kind if is_value else f"{self.kind}[{','.join(map(str, self.shape))}]"


Leaves = dict[str, Leaf]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One element that the loop took from its data.

    Attributes:
        digest: of all of it.
        leaves: its arrays by path.
        rows: digests of its examples, if its arrays have as many rows each.
    """

    digest: str
    leaves: Leaves
    rows: tuple[str, ...] = ()

    def unseen(self) -> str | None:
        """What is in it of which only the type can be compared; None: nothing."""
        kinds = (f"{name}, an {leaf.kind}" for name, leaf in self.leaves.items() if leaf.kind.startswith(OBJECT))
        return next(kinds, None)


class Resumed(msgspec.Struct, frozen=True, tag="resumed", tag_field="line"):
    """What a run goes on from.

    Attributes:
        step: that was restored; None: it begins anew.
        directory: where it saves.
        names: of what the loop gave to `resume`.
        leaves: of all of it but the data, as the loop gets them.
        host: digests of the states of the random generators of Python and numpy that are global, by name.
    """

    step: int | None
    directory: str
    names: tuple[str, ...]
    leaves: Leaves
    host: dict[str, str]


class Update(msgspec.Struct, frozen=True, tag="update", tag_field="line"):
    """One completed update.

    Attributes:
        step: its label.
        batches: what was taken from the data since the update before.
        elsewhere: how many more were taken on other threads than that of the loop, which belong to no update.
        metrics, leaves: what the loop told of it, as in Resumed.
        host: as in Resumed.
    """

    step: int
    batches: tuple[Batch, ...]
    elsewhere: int
    metrics: Leaves
    leaves: Leaves
    host: dict[str, str]


class Between(msgspec.Struct, frozen=True, tag="between", tag_field="line"):
    """What happens after `ckpt(...)` of an update and before the next update, if anything is seen there.

    Attributes:
        step: the label of the update.
        polled: whether `ckpt.poll()` is called there, as in an evaluation.
        changed: names of the leaves that change in place there. A save of this update does not have the change.
    """

    step: int
    polled: bool
    changed: tuple[str, ...]


class Stopped(msgspec.Struct, frozen=True, tag="stopped", tag_field="line"):
    """The run is interrupted in this update."""

    step: int


Line = Resumed | Update | Between | Stopped


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


class Plan(msgspec.Struct, frozen=True):
    """What one process does.

    Attributes:
        target: what it runs.
        directory: what that is given, in which it saves.
        stop_at: the update in which it is interrupted; None: it is not.
        how: it is interrupted.
        values_from: the update from which on the values of leaves are wanted most; None: the first.
        timeout_s: it must have ended by then.
        ends_at: when that is, by `time.monotonic`, which is one clock for all processes of a machine.
        saves_first: whether the update in which it is interrupted is saved before, whatever the policy says.
    """

    target: FunctionTarget | ScriptTarget
    directory: str
    stop_at: int | None
    how: How
    values_from: int | None
    timeout_s: float
    ends_at: float
    saves_first: bool = False


@dataclasses.dataclass(frozen=True)
class ProcessFiles:
    """Where the files of one process lie."""

    folder: Path

    @property
    def log(self) -> Path:
        """What the process printed."""
        return self.folder / "log.txt"

    def write_plan(self, plan: Plan) -> Path:
        """Make the folder, and the directory of the run, and write the plan; returns its file."""
        self.folder.mkdir(parents=True)
        Path(plan.directory).mkdir(exist_ok=True)
        file = self.folder / "plan.json"
        file.write_bytes(msgspec.json.encode(plan))
        return file

    @classmethod
    def of_plan(cls, file: Path) -> tuple[ProcessFiles, Plan]:
        """The files of the process with this plan, and the plan."""
        return cls(file.parent), msgspec.json.decode(file.read_bytes(), type=Plan)

    def lines(self) -> list[Line]:
        """All records; a last one that is not whole, as a kill leaves it, is left out."""
        file = self.folder / "records.jsonl"
        whole = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        decoder = msgspec.json.Decoder(Line)
        return [decoder.decode(line) for line in whole]

    def value(self, leaf: Leaf, nbytes: int) -> bytes | None:
        """The bytes of a leaf; None: they were not kept."""
        if len(leaf.content) == nbytes:
            return leaf.content
        if leaf.at < 0:
            return None
        with open(self.folder / "values.bin", "rb") as file:
            file.seek(leaf.at)
            return file.read(nbytes)

    def log_tail(self) -> str:
        """The last lines that the process printed."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = text.splitlines()[-LOG_LINES:]
        return "\n".join(f"  | {line}" for line in lines) or "  | (nothing)"


class RecordWriter:
    """Writes the records of this process; what is written is there whatever ends it."""

    def __init__(self, files: ProcessFiles) -> None:
        self._records = open(files.folder / "records.jsonl", "ab", buffering=0)  # noqa: SIM115 - as long as the process
        self._values = open(files.folder / "values.bin", "ab", buffering=0)  # noqa: SIM115
        self._kept: dict[str, int] = {}
        self._end, self._left = 0, MOST_VALUE_BYTES

    def values_are_wanted(self) -> None:
        """From now on values are kept up to the limit, whatever was kept before."""
        self._left = MOST_VALUE_BYTES

    def keep(self, leaf: Leaf, data: Callable[[], bytes], nbytes: int) -> Leaf:
        """The leaf with its bytes in the file of values, as long as there is room for them."""
        at = self._kept.get(leaf.digest)
        if at is None:
            if nbytes > self._left:
                return leaf
            at = self._kept[leaf.digest] = self._end
            self._values.write(data())
            self._end, self._left = self._end + nbytes, self._left - nbytes
        return msgspec.structs.replace(leaf, at=at)

    def add(self, line: Line) -> None:
        """Write one record."""
        self._records.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Close the files."""
        self._records.close()
        self._values.close()


def digests_of_files(write: Callable[[Path], None]) -> dict[str, bytes]:
    """The digests of what `write` leaves in a directory, by path below it."""
    digest = digest_function("sha256")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): digest(file.read_bytes()).encode() for file in files}


def new_directory(directory: Path | None) -> Path:
    """The directory of a proof: a new temporary one, or the one that is named, made if it is not there.

    Raises:
        SettingsError: there is something in it.
    """
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="resume-proof-"))
    made = Path(directory).absolute()
    made.mkdir(parents=True, exist_ok=True)
    if any(made.iterdir()):
        raise SettingsError(f"resume proof: directory: expected a new or empty one, found files in {made}")
    return made


def remove(directory: Path) -> None:
    """Remove what the runs have left."""
    shutil.rmtree(directory)


def is_below(path: str, directory: str) -> bool:
    """Whether a path is that of a directory, or of something in it."""
    return Path(path).resolve().is_relative_to(Path(directory).resolve())


def run_child(plan: Path, log: Path, timeout_s: float) -> int | None:
    """Run a plan in a process of its own.

    Args:
        plan: the file of the plan.
        log: the file for what it prints.
        timeout_s: when it is ended.

    Returns:
        Its exit code, below 0 for the signal that has killed it; None: it had to be ended.
    """
    command = [sys.executable, "-u", "-c", _PROGRAM, str(plan), json.dumps(sys.path)]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    # It is not reaped until all is over, so that its number stays that of its session. What it has started, such as
    # workers of a data loader, is in that session, and would outlive a kill.
    waiter = threading.Thread(target=_wait_for, args=[process], name="resume-proof-wait", daemon=True)
    waiter.start()
    has_ended = False
    try:
        waiter.join(timeout_s)
        has_ended = not waiter.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        waiter.join()
        process.wait()
    return process.returncode if has_ended else None


def _wait_for(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end, and leave it to be reaped; on macOS, where Python before 3.13 cannot do that, reap it."""
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()

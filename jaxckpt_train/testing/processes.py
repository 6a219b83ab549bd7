"""The processes of a resume proof: what they run, the records that they write, and how they are started.

The proof starts each process with a plan file. The process runs the training loop under the recorder, which writes
records with digests of each update. The proof reads them after the process has ended. This module does not import JAX.
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
OBJECT = "object "  # prefix of the kind of a leaf of which only the type can be compared
DIRECTORY = "{directory}"
"""The placeholder for the directory of the run in the arguments of a script."""
_INTERPRETERS = ("python", "python3")
_PLAIN = "None, bool, int, float, str, and lists and dicts of these"
MakeRun = Callable[..., object] | Sequence[str]
How = Literal["kill", "preempt", "raise"]
MOST_VALUE_BYTES = 256 << 20
"""The limit of the values that one process keeps before the update `Plan.values_from`, and again from there on."""
LOG_LINES = 30
# Set the path first: the new process must import this package and the user's modules from the same places.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from jaxckpt_train.testing.recorder import main
main(sys.argv.pop())
"""


class Leaf(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One recorded array or value.

    Attributes:
        kind: the dtype; "key<...>" for a PRNG key; "python float" and so on for a Python value.
        shape: the shape of an array, or of the data of keys.
        digest: the digest of the bytes.
        content: the bytes, if there are at most `SMALL_BYTES`.
        at: the offset of the bytes in the file of values; -1: they are not stored there.
    """

    kind: str
    shape: tuple[int, ...]
    digest: str
    content: bytes = b""
    at: int = -1

    def same(self, other: Leaf) -> bool:
        """Return whether dtype, shape and bytes are equal."""
        return (self.kind, self.shape, self.digest) == (other.kind, other.shape, other.digest)

    def form(self) -> str:
        """Return dtype and shape as text."""
        is_value = self.kind.startswith("python") or self.kind in ("none", "empty")
        return self.kind if is_value else f"{self.kind}[{','.join(map(str, self.shape))}]"


Leaves = dict[str, Leaf]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One element that the loop took from its data.

    Attributes:
        digest: the digest of the whole element.
        leaves: the arrays by path.
        rows: the digests of the examples, if all arrays have the same number of rows.
    """

    digest: str
    leaves: Leaves
    rows: tuple[str, ...] = ()

    def opaque_leaf(self) -> str | None:
        """Return the first leaf of which only the type can be compared, as text, or None."""
        kinds = (f"{name}, an {leaf.kind}" for name, leaf in self.leaves.items() if leaf.kind.startswith(OBJECT))
        return next(kinds, None)


class Resumed(msgspec.Struct, frozen=True, tag="resumed", tag_field="line"):
    """The record of a call of `resume`.

    Attributes:
        step: the restored step; None: the run starts from the beginning.
        directory: the directory in which the run saves.
        names: the names of the values that the loop passed to `resume`.
        leaves: the leaves of what `resume` returns, except the data.
        host: digests of the states of the global random generators of Python and NumPy, by name.
    """

    step: int | None
    directory: str
    names: tuple[str, ...]
    leaves: Leaves
    host: dict[str, str]


class Update(msgspec.Struct, frozen=True, tag="update", tag_field="line"):
    """The record of one completed update.

    Attributes:
        step: the label of the update.
        batches: the batches taken from the data since the previous update.
        elsewhere: the number of batches taken on other threads, which cannot be assigned to an update.
        metrics, leaves: what the loop passed to `ckpt(...)`.
        host: see `Resumed`.
    """

    step: int
    batches: tuple[Batch, ...]
    elsewhere: int
    metrics: Leaves
    leaves: Leaves
    host: dict[str, str]


class Between(msgspec.Struct, frozen=True, tag="between", tag_field="line"):
    """The record of what was observed between `ckpt(...)` of an update and the next update.

    Attributes:
        step: the label of the update.
        polled: whether `ckpt.poll()` was called, as in an evaluation.
        changed: the names of the leaves that changed in place. A save of this update does not contain the change.
    """

    step: int
    polled: bool
    changed: tuple[str, ...]


class Stopped(msgspec.Struct, frozen=True, tag="stopped", tag_field="line"):
    """The record of the interruption in an update."""

    step: int


Line = Resumed | Update | Between | Stopped


class FunctionTarget(msgspec.Struct, frozen=True, tag="function"):
    """A function at the top level of a module, and the arguments that follow the directory."""

    file: str
    module: str
    name: str
    arguments: dict[str, Any]


class ScriptTarget(msgspec.Struct, frozen=True, tag="script"):
    """A script: the words that follow `python` on a command line."""

    command: tuple[str, ...]


Target = FunctionTarget | ScriptTarget


def target_of(make_run: MakeRun) -> Target:
    """Convert a function or a command to a target that a new process can run.

    Raises:
        SettingsError: a new process could not find the target, or would not know where to save.
    """
    if callable(make_run):
        return _function_target(make_run)
    if isinstance(make_run, str) or not isinstance(make_run, Sequence):
        _refuse("a function or a list of strings", repr(make_run))
    if not make_run or not all(isinstance(word, str) for word in make_run):
        _refuse("a script and its arguments, all of them strings", repr(make_run))
    return _script_target(list(make_run))


def _refuse(expected: str, found: str) -> NoReturn:
    raise SettingsError(f"resume proof: make_run: expected {expected}, found {found}")


def _function_target(make_run: Callable[..., object]) -> FunctionTarget:
    arguments: dict[str, Any] = {}
    function: Any = make_run
    if isinstance(make_run, functools.partial):
        if make_run.args:
            _refuse("a partial function with keyword arguments only", f"positional arguments {make_run.args!r}")
        function, arguments = make_run.func, dict(make_run.keywords)
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    expected = "a function at the top level of a module file, so that a new process can import it"
    if module is None or file is None or not name.replace(".", "").isidentifier():
        _refuse(
            expected,
            f"{make_run!r}: define it at the top level, and pass arguments by functools.partial(function, name=value)",
        )
    try:
        is_importable = operator.attrgetter(name)(module) is function
    except AttributeError:
        is_importable = False
    if not is_importable:
        _refuse(expected, f"{make_run!r}, but {module.__name__}.{name} is another object (is the function decorated?)")
    _check_arguments(function, arguments)
    return FunctionTarget(os.path.abspath(file), _module_name(module), name, arguments)


def _module_name(module: ModuleType) -> str:
    """Return the name of a module, or the name after `python -m` if it runs as a script."""
    spec = getattr(module, "__spec__", None)
    return spec.name if module.__name__ == "__main__" and spec is not None else module.__name__


def _check_arguments(function: Callable[..., object], arguments: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind("directory", **arguments)
    except TypeError as error:
        _refuse("a function that accepts a directory" + (" and the given arguments" if arguments else ""), str(error))
    try:
        same = msgspec.json.decode(msgspec.json.encode(arguments)) == arguments
    except (TypeError, ValueError) as error:
        _refuse(f"arguments that can be passed to another process ({_PLAIN})", str(error))
    if not same:
        _refuse(f"arguments that can be passed to another process ({_PLAIN})", repr(arguments))


def _script_target(command: list[str]) -> ScriptTarget:
    if command[0] == sys.executable or command[0] in _INTERPRETERS:
        del command[0]
    if command[:1] == ["-m"]:
        if len(command) < 2:
            _refuse("the name of a module after -m", "nothing")
    elif not command or not Path(command[0]).is_file():
        _refuse("a Python script, or -m and a module", f"{command[:1]!r}, which is not a file in {Path.cwd()}")
    if not any(DIRECTORY in word for word in command):
        _refuse(f'"{DIRECTORY}", the directory to save in, in one of the arguments', repr(command))
    return ScriptTarget(tuple(command))


def run(target: Target, directory: Path) -> None:
    """Run a target in this process."""
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
    """Import the module by name if this finds its file, else from its file, as pytest imports test files."""
    is_main = target.module == "__main__"
    if not is_main and (origin := _origin(target.module)) is not None and os.path.samefile(origin, target.file):
        return importlib.import_module(target.module)
    name = "__mp_main__" if is_main else target.module  # the name that multiprocessing uses
    spec = importlib.util.spec_from_file_location(name, target.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _origin(module: str) -> str | None:
    """Return the file that the import of a module name would load."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return None if spec is None or not spec.has_location else spec.origin


class Plan(msgspec.Struct, frozen=True):
    """What one process does.

    Attributes:
        target: the target to run.
        directory: the directory to pass to the target, in which it saves.
        stop_at: the update in which to interrupt the run; None: do not interrupt it.
        how: how to interrupt the run.
        values_from: the update from which on the values of leaves are needed most; None: the first.
        timeout_s: the time limit of the process.
        ends_at: the deadline by `time.monotonic`, a clock that all processes of a machine share.
        saves_first: whether to save the update `stop_at` before the interruption, whatever the policy says.
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
    """The files of one process: its plan, log, records and values of leaves."""

    folder: Path

    @property
    def log(self) -> Path:
        """The file with the output of the process."""
        return self.folder / "log.txt"

    def write_plan(self, plan: Plan) -> Path:
        """Create the folder and the directory of the run, write the plan, and return its path."""
        self.folder.mkdir(parents=True)
        Path(plan.directory).mkdir(exist_ok=True)
        file = self.folder / "plan.json"
        file.write_bytes(msgspec.json.encode(plan))
        return file

    @classmethod
    def of_plan(cls, file: Path) -> tuple[ProcessFiles, Plan]:
        """Return the files of the process with a plan file, and the plan."""
        return cls(file.parent), msgspec.json.decode(file.read_bytes(), type=Plan)

    def lines(self) -> list[Line]:
        """Return all records, without a last one that a kill has left incomplete."""
        file = self.folder / "records.jsonl"
        complete = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        decoder = msgspec.json.Decoder(Line)
        return [decoder.decode(line) for line in complete]

    def value(self, leaf: Leaf, nbytes: int) -> bytes | None:
        """Return the bytes of a leaf, or None if they were not kept."""
        if len(leaf.content) == nbytes:
            return leaf.content
        if leaf.at < 0:
            return None
        with open(self.folder / "values.bin", "rb") as file:
            file.seek(leaf.at)
            return file.read(nbytes)

    def log_tail(self) -> str:
        """Return the last lines that the process printed."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = text.splitlines()[-LOG_LINES:]
        return "\n".join(f"  | {line}" for line in lines) or "  | (nothing)"


class RecordWriter:
    """Writes the records of this process without buffering, so that they survive a kill."""

    def __init__(self, files: ProcessFiles) -> None:
        self._records = open(files.folder / "records.jsonl", "ab", buffering=0)  # noqa: SIM115 - as long as the process
        self._values = open(files.folder / "values.bin", "ab", buffering=0)  # noqa: SIM115
        self._kept: dict[str, int] = {}
        self._end, self._left = 0, MOST_VALUE_BYTES

    def reset_value_limit(self) -> None:
        """Allow values up to the limit again, however many were kept before."""
        self._left = MOST_VALUE_BYTES

    def keep(self, leaf: Leaf, data: Callable[[], bytes], nbytes: int) -> Leaf:
        """Write the bytes of a leaf to the file of values, within the limit, and return the leaf with their offset."""
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
    """Return the digests of the files that `write` creates in a directory, by relative path."""
    digest = digest_function("sha256")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): digest(file.read_bytes()).encode() for file in files}


def new_directory(directory: Path | None) -> Path:
    """Create the directory of a proof, a temporary one if `directory` is None.

    Raises:
        SettingsError: the directory is not empty.
    """
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="resume-proof-"))
    made = Path(directory).absolute()
    made.mkdir(parents=True, exist_ok=True)
    if any(made.iterdir()):
        raise SettingsError(f"resume proof: directory: expected a new or empty directory, found files in {made}")
    return made


def remove(directory: Path) -> None:
    """Remove the directory of a proof."""
    shutil.rmtree(directory)


def is_below(path: str, directory: str) -> bool:
    """Return whether a path is a directory or is inside it."""
    return Path(path).resolve().is_relative_to(Path(directory).resolve())


def run_child(plan: Path, log: Path, timeout_s: float) -> int | None:
    """Run a plan in a new process, and kill all processes that it has started.

    Args:
        plan: the file of the plan.
        log: the file for the output of the process.
        timeout_s: the time limit, after which the process is killed.

    Returns:
        The exit code, negative for a signal; None: the process was killed at the time limit.
    """
    command = [sys.executable, "-u", "-c", _PROGRAM, str(plan), json.dumps(sys.path)]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    # Do not reap the process before killpg, so that its process ID cannot be reused. Its children, such as workers of a
    # data loader, are in its session and would survive otherwise.
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
    """Wait for the end of a process without reaping it. On macOS, Python before 3.13 cannot do that, so reap it."""
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()

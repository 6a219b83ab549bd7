"""The processes of a resume proof: what they run, the records that they write, and how they are started.

The proof starts each process with a plan file. The process runs the training loop under the recorder, which writes
records with digests of each update. The proof reads them after the process has ended. This module does not import JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import operator
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

from jaxckpt_train._validation import refuse
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.store.manifest import digest_function

SMALL_BYTES = 64
OBJECT = "object "  # prefix of the kind of a leaf of which only the type can be compared
_SUBJECT = "resume proof: make_run"
DIRECTORY = "{directory}"  # the placeholder for the directory of the run in the arguments of a script
MakeRun = Callable[..., object] | Sequence[str]
How = Literal["kill", "preempt", "raise"]
RECORDS = "records.jsonl"
LOG_LINES = 30
STACKS_S = 2.0  # for a process that hangs to print the stacks of its threads
# Set the path first: the new process must import this package and the user's modules from the same places.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from jaxckpt_train.testing.recorder import main
main(sys.argv.pop())
"""


class Leaf(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One recorded array or value."""

    kind: str  # the dtype; "key<...>" for a PRNG key; "python float" and so on for a Python value
    shape: tuple[int, ...]  # the shape of an array, or of the data of keys
    digest: str  # the digest of the bytes
    content: bytes = b""  # the bytes, if there are at most `SMALL_BYTES`

    def same(self, other: Leaf | None) -> bool:
        """Return whether dtype, shape and bytes are equal."""
        return other is not None and (self.kind, self.shape, self.digest) == (other.kind, other.shape, other.digest)

    def form(self) -> str:
        """Return dtype and shape as text."""
        is_value = self.kind.startswith("python") or self.kind in ("none", "empty")
        return self.kind if is_value else f"{self.kind}[{','.join(map(str, self.shape))}]"


Leaves = dict[str, Leaf]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One element that the loop took from its data."""

    digest: str
    leaves: Leaves

    def opaque_leaf(self) -> str | None:
        """Return the first leaf of which only the type can be compared, as text, or None."""
        kinds = (f"{name}, an {leaf.kind}" for name, leaf in self.leaves.items() if leaf.kind.startswith(OBJECT))
        return next(kinds, None)


class Resumed(msgspec.Struct, frozen=True, tag="resumed", tag_field="line"):
    """The record of a call of `resume`."""

    step: int | None  # the restored step; None: the run starts from the beginning
    directory: str  # the directory in which the run saves
    names: tuple[str, ...]  # the names of the values that the loop passed to `resume`
    leaves: Leaves  # the leaves of what `resume` returns, except the data
    host: dict[str, str]  # digests of the states of the global random generators of Python and NumPy, by name


class Update(msgspec.Struct, frozen=True, tag="update", tag_field="line"):
    """The record of one completed update."""

    step: int  # the label of the update
    batches: tuple[Batch, ...]  # the batches taken from the data since the previous update
    elsewhere: int  # the number of batches taken on other threads, which cannot be assigned to an update
    metrics: Leaves  # what the loop passed to `ckpt(..., metrics=...)`
    leaves: Leaves  # the other values that it passed
    host: dict[str, str]  # see `Resumed`
    ignored: tuple[str, ...] = ()  # the names of metrics that the user leaves out


class Between(msgspec.Struct, frozen=True, tag="between", tag_field="line"):
    """The record of what was observed between `ckpt(...)` of an update and the next update."""

    step: int  # the label of the update
    polled: bool  # whether `ckpt.poll()` was called, as in an evaluation
    # The names of the leaves that changed in place. A save of this update does not contain the change.
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
    if isinstance(make_run, str) or not isinstance(make_run, Sequence) or not all(isinstance(w, str) for w in make_run):
        refuse(_SUBJECT, "a function, or a script and its arguments as a list of strings", make_run)
    command = list(make_run)
    if command[:1] and command[0] in (sys.executable, "python", "python3"):
        del command[0]
    if not any(DIRECTORY in word for word in command[1:]):
        refuse(_SUBJECT, f'"{DIRECTORY}", the directory to save in, in one of the arguments', make_run)
    return ScriptTarget(tuple(command))


def _function_target(make_run: Callable[..., object]) -> FunctionTarget:
    function: Any = make_run
    positional, arguments = (), dict[str, Any]()
    if isinstance(make_run, functools.partial):
        function, positional, arguments = make_run.func, make_run.args, dict(make_run.keywords)
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    file, is_found = getattr(module, "__file__", None), False
    with contextlib.suppress(AttributeError):
        is_found = operator.attrgetter(name)(module) is function
    if file is None or module is None or not is_found or positional:
        refuse(_SUBJECT, "a function at the top level of a module file, or functools.partial(it, name=value)", make_run)
    is_plain = False
    with contextlib.suppress(TypeError, ValueError):
        is_plain = msgspec.json.decode(msgspec.json.encode(arguments)) == arguments
    if not is_plain:
        refuse(_SUBJECT, "arguments of None, bool, int, float, str, and lists and dicts of these", arguments)
    spec = getattr(module, "__spec__", None)  # of a script started by python -m: its name
    importable = spec.name if module.__name__ == "__main__" and spec is not None else module.__name__
    return FunctionTarget(os.path.abspath(file), importable, name, arguments)


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
    name, known = target.module, None
    if name == "__main__":
        name = "__mp_main__"  # the name that multiprocessing uses
    else:
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            known = importlib.util.find_spec(name)
    if known is not None and known.has_location and os.path.samefile(known.origin or "", target.file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, target.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Plan(msgspec.Struct, frozen=True):
    """What one process does."""

    target: FunctionTarget | ScriptTarget  # the target to run
    directory: str  # the directory to pass to the target, in which it saves
    stop_at: int | None = None  # the update in which to interrupt the run; None: do not interrupt it
    how: How = "kill"  # how to interrupt the run
    ignored: tuple[str, ...] = ()  # patterns of metrics to leave out
    saves_first: bool = False  # whether to save the update `stop_at` before the interruption, whatever the policy says

    def write(self, folder: Path) -> None:
        """Create the folder of the process and the directory of the run, and write the plan."""
        folder.mkdir(parents=True)
        Path(self.directory).mkdir(exist_ok=True)
        (folder / "plan.json").write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read the plan of a process."""
        return msgspec.json.decode((folder / "plan.json").read_bytes(), type=cls)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One process of a run that has ended."""

    folder: Path  # the folder with its log and its records
    plan: Plan  # the plan of the process
    exit_code: int | None  # the exit code, negative for a signal; None: the process hung and was killed

    @functools.cached_property
    def lines(self) -> Sequence[Line]:
        """All records, without a last one that a kill has left incomplete."""
        file = self.folder / RECORDS
        decoder = msgspec.json.Decoder(Line)
        return [decoder.decode(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.exists() else []

    @functools.cached_property
    def starts(self) -> list[Resumed]:
        """The records of the calls of `resume`; there should be one."""
        return [line for line in self.lines if isinstance(line, Resumed)]

    @functools.cached_property
    def updates(self) -> list[Update]:
        """The recorded updates in order."""
        return [line for line in self.lines if isinstance(line, Update)]

    @functools.cached_property
    def by_step(self) -> dict[int, Update]:
        """The updates by their label."""
        return {update.step: update for update in self.updates}

    @functools.cached_property
    def between(self) -> dict[int, Between]:
        """The records of what was observed after `ckpt(...)` of an update, by the label of the update."""
        return {line.step: line for line in self.lines if isinstance(line, Between)}

    @property
    def resumed_at(self) -> int | None:
        """The step from which the run resumed; None: it started from the beginning."""
        return self.starts[0].step if self.starts else None

    @property
    def was_interrupted(self) -> bool:
        """Whether the process reached its interruption."""
        return any(isinstance(line, Stopped) for line in self.lines)

    @property
    def last(self) -> int | None:
        """The label of the last update, or None."""
        return self.updates[-1].step if self.updates else None

    def log_tail(self) -> str:
        """Return the path of the log and its last lines."""
        log = self.folder / "log.txt"
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        return f"{log}, ends with:\n" + ("\n".join(f"  | {line}" for line in lines) or "  | (nothing)")


def add_record(folder: Path, line: Line) -> None:
    """Add a record to the folder of a process. A later kill of the process does not lose it."""
    with open(folder / RECORDS, "ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def digests_of_files(write: Callable[[Path], None]) -> dict[str, bytes]:
    """Return the digests of the files that `write` creates in a directory, by relative path."""
    digest = digest_function("sha256")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): digest(file.read_bytes()).encode() for file in files}


def new_directory(directory: str | os.PathLike[str] | None) -> Path:
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


def run_child(folder: Path, timeout_s: float) -> int | None:
    """Run the plan in a folder in a new process, and kill all processes that it has started.

    Returns:
        The exit code, negative for a signal; None: the process was killed at the time limit.
    """
    command = [sys.executable, "-u", "-c", _PROGRAM, str(folder), json.dumps(sys.path)]
    with open(folder / "log.txt", "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGQUIT)  # prints the stacks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STACKS_S)
        return None
    finally:  # its children, such as workers of a data loader, are in its session and would survive otherwise
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""The files of one watched process: its plan, its log, its records, and the values of its leaves."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.store.digests import digest_function
from jaxckpt_train.testing.records import Leaf, Line
from jaxckpt_train.testing.run_target import FunctionTarget, ScriptTarget

How = Literal["kill", "preempt", "raise"]
MOST_VALUE_BYTES = 256 << 20
"""So much of the values one process keeps before the update from which on they are wanted, and again from there."""
LOG_LINES = 30


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

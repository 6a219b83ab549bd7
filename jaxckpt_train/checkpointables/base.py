"""The interface between handlers of checkpointables and the code that saves and loads them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

ORBAX_GRAIN = "orbax_grain"
STATE_FILE = re.compile(r"process_(?P<process>[0-9]{1,9})-of-(?P<processes>[0-9]{1,9})\.(json|txt)")
Json = Any  # None, bool, int, float, str, list or dict of these, with text keys


NOTHING: Any = msgspec.UNSET
"""The value of `Staged.tree` without a tree, since None is a valid tree and a valid JSON value. Copies are the same."""


@dataclasses.dataclass(frozen=True)
class Staged:
    """One checkpointable as of the call to save, taken on the calling thread.

    Give exactly one of `tree`, `value` and `write_files`.

    Attributes:
        tree: a pytree whose leaves are stored one by one. It is snapshotted right after `stage` returns.
        value: plain JSON data, stored in the file `<name>/p00000.json`.
        same: for a `value` that each process of a job has for itself: the part that must be equal in all processes if
            one value is to stand for all. If the parts differ, each process gets its own file, `<name>/pNNNNN.json`.
            NOTHING: all processes must have the same value.
        write_files: called once on the writer's thread with the existing, empty directory `<name>/` of the attempt. The
            plain files that it leaves there are synced, digested and become part of the checkpoint. In a multi-process
            job, all processes call it with the same directory. On an object store, it is a temporary local directory of
            each process, whose files are uploaded; two processes may not write different files with one name.
    """

    tree: Any = NOTHING
    value: Json = None
    same: Json = NOTHING
    write_files: Callable[[Path], None] | None = None


class Saved(Protocol):
    """One checkpointable of a committed checkpoint, as its handler sees it in a load.

    Attributes:
        name: the name of the checkpointable.
        kind: the kind of the handler that saved it.
        values: the number of stored values: one that stands for all processes, or one for each of several.
        process: the number of the process whose value `value` returns.
    """

    name: str
    kind: str
    values: int
    process: int

    def tree(self, like: Any) -> Any:
        """Return the stored leaves in the structure of `like`, or nested dicts and lists of numpy arrays for None."""

    def compare(self, like: Any) -> None:
        """Raise MismatchError if `tree` would raise it, without reading anything."""

    def value(self) -> Json:
        """Return the JSON data that was staged as `value`, with its digest verified unless `verify_on_load` is off."""

    def directory(self) -> Path:
        """Return the directory with the files from `write_files`, with their digests verified as for `value`.

        Those of a checkpoint on an object store are in a temporary local directory until the end of the load.
        """


class Handler(Protocol):
    """Saves and restores one kind of checkpointable.

    A handler may also have `restores`, a tuple of other kinds that it restores, such as those of other tools. It may
    also have `compare(target, saved)`, which raises MismatchError if `restore` would. This is called for all
    checkpointables before the first of them is restored, so that a mismatch in one leaves the others unchanged.

    Attributes:
        kind: recorded in the manifest; a load without a target finds the handler by it.
        early: whether it is restored before the arrays of the checkpoint, so that an iterator prefetches during their
            load.
    """

    kind: str
    early: bool

    def handles(self, value: object) -> bool:
        """Return whether this handler accepts `value`, as something to save or as the target of a load."""

    def stage(self, value: Any) -> Staged:
        """Stage `value` as it is now, on the thread that called save. Later changes of `value` must have no effect."""

    def restore(self, target: Any, saved: Saved) -> Any:
        """Restore the saved content into `target`, or build it if `target` is None, and return it."""


@dataclasses.dataclass(frozen=True)
class JsonValue:
    """Marks plain data that is stored as a JSON file: None, bool, int, float, str, lists, and dicts with text keys.

    Unlike a pytree, it is loaded as it was saved, even if its structure has changed since. Use it for configurations
    and notes. As the target of a load, pass `JsonValue(None)` or None. NaN and infinities are preserved.
    """

    value: Json


def value_file(name: str, process: int = 0) -> str:
    """Return the file name for the value of one process. The file of process 0 may stand for all processes."""
    return f"{name}/p{process:05d}.json"

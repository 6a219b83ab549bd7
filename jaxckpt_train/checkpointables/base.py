"""What a handler of one kind of checkpointable must do, and what passes between it and a save or a load."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

ORBAX_GRAIN = "orbax_grain"
STATE_FILE = re.compile(r"process_(?P<process>[0-9]{1,9})-of-(?P<processes>[0-9]{1,9})\.(json|txt)")
Json = Any  # None, bool, int, float, str, list or dict of these, with text keys


class _Nothing:
    def __repr__(self) -> str:
        return "NOTHING"

    __reduce__ = __repr__  # a copy of it is itself


NOTHING: Any = _Nothing()
"""What `Staged.tree` is when there is no tree: None is a tree too, and a JSON value."""


@dataclasses.dataclass(frozen=True)
class Staged:
    """One checkpointable as of the call to save, taken on the calling thread. Exactly one part is given.

    Attributes:
        tree: a pytree whose leaves are stored one by one. It is snapshotted right after `stage` returns.
        value: plain JSON data, stored in the file `<name>/p00000.json`.
        same: of a `value` that every process of a job has for itself: what is equal in all of them if one value is to
            stand for all; else each has a file of its own, `<name>/pNNNNN.json`. NOTHING: all must have the same value.
        write_files: called once on the writer's thread with the existing, empty directory `<name>/` of the
            attempt; whatever plain files it leaves there are synced, digested and become part of the checkpoint. In a
            job of several processes all call it with the same directory.
    """

    tree: Any = NOTHING
    value: Json = None
    same: Json = NOTHING
    write_files: Callable[[Path], None] | None = None


class Saved(Protocol):
    """One checkpointable of a committed checkpoint, as a handler sees it when loading."""

    name: str
    kind: str
    values: int
    """How many values there are: one that stands for all processes, or one of each of several."""
    process: int
    """Number of the process whose value `value` gives."""

    def tree(self, like: Any) -> Any:
        """The stored leaves in the structure of `like`; with None, nested dicts and lists of numpy arrays."""

    def compare(self, like: Any) -> None:
        """Raise MismatchError where `tree` would; nothing is read."""

    def value(self) -> Json:
        """The JSON data that was staged as `value`; its digest is verified, unless `verify_on_load` is off."""

    def directory(self) -> Path:
        """The directory with the files that `write_files` left; their digests as well are verified, as for `value`."""


class Handler(Protocol):
    """How one kind of checkpointable is taken apart and put together.

    Attributes:
        kind: recorded in the manifest; finds the handler again when there is no target.
        early: restored before the arrays of the checkpoint (iterators: their prefetch hides behind the arrays).

    A handler may also have `restores`, other kinds than its own that it restores, such as those of other tools. And it
    may have `compare(target, saved)`, which raises MismatchError where `restore` would: it is called for
    all checkpointables before the first of them is restored, so that a mismatch of one leaves the others as they were.
    """

    kind: str
    early: bool

    def handles(self, value: object) -> bool:
        """Whether this handler takes `value`, as something to save or as the target of a load."""

    def stage(self, value: Any) -> Staged:
        """Take `value` as it is now. Called on the thread that called save; nothing may change afterwards."""

    def restore(self, target: Any, saved: Saved) -> Any:
        """Put the saved content into `target` (or build it anew when target is None) and return it."""

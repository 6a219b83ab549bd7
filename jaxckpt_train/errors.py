"""Every error that jaxckpt_train raises: one class per decision that a caller can take.

The classes derive from each other as follows:

    CheckpointError                       anything this package raises on purpose
    ├── NotACheckpointError               nothing committed at this path (missing, empty, or something else)
    │   ├── StepNotFoundError             this run directory has no such step
    │   └── IncompleteCheckpointError     begun or copied in part: there is no valid COMMIT
    ├── CorruptCheckpointError            committed, but bytes are missing or differ from their digest
    ├── FormatVersionError                written by a newer version of this package
    ├── MismatchError                     the checkpoint and the target differ; lists every difference
    ├── UnsupportedLeafError              a leaf or key of the tree cannot be stored
    ├── NonFiniteError                    the state holds nan or inf, and such states are not to be saved
    ├── CheckpointExistsError             refuses to overwrite what is committed there
    ├── StorageError (also OSError)       the file system refused: full, read-only, failing, not permitted
    ├── DirectoryLockedError              another live process owns this run directory
    ├── IteratorStateError                a data iterator's saved position does not fit this pipeline, or its data ended
    ├── SettingsError (also ValueError)   an argument, setting or policy is wrong
    ├── CheckpointTimeoutError (also TimeoutError)
    ├── OtherProcessError                 another process of this job failed at what all of them do together
    └── Preempted                         the loop was asked to leave and its state is saved

What fails besides, while another error is on its way: it is noted there, and does not hide it.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger("jaxckpt_train")


def is_success(stop: BaseException) -> bool:
    """Whether it ends a process, a generator or a task as if all were well."""
    if isinstance(stop, SystemExit):
        return stop.code is None or (isinstance(stop.code, int) and stop.code & 0xFF == 0)
    return not isinstance(stop, Exception | KeyboardInterrupt)


@contextlib.contextmanager
def suppress_secondary(error: BaseException | None, subject: str) -> Iterator[None]:
    """Within: `subject` is closed, as the end of a `with` does on `error`; what fails then is a note of that error.

    An error that says that all is well, as `sys.exit(0)` does, tells nobody: what failed is raised in its place. An
    interrupt meanwhile always comes through, or whoever catches the error would go on.
    """
    try:
        yield
    except BaseException as failure:
        if error is None or is_success(error) or not isinstance(failure, Exception):
            raise
        _log.exception("closing %s failed while another error was on its way", subject)
        told = str(failure) or type(failure).__name__
        error.add_note(f"besides, closing {subject} failed: {told}")


class CheckpointError(Exception):
    """The root of all errors of this package."""


class NotACheckpointError(CheckpointError):
    """No committed checkpoint at this path."""


class StepNotFoundError(NotACheckpointError):
    """The run directory has no committed step with this number."""


class IncompleteCheckpointError(NotACheckpointError):
    """A checkpoint that was begun, or copied in part, and has no valid COMMIT."""


class CorruptCheckpointError(CheckpointError):
    """A committed checkpoint whose bytes are missing, changed or contradict each other."""


class FormatVersionError(CheckpointError):
    """A checkpoint of a newer format version than this package reads."""


class MismatchError(CheckpointError):
    """The checkpoint and the target differ; the message lists every difference.

    Attributes:
        differences: one line of text for each difference, leaf path first.
    """

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class UnsupportedLeafError(CheckpointError):
    """A leaf, key or value that this package cannot store without losing something."""


class NonFiniteError(CheckpointError):
    """The state holds nan or inf, and `StoreSettings.nonfinite` is "reject": nothing was saved.

    Attributes:
        leaves: the leaf paths, the checkpointable's name first.
    """

    def __init__(self, message: str, leaves: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.leaves = leaves


class CheckpointExistsError(CheckpointError):
    """A committed checkpoint is already there and overwriting was not asked for."""


class StorageError(CheckpointError, OSError):
    """The file system refused an operation; `errno` and `filename` are those of the cause."""


class DirectoryLockedError(CheckpointError):
    """Another live process owns the run directory."""


class IteratorStateError(CheckpointError):
    """The saved position of a data iterator does not fit the pipeline it is restored into, or its data ended."""


class SettingsError(CheckpointError, ValueError):
    """An argument, setting or policy is wrong."""


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """A wait for a save or for another process ran out of time.

    Attributes:
        lost: numbers of the processes of this job of which this one has heard nothing; empty if another one says so.
    """

    lost: tuple[int, ...] = ()


class OtherProcessError(CheckpointError):
    """Another process of this job failed at what all do together, or they do not agree on what that is."""


class Preempted(CheckpointError):
    """The loop was asked to leave, and its state is saved.

    Attributes:
        step: the committed step, or None if nothing had to be saved.
        exit_code: what the process should leave with.
    """

    def __init__(self, message: str, step: int | None, exit_code: int) -> None:
        super().__init__(message)
        self.step = step
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        """For a parent process, which may be handed it by a worker: made anew of the message alone, it would not be."""
        return type(self), (str(self), self.step, self.exit_code), vars(self)


def free_frames(error: BaseException | None) -> None:
    """Free what the ended frames of an error hold, such as a whole state, and of all errors that led to it.

    The tracebacks stay. Errors may have led to each other: `raise error.__cause__ from None` makes a ring of two.
    """
    seen, todo = set[int](), [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        todo += [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]

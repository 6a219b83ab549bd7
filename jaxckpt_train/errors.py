"""The errors that jaxckpt_train raises: one class for each decision that a caller can take.

The classes derive from each other as follows:

    CheckpointError                       the base class of all errors of this package
    ├── NotACheckpointError               nothing is committed at this path: it is missing, empty, or something else
    │   ├── StepNotFoundError             this run directory has no such step
    │   └── IncompleteCheckpointError     a save or copy that did not finish: there is no valid COMMIT
    ├── CorruptCheckpointError            committed, but bytes are missing or differ from their digest
    ├── FormatVersionError                written by a newer version of this package
    ├── MismatchError                     the checkpoint and the target differ; lists every difference
    ├── UnsupportedLeafError              a leaf or key of the tree cannot be stored
    ├── NonFiniteError                    the state contains nan or inf, and the settings reject it
    ├── CheckpointExistsError             a committed checkpoint would be overwritten
    ├── StorageError (also OSError)       the file system refused: full, read-only, failing, not permitted
    ├── DirectoryLockedError              another live process owns this run directory
    ├── IteratorStateError                a data iterator's saved position does not fit this pipeline, or its data ended
    ├── SettingsError (also ValueError)   an argument, setting or policy is wrong
    ├── CheckpointTimeoutError (also TimeoutError)
    ├── OtherProcessError                 another process of the job failed, or does something else
    └── Preempted                         the loop was asked to stop, and its state is saved
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger("jaxckpt_train")


def is_success(stop: BaseException) -> bool:
    """Return whether an exception ends a process, a generator or a task normally."""
    if isinstance(stop, SystemExit):
        return stop.code is None or (isinstance(stop.code, int) and stop.code & 0xFF == 0)
    return not isinstance(stop, Exception | KeyboardInterrupt)


@contextlib.contextmanager
def suppress_secondary(error: BaseException | None, subject: str) -> Iterator[None]:
    """Attach errors raised during cleanup as notes, instead of masking the original error.

    Within the context, `subject` is closed, like at the end of a `with` statement that ends with `error`. An `error`
    that reports success, like `sys.exit(0)`, would hide a failure, so the failure is raised instead. An interrupt is
    always raised, since a caller that catches `error` would otherwise continue.
    """
    try:
        yield
    except BaseException as failure:
        if error is None or is_success(error) or not isinstance(failure, Exception):
            raise
        _log.exception("closing %s failed while another error was being raised", subject)
        error.add_note(f"closing {subject} also failed: {str(failure) or type(failure).__name__}")


class CheckpointError(Exception):
    """The base class of all errors of this package."""


class NotACheckpointError(CheckpointError):
    """There is no committed checkpoint at this path."""


class StepNotFoundError(NotACheckpointError):
    """The run directory has no committed step with this number."""


class IncompleteCheckpointError(NotACheckpointError):
    """The checkpoint was started or partly copied, and has no valid COMMIT."""


class CorruptCheckpointError(CheckpointError):
    """The checkpoint is committed, but its bytes are missing, changed or contradictory."""


class FormatVersionError(CheckpointError):
    """The checkpoint has a newer format version than this package can read."""


class MismatchError(CheckpointError):
    """The checkpoint and the target differ; the message lists every difference.

    Attributes:
        differences: one line of text for each difference, leaf path first.
    """

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class UnsupportedLeafError(CheckpointError):
    """A leaf, key or value cannot be stored without loss."""


class NonFiniteError(CheckpointError):
    """The state contains nan or inf, and `StoreSettings.nonfinite` is "reject"; nothing was saved.

    Attributes:
        leaves: the leaf paths, each one after the name of its checkpointable.
    """

    def __init__(self, message: str, leaves: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.leaves = leaves


class CheckpointExistsError(CheckpointError):
    """A committed checkpoint already exists, and overwriting was not requested."""


class StorageError(CheckpointError, OSError):
    """The file system refused an operation; `errno` and `filename` are those of the cause."""


class DirectoryLockedError(CheckpointError):
    """Another live process owns the run directory."""


class IteratorStateError(CheckpointError):
    """The saved position of a data iterator does not fit the current pipeline, or the data ended."""


class SettingsError(CheckpointError, ValueError):
    """An argument, setting or policy is wrong."""


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """A wait for a save or for another process exceeded its time limit.

    Attributes:
        lost: the numbers of the processes of this job that did not answer this process. Empty if another process
            reported the error.
    """

    lost: tuple[int, ...] = ()


class OtherProcessError(CheckpointError):
    """Another process of this job failed in a joint operation, or the processes disagree on the operation."""


class Preempted(CheckpointError):
    """The loop was asked to stop, and its state is saved.

    Attributes:
        step: the committed step, or None if there was nothing to save.
        exit_code: the exit code that the process should end with.
    """

    def __init__(self, message: str, step: int | None, exit_code: int) -> None:
        super().__init__(message)
        self.step = step
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling with all arguments, for example from a worker to its parent process."""
        return type(self), (str(self), self.step, self.exit_code), vars(self)


def free_frames(error: BaseException | None) -> None:
    """Free what the finished frames of an error and of its causes hold, such as a whole state.

    The tracebacks are kept. Causes can form a ring: `raise error.__cause__ from None` makes one of two errors.
    """
    seen, todo = set[int](), [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        todo += [each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]

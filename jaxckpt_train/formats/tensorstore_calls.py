"""TensorStore as it is used here: imported so that no interrupt is lost, and its errors told as ours."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from jaxckpt_train.errors import CheckpointError, CorruptCheckpointError, SettingsError, StorageError
from jaxckpt_train.store.backend import MISSING
from jaxckpt_train.store.manifest import shown
from jaxckpt_train.store.refusal import refusal

TOLD_LETTERS = 2000  # of an error of TensorStore, which names a file
_SYSTEM_ERROR = re.compile(r"(?:os_error_code='|\[OS error )(\d+)")  # as its versions have it
_STARTED = "/tensorstore/thread_pool/started"  # its count of the threads that it has started in this process
_OF_THE_NAME = MISSING | {errno.ENAMETOOLONG}  # nothing can be there, so whatever has this name is damaged


_has_threads = False  # as of the last fork
_is_lost_to_fork = False


def _look_for_threads() -> None:
    """Note before a fork whether TensorStore has started threads, which the child will not have."""
    global _has_threads
    library = sys.modules.get("tensorstore")
    count = getattr(library, "experimental_collect_matching_metrics", None)
    _has_threads = library is not None and (count is None or bool(count(_STARTED)))


def _note_fork() -> None:
    global _is_lost_to_fork
    _is_lost_to_fork = _is_lost_to_fork or _has_threads


os.register_at_fork(before=_look_for_threads, after_in_child=_note_fork)


def refuse_fork(subject: str) -> None:
    """Refuse to use TensorStore in a process in which it would abort.

    Args:
        subject: what is done through it, for messages.

    Raises:
        SettingsError: this process was forked after TensorStore had started its threads.
    """
    if _is_lost_to_fork:
        raise SettingsError(
            f"{subject} through TensorStore, which cannot be used in process {os.getpid()}: it was forked after its "
            'parent had used TensorStore. Start the process by multiprocessing.get_context("spawn"), or load in the '
            "parent"
        )


def tensorstore(subject: str) -> Any:
    """The library.

    Args:
        subject: what is done through it, for messages.

    Raises:
        SettingsError: it is not installed, cannot be imported, or cannot be used in this forked process.
    """
    refuse_fork(subject)
    with _interrupts_wait():  # one within the start of an extension becomes an ImportError
        try:
            import tensorstore
        except ModuleNotFoundError as error:
            raise SettingsError(f"{subject} through TensorStore: pip install 'jaxckpt-train[orbax]'") from error
        except ImportError as error:
            raise SettingsError(
                f"{subject} through TensorStore, which is installed but cannot be imported: {shown(error)}"
            ) from error
    return tensorstore


def refused(error: Exception, what: str, path: str) -> StorageError | None:
    """What the file system said, if it was that which failed: TensorStore tells the number in its text."""
    code = _code_of(error)
    return None if code is None else refusal(code, what, path)


def read_error(error: ValueError, told: str) -> CheckpointError:
    """What a read that failed means: that the system refused, or else that what is stored is damaged.

    Args:
        error: of TensorStore.
        told: the message, but for what TensorStore says.
    """
    code, message = _code_of(error), f"{told}: {shown(error, TOLD_LETTERS)}"
    return CorruptCheckpointError(message) if code is None or code in _OF_THE_NAME else StorageError(code, message)


def _code_of(error: Exception) -> int | None:
    found = _SYSTEM_ERROR.search(str(error))
    return int(found[1]) if found else None


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Within: an interrupt does what it does at the end."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        for each in came[:1]:
            before(*each)

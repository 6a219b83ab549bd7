"""Reads what the directory of a run tells: its history and its steps; what cannot be read is told, and left out."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import logging
from collections.abc import Iterator

from jaxckpt_train.errors import CheckpointError, NotACheckpointError, StorageError
from jaxckpt_train.looking.run_look import StepLook, look_at_run
from jaxckpt_train.report.report_event import ReportEvent
from jaxckpt_train.report.run_history import RunHistory
from jaxckpt_train.steps.history import HISTORY_NAME, History
from jaxckpt_train.steps.lock import LOCK_NAME, OwnerLock
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import GONE, Backend

MOST_WARNINGS = 20
HEARD_S = 150.0  # whoever is at work notes how far it has come every minute
_log = logging.getLogger("jaxckpt_train")


@dataclasses.dataclass(frozen=True)
class RunRead:
    """What is known of a run.

    Attributes:
        directory: of the run.
        history: what its history says.
        looks: its steps, lowest first.
        is_live: whether a process is at work on it.
        warnings: what could not be read.
    """

    directory: str
    history: RunHistory
    looks: tuple[StepLook, ...]
    is_live: bool
    warnings: tuple[str, ...]


def read_run(backend: Backend, directory: str, now: datetime.datetime) -> RunRead:
    """Read the history and look at the steps of a run.

    Args:
        backend: where.
        directory: of the run.
        now: the time, with a zone.

    Raises:
        NotACheckpointError: the directory has neither, or is not there.
        StorageError: it cannot be read.
    """
    names = _names(backend, directory)
    history = RunHistory({name for name in names if parse_step_name(name) is not None})
    with _heard() as warnings:
        lock = OwnerLock(backend, directory)
        was_live = lock.is_anybodys()
        try:
            for event in _events(backend, directory):
                history.add(event)
        except CheckpointError as error:
            _log.warning("the history cannot be read: %s", error)
        is_live = was_live or lock.is_anybodys()  # one may begin meanwhile, and one that ends says so first
        is_live = is_live or (LOCK_NAME in names and _was_heard_of(history.last, now))
        looks = look_at_run(backend, directory)
    return RunRead(directory, history, tuple(looks), is_live, tuple(warnings))


def _names(backend: Backend, directory: str) -> set[str]:
    """The names in it, if it is a run's."""
    try:
        names = {entry.name for entry in backend.list(directory)}
    except StorageError as error:
        if error.errno in {*GONE, errno.ENOTDIR}:
            raise NotACheckpointError(f"{directory}: expected the directory of a run, found none") from error
        raise
    if HISTORY_NAME not in names and all(parse_step_name(name) is None for name in names):
        raise NotACheckpointError(f"{directory}: expected a run, found neither a step nor a {HISTORY_NAME} in it")
    return names


def _was_heard_of(last: ReportEvent | None, now: datetime.datetime) -> bool:
    """Whether an owner has written a moment ago: who may not write here cannot ask for the age of its lock."""
    return last is not None and last.event != "end" and abs((now - last.time).total_seconds()) < HEARD_S


def _events(backend: Backend, directory: str) -> Iterator[ReportEvent]:
    unfit = yield from History(backend, directory).each(ReportEvent)
    if unfit:
        _log.warning("%d lines of %s tell of no event of a run, and are left out", unfit, HISTORY_NAME)


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """Within: what the package warns of is kept, and goes into the report instead of to standard error."""
    warnings: list[str] = []
    handler = _Keeper(warnings)
    _log.addHandler(handler)
    try:
        yield warnings
    finally:
        _log.removeHandler(handler)


class _Keeper(logging.Handler):
    keeps = True  # so that nobody else tells of it

    def __init__(self, warnings: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        _keep(self._warnings, record.getMessage())


def _keep(warnings: list[str], text: str) -> None:
    if len(warnings) < MOST_WARNINGS:
        warnings.append(text)
    elif len(warnings) == MOST_WARNINGS:
        warnings.append("more warnings of the same kind are left out")

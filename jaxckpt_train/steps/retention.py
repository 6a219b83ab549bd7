"""Retention: deletes steps that no policy keeps, on a thread of its own, never visible half-way."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Sequence

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.late_sync import make_durable, sync_directory

_DELETING = ".deleting"
_log = logging.getLogger("jaxckpt_train")


class Deleter:
    """Deletes step directories one after the other. A failing deletion warns and is tried again with the next one.

    Args:
        backend: where.
        directory: of the run.
        deleted: a weak reference to the function that is told the name of each step that is gone.
    """

    def __init__(self, backend: Backend, directory: str, deleted: Callable[[], Callable[[str], None] | None]) -> None:
        self._backend, self._directory, self._deleted = backend, directory, deleted
        self._jobs: collections.deque[tuple[Sequence[str], str | None]] = collections.deque()
        self._retry: list[str] = []
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None
        self._is_closing = False
        self._at_end: Callable[[], None] | None = None

    def delete(self, names: Sequence[str], *, instead: str | None = None) -> None:
        """Delete step directories soon; each stops being listed before its first byte goes.

        Args:
            names: of the directories.
            instead: a step that was saved without being synced: it is now, before the others go. A power cut would
                else find none, since names are often on the disk before the data are.
        """
        if names:
            self._jobs.append((names, instead))
            self._ensure_worker()

    def _ensure_worker(self) -> None:
        """Have somebody who does what is left: a thread, or the caller if the system has none for it."""
        with self._changed:
            self._changed.notify_all()
            if not self._jobs or self._worker is not None:
                return
            self._is_closing = False
        try:
            threading.Thread(target=self._work, name="jaxckpt-retention", daemon=True).start()
        except RuntimeError:
            self._work(stays=False)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to delete; False if that took too long."""
        self._ensure_worker()
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """Finish what is under way and end the thread."""
        self.wait()
        self.end(lambda: None)
        with self._changed:
            self._changed.wait_for(lambda: self._worker is None)

    def end(self, then: Callable[[], None]) -> None:
        """As `close`, without waiting for it: `then` is called when all is finished, here or on the thread."""
        self._ensure_worker()
        with self._changed:
            self._is_closing = True
            is_over = self._worker is None and not self._jobs
            if not is_over:
                self._at_end = then
            self._changed.notify_all()
        if is_over:
            then()

    def _work(self, stays: bool = True) -> None:
        """Work off the jobs, one thread at a time. A job stays in the list until it is done: whoever waits sees it."""
        with self._changed:
            if self._worker is not None:
                return
            self._worker = threading.current_thread()
        try:
            while self._has_job(stays):
                try:
                    self._work_on(*self._jobs[0])
                finally:
                    self._jobs.popleft()
        finally:
            with self._changed:
                if self._worker is threading.current_thread():  # it failed: the next thread goes on with the next job
                    self._worker = None
                then = None
                if not self._jobs:
                    then, self._at_end = self._at_end, None
                self._changed.notify_all()
            if then is not None:
                then()
            self._ensure_worker()

    def _has_job(self, stays: bool) -> bool:
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs or self._is_closing or not stays)
            if not self._jobs:
                self._worker = None
            return bool(self._jobs)

    def _work_on(self, names: Sequence[str], instead: str | None) -> None:
        names, self._retry = [*self._retry, *names], []
        if instead is not None and not self._make_durable(instead):
            self._retry = names
            return
        hidden = [found for name in names if (found := self._hide(name)) is not None]
        if hidden and not self._is_hiding_durable():
            self._retry += hidden
            return
        for name in hidden:
            self._remove(name)

    def _make_durable(self, name: str) -> bool:
        try:
            make_durable(self._backend, f"{self._directory}/{name}")
        except StorageError as error:
            _log.warning("%s could not be synced, so older steps stay for now: %s", name, error)
            return False
        return True

    def _hide(self, name: str) -> str | None:
        """Give a step the name under which it is deleted; None: that failed."""
        hidden = hidden_name(name)
        try:
            if name != hidden:
                self._backend.rename(f"{self._directory}/{name}", f"{self._directory}/{hidden}")
                tell = self._deleted()
                if tell is not None:
                    tell(name)
        except StorageError as error:
            self._try_again(hidden if self._is_hidden(hidden) else name, error)
            return None
        return hidden

    def _is_hiding_durable(self) -> bool:
        """Sync the new names: a power cut might else bring steps back under the old ones, without all their files."""
        try:
            sync_directory(self._backend, self._directory)
        except StorageError as error:
            _log.warning("deleting old steps waits, since %s could not be synced: %s", self._directory, error)
            return False
        return True

    def _remove(self, hidden: str) -> None:
        try:
            self._backend.remove(f"{self._directory}/{hidden}")
        except StorageError as error:
            self._try_again(hidden, error)

    def _try_again(self, name: str, error: StorageError) -> None:
        shown = name.removeprefix(".").removesuffix(_DELETING)
        _log.warning("deleting %s failed and will be tried again: %s", shown, error)
        self._retry.append(name)

    def _is_hidden(self, hidden: str) -> bool:
        try:
            return any(entry.name == hidden for entry in self._backend.list(self._directory))
        except StorageError:
            return False


def hidden_name(name: str) -> str:
    """The name of a directory while it is being deleted."""
    return name if name.endswith(_DELETING) else f".{name}{_DELETING}"


def half_deleted(backend: Backend, directory: str) -> list[str]:
    """The directories whose deletion was begun and not finished."""
    return [
        entry.name for entry in backend.list(directory) if entry.name.startswith(".") and entry.name.endswith(_DELETING)
    ]

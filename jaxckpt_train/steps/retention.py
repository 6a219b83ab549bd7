"""Retention: deletes steps that no policy keeps, on a thread of its own, never visible half-way."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

from jaxckpt_train.errors import StorageError
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.transaction import make_durable

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
        self._jobs: queue.SimpleQueue[tuple[str, str | None] | None] = queue.SimpleQueue()
        self._retry: list[str] = []
        self._durable: str | None = None
        self._idle = threading.Condition()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def delete(self, name: str, *, instead: str | None = None) -> None:
        """Delete a step directory soon; it stops being listed before its first byte goes.

        Args:
            name: of the directory.
            instead: a step that was saved without being synced: it is now, before the other one goes. A power cut would
                else find neither, since names are often on the disk before the data are.
        """
        with self._idle:
            self._waiting += 1
            self._jobs.put((name, instead))
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._work, name="jaxckpt-retention", daemon=True)
            with contextlib.suppress(RuntimeError):  # the system has no thread for it
                thread.start()
                self._thread = thread
                return
        while not self._jobs.empty():
            self._work_on(self._jobs.get())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to delete; False if that took too long."""
        with self._idle:
            return self._idle.wait_for(lambda: self._waiting == 0, timeout_s)

    def close(self) -> None:
        """Finish what is under way and end the thread."""
        self.wait()
        with self._idle:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._work_on(job)

    def _work_on(self, job: tuple[str, str | None] | None) -> None:
        assert job is not None, "the end is asked for of a thread"
        name, instead = job
        names, self._retry = [*self._retry, name], []
        if self._is_durable(instead):
            for each in names:
                self._delete(each)
        else:
            self._retry = names
        with self._idle:
            self._waiting -= 1
            self._idle.notify_all()

    def _is_durable(self, instead: str | None) -> bool:
        """Sync it if need be; False if that failed."""
        if instead is not None and instead != self._durable:
            try:
                make_durable(self._backend, f"{self._directory}/{instead}")
            except StorageError as error:
                _log.warning("%s could not be synced, so older steps stay for now: %s", instead, error)
                return False
            self._durable = instead
        return True

    def _delete(self, name: str) -> None:
        hidden = hidden_name(name)
        try:
            if name != hidden:
                self._backend.rename(f"{self._directory}/{name}", f"{self._directory}/{hidden}")
                tell = self._deleted()
                if tell is not None:
                    tell(name)
            self._backend.remove(f"{self._directory}/{hidden}")
        except StorageError as error:
            _log.warning("deleting %s failed and will be tried again: %s", name, error)
            self._retry.append(hidden if self._is_hidden(hidden) else name)

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

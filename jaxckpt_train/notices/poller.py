"""Asks a metadata server for a notice every so many seconds, on a thread of its own."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from jaxckpt_train.notices.metadata_server import MetadataServer, NoAnswerError
from jaxckpt_train.notices.source import Notice
from jaxckpt_train.store.latch import Latch
from jaxckpt_train.value_checks import seconds

Look = Callable[[MetadataServer], Notice | None]
TELL_AGAIN_S = 600.0
JOIN_S = 1.0  # a request that is hung up on ends at once; only the look-up of a name does not
_log = logging.getLogger("jaxckpt_train")


class Poller:
    """Looks until it has found a notice or is stopped. Who drops it without a stop leaves no thread, either.

    A server that cannot be used is told of by a warning, and so is its next answer; both not again for ten minutes.

    Args:
        name: of the source, for messages.
        url: of the server.
        poll_s: seconds between two looks.
        timeout_s: seconds for one request.
        new_look: makes what asks the server once; a new one for each start. It must not hold the source.
        hint: what to say where the server cannot be used.

    Raises:
        SettingsError: an argument is wrong.
    """

    def __init__(
        self, name: str, url: str, poll_s: float, timeout_s: float, new_look: Callable[[], Look], hint: str
    ) -> None:
        self._name, self._url, self._new_look, self._hint = name, url, new_look, hint
        self._poll_s = seconds(f"{name}: poll_s", poll_s)
        self._timeout_s = seconds(f"{name}: timeout_s", timeout_s)
        self._run: _Run | None = None
        self._server()

    def _server(self) -> MetadataServer:
        return MetadataServer(f"{self._name}: url", self._url, self._timeout_s)

    def start(self) -> None:
        """Begin to look."""
        self.stop()
        self._run = run = _Run(self._name, self._server(), self._poll_s, self._new_look(), self._hint)
        weakref.finalize(self, run.end).atexit = False
        run.begin()

    def stop(self) -> None:
        """End that."""
        if self._run is not None:
            self._run.end()
            self._run.join()

    def notice(self) -> Notice | None:
        """What was found since the last start."""
        return None if self._run is None else self._run.found


class PolledSource:
    """A source of notices that a poller looks for.

    Args:
        poller: of its metadata server.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller

    def start(self) -> None:
        """Begin to ask."""
        self._poller.start()

    def stop(self) -> None:
        """End that."""
        self._poller.stop()

    def notice(self) -> Notice | None:
        """What was found."""
        return self._poller.notice()


class _Run:
    """From one start to its stop."""

    def __init__(self, name: str, server: MetadataServer, poll_s: float, look: Look, hint: str) -> None:
        self._name, self._server, self._poll_s, self._look, self._hint = name, server, poll_s, look, hint
        self.found: Notice | None = None
        self._stop, self._process = Latch(), os.getpid()
        self._thread: threading.Thread | None = None
        self._is_told, self._silent_until = False, 0.0

    def begin(self) -> None:
        thread = threading.Thread(target=self._work, name="jaxckpt-notice", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("%s: preemption notices are not seen: the system gave no thread: %s", self._name, error)
        else:
            self._thread = thread

    def end(self) -> None:
        """Ask it to end; does not wait."""
        self._stop.open()
        if os.getpid() == self._process:  # a fork shares the connection with its parent, who goes on
            self._server.hang_up()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _work(self) -> None:
        before: float | None = None  # when the look began that was answered last, or else the first one
        while self.found is None and not self._stop.is_open():
            began = time.monotonic()
            if self._look_once(began if before is None else before) or before is None:
                before = began
            if self.found is None:
                self._stop.wait(self._poll_s)

    def _look_once(self, asked_at: float) -> bool:
        """Whether the server has answered; `asked_at`: when a notice that is there now may have come."""
        try:
            found = self._look(self._server)
        except Exception as error:  # noqa: BLE001  # a thread's edge
            if not self._stop.is_open():
                self._tell(error)
            return False
        if self._is_told:
            self._is_told = False
            _log.warning("%s: %s answers again", self._name, self._server.url)
        if found is not None:
            self.found = dataclasses.replace(found, asked_at=asked_at)
        return True

    def _tell(self, error: Exception) -> None:
        now = time.monotonic()
        if self._is_told or now < self._silent_until:
            return
        self._is_told, self._silent_until = True, now + TELL_AGAIN_S
        trace = None if isinstance(error, NoAnswerError) else error
        text = "%s: preemption notices are not seen, and are asked for again every %g s: %s; %s"
        _log.warning(text, self._name, self._poll_s, error, self._hint, exc_info=trace)

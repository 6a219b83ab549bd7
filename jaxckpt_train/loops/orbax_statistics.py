"""What Orbax's `logger` is given of each save and restore: when its parts began, and how many seconds they took."""

from __future__ import annotations

import logging
import time
from typing import Any

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.pending import PendingSave

_log = logging.getLogger("jaxckpt_train")


class StandardLogger:
    """Logs each entry to jaxckpt_train."""

    def log_entry(self, entry: Any) -> None:
        """One line, at the level INFO."""
        _log.info("%s", entry)


def checked_logger(logger: Any) -> Any:
    """The logger that is given, or the standard one.

    Raises:
        SettingsError: it has no `log_entry`.
    """
    if logger is None:
        return StandardLogger()
    if not callable(getattr(logger, "log_entry", None)):
        raise SettingsError(f"CheckpointManager: logger: expected an object with log_entry(entry), found {logger!r}")
    return logger


class CallStatistics:
    """The entry of one call, with Orbax's names.

    Args:
        event_type: "save" or "restore".
        step: which one.
        directory: of the run.
    """

    def __init__(self, event_type: str, step: int | None, directory: str) -> None:
        self._started = time.time()
        self.entry: dict[str, Any] = {"step": step, "event_type": event_type, "directory": directory}

    def part(self, name: str, started: float, ended: float | None = None) -> None:
        """Note a part of the call; `ended`: None: now."""
        seconds = max(0.0, (time.time() if ended is None else ended) - started)
        self.entry |= {f"{name}_start_time": started, f"{name}_duration_secs": seconds}

    def ended(self, name: str, logger: Any) -> None:
        """Note the whole call, and log the entry."""
        self.part(name, self._started)
        logger.log_entry(self.entry)


class EndOfSave:
    """Notices when a save ends that the next one may wait for.

    Args:
        pending: the save; None: there is none.
    """

    def __init__(self, pending: PendingSave[Any] | None) -> None:
        self.time: float | None = time.time()
        if pending is not None and not pending.done():
            self.time = None
            pending.committed.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        self.time = time.time()

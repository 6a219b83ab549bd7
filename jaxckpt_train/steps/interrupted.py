"""What interrupted saves and deletions leave in a run directory, and the names of steps that are being deleted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jaxckpt_train.errors import StorageError
from jaxckpt_train.steps.step_names import parse_step_name
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.left_overs import attempts

_DELETING = ".deleting"
_log = logging.getLogger("jaxckpt_train")


def hidden_name(name: str) -> str:
    """The name of a directory while it is being deleted."""
    return name if name.endswith(_DELETING) else f".{name}{_DELETING}"


def shown_name(name: str) -> str:
    """The name that a directory had before it was being deleted; of all others, that which they have."""
    return name[1 : -len(_DELETING)] if name.startswith(".") and name.endswith(_DELETING) else name


def half_deleted(backend: Backend, directory: str) -> list[str]:
    """The step directories whose deletion was begun and not finished."""
    return _hidden_among(entry.name for entry in backend.list(directory))


def _hidden_among(names: Iterable[str]) -> list[str]:
    return [name for name in names if shown_name(name) != name and parse_step_name(shown_name(name)) is not None]


def begun_deletions(
    backend: Backend,
    directory: str,
    committed: Collection[str],
    events: Iterable[Mapping[str, Any]],
    tell: Callable[[str], object],
) -> list[str]:
    """The step directories whose deletion was begun and not finished.

    One that could not be renamed has its own name, and what was its COMMIT has the hidden one.

    Args:
        backend: where.
        directory: of the run.
        committed: the names of its steps.
        events: of its history.
        tell: is called with the names of the steps of which these do not say so: their owner died in between. Not of
            one that is there: it has been saved anew, or brought back by a power cut.
    """
    there = [entry.name for entry in backend.list(directory)]
    hidden = _hidden_among(there)
    last = {str(event.get("name")): event["event"] for event in events if event.get("event") in ("save", "delete")}
    for name in map(shown_name, hidden):
        if last.get(name) != "delete" and name not in there:
            tell(name)
    in_place = [name for name in map(shown_name, hidden) if name in there and name not in committed]
    return in_place + [name for name in hidden if shown_name(name) not in in_place]


def remove_attempts(backend: Backend, directory: str) -> None:
    """Remove what interrupted saves left. What the disk does not let go does no harm: nobody reads it."""
    for attempt, final in attempts(backend, directory):
        if parse_step_name(final) is not None:
            _log.info("removing an interrupted attempt, %s", attempt)
            try:
                backend.remove(attempt)
            except StorageError as error:
                _log.warning("an interrupted attempt was not removed: %s", error)

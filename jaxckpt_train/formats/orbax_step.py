"""What a step of Orbax says of itself: its metadata as a manifest of ours has them, and the items that it has."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxckpt_train.errors import CorruptCheckpointError
from jaxckpt_train.formats.foreign import JSON, PYTREE
from jaxckpt_train.formats.orbax_grain import ORBAX_GRAIN
from jaxckpt_train.formats.orbax_looks import STEP_METADATA, step_number
from jaxckpt_train.store.backend import Backend, Entry
from jaxckpt_train.store.json_values import decode_told
from jaxckpt_train.store.manifest import NOT_JSON, shown
from jaxckpt_train.store.plain_files import read_whole

MAX_JSON_BYTES = 256 << 20
_END_OF_TIME_NS = 10**9 * 3600 * 24 * 365 * 8000  # later than that Python has no years; it is no time of a step
_KINDS = {
    "PyTreeCheckpointHandler": PYTREE,
    "StandardCheckpointHandler": PYTREE,
    "PyTreeHandler": PYTREE,
    "ArrayCheckpointHandler": PYTREE,
    "JaxRandomKeyCheckpointHandler": PYTREE,
    "JsonCheckpointHandler": JSON,
    "JsonHandler": JSON,
    "MetricsHandler": JSON,
    "StatefulCheckpointableHandler": ORBAX_GRAIN,
}
_OF_ANY_OBJECT = ".StatefulCheckpointableHandler"  # which has Grain's iterators write themselves, as any other object


class StepTold(NamedTuple):
    """What a step says of itself.

    Attributes:
        info: as in a manifest.
        handlers: of items, by the names of those; versions before 0.11 name none.
    """

    info: dict[str, Any]
    handlers: dict[str, str]


def read_step(backend: Backend, directory: str, entries: Sequence[Entry]) -> StepTold:
    """What a step says of itself.

    Args:
        backend: where.
        directory: of the step, or of an item.
        entries: what is in it.

    Raises:
        CorruptCheckpointError: it is no JSON.
        StorageError: it cannot be read.
    """
    info: dict[str, Any] = {}
    step = step_number(directory.rpartition("/")[2])
    if step is not None:
        info["step"] = step
    if all(entry.name != STEP_METADATA for entry in entries):
        return StepTold(info, {})
    data = bytes(memoryview(read_whole(backend, directory, STEP_METADATA, MAX_JSON_BYTES)))
    try:
        told = decode_told(data, dict[str, Any])
    except NOT_JSON as error:
        raise CorruptCheckpointError(f"{directory}/{STEP_METADATA}: expected JSON, but: {shown(error)}") from error
    metrics, custom, ended = told.get("metrics"), told.get("custom_metadata"), told.get("commit_timestamp_nsecs")
    if isinstance(metrics, Mapping):
        info["metrics"] = dict(metrics)
    if custom:
        info["custom_metadata"] = custom
    if isinstance(ended, int) and 0 <= ended < _END_OF_TIME_NS:
        time = datetime.datetime.fromtimestamp(ended / 1e9, datetime.UTC)
        info["created"] = time.isoformat(timespec="milliseconds")
    handlers = told.get("item_handlers")  # text where the step is an item itself; None for what was found without one
    found = handlers.items() if isinstance(handlers, Mapping) else ()
    return StepTold(info, {name: handler for name, handler in found if isinstance(handler, str)})


def kind_of(handler: str) -> str | None:
    """The kind of checkpointable that a handler of Orbax or Grain writes; None: it is another one's."""
    if handler.startswith("grain."):
        return ORBAX_GRAIN
    return _KINDS.get(handler.rpartition(".")[2]) if handler.startswith("orbax.") else None


def is_of_any_object(handler: str) -> bool:
    """Whether what a handler writes may be of any object of the user's, and not of Grain."""
    return handler.endswith(_OF_ANY_OBJECT)

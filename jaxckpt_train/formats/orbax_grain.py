"""The state of a data iterator of Grain in a step of Orbax: one file of each process that took part."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from jaxckpt_train.formats.foreign import ForeignValue
from jaxckpt_train.store.backend import Backend
from jaxckpt_train.store.manifest import NOT_JSON
from jaxckpt_train.store.plain_files import read_whole

ORBAX_GRAIN = "orbax_grain"
"""The kind of a checkpointable with the states of all processes by the names of their files."""
STATE_FILE = re.compile(r"process_(?P<process>[0-9]{1,9})-of-(?P<processes>[0-9]{1,9})\.(json|txt)")
_MAX_BYTES = 256 << 20


def grain_states(backend: Backend, directory: str, names: Iterable[str]) -> ForeignValue | None:
    """The states that Grain's handler has saved; None: there are none.

    What JSON holds as it is stands there as data, to be looked at; all else as the text of the file.

    Args:
        backend: where.
        directory: of the item.
        names: what is in it.

    Raises:
        CorruptCheckpointError: a file is too large.
        StorageError: one cannot be read.
    """
    files = [name for name in sorted(names) if STATE_FILE.fullmatch(name)]
    if not files:
        return None
    shown = {name: _shown(_text(backend, directory, name)) for name in files}
    return ForeignValue(ORBAX_GRAIN, msgspec.json.encode(shown))


def state_of(shown: Any) -> Any:
    """The state that stands in what `grain_states` gave, for one process.

    Raises:
        ValueError: it is text that is no JSON.
    """
    return json.loads(shown) if isinstance(shown, str) else shown


def _text(backend: Backend, directory: str, name: str) -> str:
    """What is no text becomes no JSON either: it is told when an iterator is set, as the rest of the step is sound."""
    data = bytes(memoryview(read_whole(backend, directory, name, _MAX_BYTES)))
    return data.decode(errors="backslashreplace")


def _shown(text: str) -> Any:
    try:
        state = json.loads(text)
        is_same = not isinstance(state, str) and msgspec.json.decode(msgspec.json.encode(state)) == state
    except (*NOT_JSON, ValueError, OverflowError, RecursionError):
        return text
    return state if is_same else text

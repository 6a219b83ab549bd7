"""Values that each process of a job has for itself: one file of each, or one for all where all are equal.

The state of a data iterator as JSON data, without loss.

JSON has no tuples, no numpy values, no keys but text. Each of these is written as an object with one key, its tag:

    {"__numpy__": ["<i8", null, 5]}             a scalar; integers and booleans as numbers,
    {"__numpy__": ["<f4", [2], "AACAPwAAAEA="]}  everything else as base64 of the row-major bytes
    {"__tuple__": [...]}    {"__bytes__": "..."}    {"__int__": "0x..."}  beyond 64 bits    {"__float__": "nan"}
    {"__dict__": [[key, value], ...]}           keys that are no text, or one key that is itself a tag

The fingerprint of a run's data: set while the callback saves or restores, compared for its data iterator.

CountedIterator: a position in data that cannot tell its own, as the number of items taken.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import numpy as np

from jaxckpt_train.checkpointables.base import Json, Saved, Staged
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import (
    CorruptCheckpointError,
    IteratorStateError,
    MismatchError,
    SettingsError,
    UnsupportedLeafError,
)

T = TypeVar("T")
DATA_NAME = "data"
"""The checkpointable that is the loop's data iterator."""
_fingerprint: ContextVar[str | None] = ContextVar("jaxckpt_train_fingerprint", default=None)
# What `dtype.str` is for these kinds. Numpy evaluates other texts, and may raise whatever comes of it.
_DTYPE = re.compile(r"[<>|]([biufcSU][0-9]{1,10}|[mM]8(\[[0-9]{0,10}[a-zA-Z]{1,7}\])?)")
_TAGS = frozenset({"__numpy__", "__tuple__", "__bytes__", "__int__", "__float__", "__dict__"})
_READABLE_KINDS = "biu"  # numpy kinds whose elements are written as numbers
_OTHER_KINDS = "fcmMSU"  # and those written as bytes; objects, records and foreign dtypes are refused


class CountedIterator(Generic[T]):
    """An iterator over any data that saves its position as the number of items taken so far.

    For data without `get_state` and `set_state`: `tf.data`, PyTorch loaders, generators, NumPy arrays. After a resume
    the data goes on with the first item that the saved loop had not taken, if `items_from(n)` gives the same items in
    every process that runs it: derive shuffles and random numbers from a seed and the item's number.

    In a job of several processes each counts its own items; where all have taken equally many, as in a loop that takes
    one item for each update, a job of another number of processes can resume.

    Args:
        items_from: called with a number n, gives the items from the n-th on (the first is number 0). Called when the
            first item is taken, and again after a restore.

    Raises:
        SettingsError: `items_from` cannot be called.

    For example:

        def batches(start):
            for number in itertools.count(start):
                epoch, position = divmod(number, len(images) // 64)
                order = np.random.default_rng([seed, epoch]).permutation(len(images))
                yield images[order[position * 64 : (position + 1) * 64]]

        state, data = ckpt.resume(state, CountedIterator(batches))
    """

    def __init__(self, items_from: Callable[[int], Iterable[T]]) -> None:
        if not callable(items_from):
            raise SettingsError(
                f"CountedIterator: expected a function that gives the items from a number on, found {items_from!r:.100}"
            )
        self._items_from = items_from
        self._items: Iterator[T] | None = None
        self._taken = 0

    @property
    def taken(self) -> int:
        """How many items were taken."""
        return self._taken

    def __iter__(self) -> CountedIterator[T]:
        return self

    def __next__(self) -> T:
        if self._items is None:
            self._items = iter(self._items_from(self._taken))
        item = next(self._items)
        self._taken += 1
        return item

    def __repr__(self) -> str:
        return f"CountedIterator({self._items_from!r}, taken={self._taken})"

    def get_state(self) -> dict[str, int]:
        """The position: {"taken": number of items taken}."""
        return {"taken": self._taken}

    def set_state(self, state: Any) -> None:
        """Go to a position that `get_state` gave.

        Raises:
            IteratorStateError: it is no such position.
        """
        taken = state.get("taken") if isinstance(state, dict) and len(state) == 1 else None
        if not isinstance(taken, int) or isinstance(taken, bool) or taken < 0:
            raise IteratorStateError(
                f"CountedIterator: expected a position as {{'taken': 12}}, found {state!r:.200}; the checkpoint was "
                "saved with other data: use that, or leave the data out of what is restored"
            )
        self._taken, self._items = taken, None


@contextlib.contextmanager
def with_fingerprint(fingerprint: str | None) -> Iterator[None]:
    """What is saved or restored meanwhile, on this thread, has this fingerprint.

    Args:
        fingerprint: says what data this is; None leaves each handler its own.
    """
    token = _fingerprint.set(fingerprint)
    try:
        yield
    finally:
        _fingerprint.reset(token)


def current_fingerprint() -> str | None:
    """The fingerprint that holds on this thread now."""
    return _fingerprint.get()


def check_fingerprint(name: str, saved: str | None, found: str | None) -> None:
    """Refuse data that is not what was saved.

    Args:
        name: of the checkpointable.
        saved, found: the two fingerprints; nothing is compared if one is None.

    Raises:
        IteratorStateError: they differ.
    """
    if saved is not None and found is not None and saved != found:
        raise IteratorStateError(
            f"iterator {name!r}: saved with fingerprint {saved!r}, found {found!r}; use the data it was saved with, "
            "or leave it out of what is restored, to start the data from the beginning"
        )


class _MalformedTagError(ValueError):
    """A tag with other content than `encode_state` writes; not told again by each tag around it."""


def encode_state(state: Any) -> Json:
    """A copy of the state as plain JSON data; `decode_state` gives back the same values of the same types.

    Args:
        state: None, bool, int, float, str, bytes, numpy scalars and arrays, and lists, tuples and dicts of these.

    Raises:
        UnsupportedLeafError: a value of another type; the message names its path inside the state.
    """
    try:
        return _encode(state, "state")
    except RecursionError as error:
        raise UnsupportedLeafError("iterator state: nested too deep, or it contains itself") from error


def decode_state(data: Json) -> Any:
    """The state that `encode_state` wrote, in containers of its own.

    Raises:
        ValueError: the data has a tag with other content than `encode_state` writes.
    """
    if isinstance(data, list):
        return [decode_state(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, content),) = data.items()
        if tag in _TAGS:
            try:
                return _decode_tagged(tag, content)
            except _MalformedTagError:
                raise
            except (TypeError, ValueError, OverflowError) as error:
                raise _MalformedTagError(f"iterator state: malformed {tag}: {reprlib.repr(content)}") from error
    return {key: decode_state(item) for key, item in data.items()}


def _encode(value: Any, path: str) -> Json:
    # Exact types: a subclass (an OrderedDict, an IntEnum, a named tuple) would come back as something less.
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else {"__int__": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"__float__": value.hex()}
    if kind is str:
        return _checked_text(value, path)
    if kind is bytes:
        return {"__bytes__": base64.b64encode(value).decode()}
    if kind is list:
        return [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind is tuple:
        return {"__tuple__": [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if kind is dict:
        return _encode_dict(value, path)
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _encode_numpy(value, path)
    raise UnsupportedLeafError(
        f"iterator state: {path} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold without losing "
        "something; let get_state return plain data: None, bool, int, float, str, bytes, numpy, list, tuple, dict"
    )


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(f"iterator state: {path} is text that is not valid Unicode: {text!r}") from error
    return text


def _encode_dict(value: dict[Any, Any], path: str) -> Json:
    items = [(key, _encode(item, f"{path}[{key!r}]")) for key, item in value.items()]
    if all(type(key) is str for key in value) and not (len(value) == 1 and _TAGS.issuperset(value)):
        return {_checked_text(key, f"a key of {path}"): item for key, item in items}
    return {"__dict__": [[_encode(key, f"a key of {path}"), item] for key, item in items]}


def _encode_numpy(value: Any, path: str) -> Json:
    dtype = value.dtype
    if dtype.kind not in _READABLE_KINDS + _OTHER_KINDS:
        raise UnsupportedLeafError(
            f"iterator state: {path} is numpy of dtype {dtype}, which JSON cannot hold; use numbers, booleans or text"
        )
    array = np.asarray(value)
    if dtype.kind in "SU" and np.any(array[()] != value):
        raise UnsupportedLeafError(f"iterator state: {path} is numpy text that ends with zeros, which numpy would drop")
    flat: list[Any] = array.ravel().tolist()
    is_array = isinstance(value, np.ndarray)
    data: Json = base64.b64encode(array.tobytes()).decode()
    if dtype.kind in _READABLE_KINDS:
        data = flat if is_array else flat[0]
    return {"__numpy__": [dtype.str, list(value.shape) if is_array else None, data]}


def _decode_tagged(tag: str, content: Json) -> Any:
    if tag == "__numpy__":
        return _decode_numpy(*content)
    if tag == "__tuple__":
        return tuple(decode_state(item) for item in content)
    if tag == "__bytes__":
        return base64.b64decode(content, validate=True)
    if tag == "__int__":
        return int(content, 16)
    if tag == "__float__":
        return float.fromhex(content)
    return {decode_state(key): decode_state(item) for key, item in content}


def _decode_numpy(dtype_text: str, shape: list[int] | None, data: Json) -> Any:
    if not _DTYPE.fullmatch(dtype_text):
        raise ValueError(f"dtype {dtype_text!r:.100}")
    dtype = np.dtype(dtype_text)
    if dtype.kind in _READABLE_KINDS:
        array = np.array(data, dtype=dtype).reshape(shape or ())
    else:
        array = np.ndarray(shape or (), dtype, buffer=bytearray(base64.b64decode(data, validate=True)))
    return array[()] if shape is None else array


@dataclasses.dataclass(frozen=True)
class PerProcess:
    """Marks plain data that each process of a job has for itself, and that may differ, as a NumPy generator's state.

    Each process saves its own and gets its own back, in a job of as many processes. Where all were equal, any number
    of processes gets it. None, bool, int, float, str, bytes, lists, tuples, dicts, NumPy scalars and arrays. As the
    target of a load give `PerProcess(None)`.

    For example:

        manager.save(step, {"state": state, "rng": PerProcess(generator.bit_generator.state)})
    """

    value: Any


class PerProcessHandler:
    """A PerProcess."""

    kind = "per_process"
    early = True

    def handles(self, value: object) -> bool:
        """Whether it is marked so."""
        return isinstance(value, PerProcess)

    def is_current(self, value: PerProcess) -> bool:
        """Whether it stays the current one, as what changes in place does: it does not."""
        return False

    def stage(self, value: PerProcess) -> Staged:
        """The data as it is now.

        Raises:
            UnsupportedLeafError: it is no plain data.
        """
        return stage_own(value.value)

    def restore(self, target: Any, saved: Saved) -> PerProcess:
        """What this process has saved.

        Raises:
            MismatchError: there is a target, and another number of processes has saved what is not equal in all.
        """
        return PerProcess(own_value(saved, is_wanted=target is not None))


def stage_own(value: Any) -> Staged:
    """Plain data of this process."""
    same = {"processes": current().processes, "state": encode_state(value)}
    return Staged(value=same, same=same["state"])


def refuse_missing(saved: Saved, processes: object) -> None:
    """Raise CorruptCheckpointError if there are neither one value for all nor one of each of so many processes."""
    if saved.values > 1 and saved.values != processes:
        raise CorruptCheckpointError(
            f"{saved.name!r}: expected a value of each of {processes} processes, or one for all, found {saved.values}"
        )


def own_value(saved: Saved, *, is_wanted: bool = True) -> Any:
    """What `stage_own` took in this process; without `is_wanted`, of any process where there is none of this one.

    Raises:
        MismatchError: another number of processes has saved what is not equal in all.
        CorruptCheckpointError: the saved data is not what `stage_own` gives.
    """
    data: Json = saved.value()
    if not isinstance(data, dict) or "state" not in data:
        raise CorruptCheckpointError(f"{saved.name!r}: expected a dict with processes, state; found {data!s:.200}")
    refuse_missing(saved, data.get("processes"))
    if is_wanted and saved.values > 1 and saved.values != current().processes:
        raise MismatchError(
            f"{saved.name!r}: each of {saved.values} processes saved a value of its own, found {current().processes} "
            f"processes; restart with {saved.values}, or leave it out of what is restored, to begin it anew"
        )
    try:
        return decode_state(data["state"])
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{saved.name!r}: the saved value cannot be read: {error}") from error

"""Positions of data iterators, and values that each process of a job has for itself.

`CountedIterator` and `PerProcess` are public. `encode_state` stores the state of an iterator as JSON data without loss.
JSON has no tuples, no numpy values, and only text as keys. Each of these is written as an object with one key, its tag:

    {"__numpy__": ["<i8", null, 5]}             a scalar; integers and booleans as numbers,
    {"__numpy__": ["<f4", [2], "AACAPwAAAEA="]}  everything else as base64 of the row-major bytes
    {"__tuple__": [...]}    {"__bytes__": "..."}    {"__int__": "0x..."}  beyond 64 bits    {"__float__": "nan"}
    {"__dict__": [[key, value], ...]}           keys that are not text, or a single key that is itself a tag
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

from jaxckpt_train._validation import refuse
from jaxckpt_train.checkpointables.base import Json, Saved, Staged
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import (
    CorruptCheckpointError,
    IteratorStateError,
    MismatchError,
    UnsupportedLeafError,
)

T = TypeVar("T")
DATA_NAME = "data"
"""The name of the checkpointable with the loop's data iterator."""
_fingerprint: ContextVar[str | None] = ContextVar("jaxckpt_train_fingerprint", default=None)
# The values of `dtype.str` for these kinds. Numpy evaluates other texts, which may raise any error.
_DTYPE = re.compile(r"[<>|]([biufcSU][0-9]{1,10}|[mM]8(\[[0-9]{0,10}[a-zA-Z]{1,7}\])?)")
_TAGS = frozenset({"__numpy__", "__tuple__", "__bytes__", "__int__", "__float__", "__dict__"})
_READABLE_KINDS = "biu"  # numpy kinds whose elements are written as numbers
_OTHER_KINDS = "fcmMSU"  # numpy kinds whose elements are written as bytes; objects and records are refused


class CountedIterator(Generic[T]):
    """An iterator over any data whose saved position is the number of items taken so far.

    Use it for data without `get_state` and `set_state`: `tf.data`, PyTorch loaders, generators, NumPy arrays. After a
    resume, the data continues with the first item that the saved loop had not taken. This requires that `items_from(n)`
    yields the same items in every process that runs it, so derive shuffles and random numbers from a seed and the
    number of the item.

    In a multi-process job, each process counts its own items. If all of them have taken the same number, as in a loop
    that takes one item for each update, a job with another number of processes can resume.

    Args:
        items_from: called with a number n, returns the items from the n-th on (the first is number 0). It is called
            when the first item is taken, and again after a restore.

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
            refuse("CountedIterator", "a function that returns the items from a number on", items_from)
        self._items_from = items_from
        self._items: Iterator[T] | None = None
        self._taken = 0

    @property
    def taken(self) -> int:
        """The number of items taken."""
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
        """Return the position: {"taken": number of items taken}."""
        return {"taken": self._taken}

    def set_state(self, state: Any) -> None:
        """Go to a position that `get_state` returned.

        Raises:
            IteratorStateError: `state` is not such a position.
        """
        taken = state.get("taken") if isinstance(state, dict) and len(state) == 1 else None
        if not isinstance(taken, int) or isinstance(taken, bool) or taken < 0:
            raise IteratorStateError(
                f"CountedIterator: expected a position such as {{'taken': 12}}, found {state!r:.200}; the position "
                "was saved by another kind of iterator: pass that kind, or omit the data from the restore"
            )
        self._taken, self._items = taken, None


@contextlib.contextmanager
def with_fingerprint(fingerprint: str | None) -> Iterator[None]:
    """Save and restore with this fingerprint of the data in this thread; None: with none."""
    token = _fingerprint.set(fingerprint)
    try:
        yield
    finally:
        _fingerprint.reset(token)


def current_fingerprint() -> str | None:
    """Return the fingerprint that this thread currently uses."""
    return _fingerprint.get()


def check_fingerprint(name: str, saved: str | None) -> None:
    """Raise IteratorStateError if the saved fingerprint differs from the current one; None is not compared."""
    found = _fingerprint.get()
    if saved is not None and found is not None and saved != found:
        raise IteratorStateError(
            f"iterator {name!r}: saved with fingerprint {saved!r}, found {found!r}; use the data that it was saved "
            "with, or omit it from the restore, to start the data from the beginning"
        )


class _MalformedTagError(ValueError):
    """A tag with other content than `encode_state` writes. Enclosing tags do not wrap it again."""


def encode_state(state: Any) -> Json:
    """Copy the state as plain JSON data, from which `decode_state` restores the same values of the same types.

    Raises UnsupportedLeafError with the path of a value of another type.
    """
    try:
        return _encode(state, "state")
    except RecursionError as error:
        raise UnsupportedLeafError("iterator state: it is nested too deeply, or it contains itself") from error


def decode_state(data: Json) -> Any:
    """Return the state that `encode_state` wrote, in new containers. Raise ValueError for other content of a tag."""
    if isinstance(data, list):
        return [decode_state(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1 and not _TAGS.isdisjoint(data):
        ((tag, content),) = data.items()
        try:
            return _decode_tagged(tag, content)
        except _MalformedTagError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise _MalformedTagError(f"iterator state: malformed {tag}: {reprlib.repr(content)}") from error
    return {key: decode_state(item) for key, item in data.items()}


def _encode(value: Any, path: str) -> Json:
    # Compare exact types: a subclass (an OrderedDict, an IntEnum, a named tuple) would be restored as its base class.
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedLeafError(
                f"iterator state: {path} is text that is not valid Unicode: {value!r}"
            ) from error
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else {"__int__": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"__float__": value.hex()}
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
        f"iterator state: {path} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold without loss; let "
        "get_state return plain data: None, bool, int, float, str, bytes, numpy, list, tuple, dict"
    )


def _encode_dict(value: dict[Any, Any], path: str) -> Json:
    items = [(_encode(key, f"a key of {path}"), _encode(item, f"{path}[{key!r}]")) for key, item in value.items()]
    if all(type(key) is str for key in value) and not (len(value) == 1 and _TAGS.issuperset(value)):
        return dict(items)
    return {"__dict__": [[key, item] for key, item in items]}


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
    """Marks plain data that each process of a job has for itself, such as the state of a NumPy generator.

    Each process saves its own value, and gets it back in a job with the same number of processes. If all values are
    equal, any number of processes can restore them. The value may contain None, bool, int, float, str, bytes, lists,
    tuples, dicts, NumPy scalars and arrays. Pass `PerProcess(None)` as the target of a load.

    For example:

        manager.save(step, {"state": state, "rng": PerProcess(generator.bit_generator.state)})
    """

    value: Any


def stage_own(value: Any) -> Staged:
    """Stage plain data of this process."""
    same = {"processes": current().processes, "state": encode_state(value)}
    return Staged(value=same, same=same["state"])


def refuse_missing(saved: Saved, processes: object) -> None:
    """Raise CorruptCheckpointError unless there is one value for all processes, or one for each of them."""
    if saved.values > 1 and saved.values != processes:
        raise CorruptCheckpointError(
            f"{saved.name!r}: expected a value for each of {processes} processes, or one for all, found {saved.values}"
        )


def own_value(saved: Saved, *, is_wanted: bool = True) -> Any:
    """Return the value that `stage_own` staged in this process; unless it `is_wanted`, that of any process will do."""
    data: Json = saved.value()
    if not isinstance(data, dict) or "state" not in data:
        raise CorruptCheckpointError(f"{saved.name!r}: expected a dict with processes, state, found {data!s:.200}")
    refuse_missing(saved, data.get("processes"))
    if is_wanted and saved.values > 1 and saved.values != current().processes:
        raise MismatchError(
            f"{saved.name!r}: each of {saved.values} processes saved its own value, found {current().processes} "
            f"processes; restart with {saved.values}, or omit it from the restore, to start it afresh"
        )
    try:
        return decode_state(data["state"])
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{saved.name!r}: the saved value cannot be read: {error}") from error

"""The recorder of a resume proof: runs a plan in this process, records each update, and interrupts the run as planned.

A value is recorded as its leaves: dtype, shape and a digest of the bytes of each. Batches are recorded when the loop
takes them, by a wrapper around the data iterator (`ObservedData`).
"""

from __future__ import annotations

import dataclasses
import faulthandler
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from jaxckpt_train import loop as loop_observer
from jaxckpt_train.checkpointables.base import NOTHING
from jaxckpt_train.checkpointables.handlers import handler_of, keeps_itself_current
from jaxckpt_train.checkpointables.iterator_state import DATA_NAME
from jaxckpt_train.errors import UnsupportedLeafError
from jaxckpt_train.loop import LoopState
from jaxckpt_train.manager import StepManager
from jaxckpt_train.pytree.flatten import flatten, is_key_array
from jaxckpt_train.pytree.leaves import EMPTY, ROOT, join, leaf_filter
from jaxckpt_train.store.manifest import digest_function, encode_value
from jaxckpt_train.store.segment import dtype_name
from jaxckpt_train.testing.processes import (
    OBJECT,
    SMALL_BYTES,
    Batch,
    Between,
    Leaf,
    Leaves,
    Plan,
    Resumed,
    Stopped,
    Update,
    add_record,
    digests_of_files,
    run,
)

MOST_DEEP = 20  # levels of nested records
_digest = digest_function("xxh3-128")
_PYTHON = (bool, int, float, complex, str, bytes)
_PASSED_ON = ("__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__len__")


def leaves_of(checkpointables: Mapping[str, Any]) -> Leaves:
    """Return the leaves of checkpointables as a save would take them; a path starts with the checkpointable's name."""
    found: Leaves = {}
    for name, value in checkpointables.items():
        staged = handler_of(value).stage(value)
        if staged.write_files is not None:
            files = digests_of_files(staged.write_files)
            found |= {f"{name}/{path}": Leaf("file", (), digest.decode()) for path, digest in files.items()}
        elif staged.tree is NOTHING:
            content = encode_value(staged.value)
            found[name] = _leaf("JSON", (len(content),), content)
        else:
            found |= _tree_leaves(name, staged.tree)
    return found


def metrics_of(metrics: Mapping[str, Any] | None) -> Leaves:
    """Return the leaves of the metrics of an update, in their order."""
    found: Leaves = {}
    for name, value in (metrics or {}).items():
        found |= _tree_leaves(str(name), value)
    return found


def batch_of(batch: Any) -> Batch:
    """Return the record of an element of the data."""
    leaves = _tree_leaves("batch", batch)
    whole = msgspec.json.encode([(name, leaf.kind, leaf.shape, leaf.digest) for name, leaf in leaves.items()])
    return Batch(_digest(whole), leaves)


def host_random() -> dict[str, str]:
    """Return digests of the states of the global random generators of Python and NumPy, by name."""
    found = {"random": _digest(repr(random.getstate()).encode())}
    if "numpy.random" in sys.modules:
        state: Any = np.random.get_state(legacy=False)
        found["np.random"] = _digest(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)))
    return found


def _tree_leaves(name: str, tree: Any, depth: int = 0) -> Leaves:
    try:
        flat = flatten(tree)
    except UnsupportedLeafError:  # only data and metrics: a state with this leaf could not be saved
        return {name: _unknown(tree)}
    found: Leaves = {}
    for path, value in zip(flat.names, flat.leaves, strict=True):
        array = _host_array(value)
        full = name if path == ROOT else join(name, path)
        content = _content_of(value) if array is None and depth < MOST_DEEP else None
        if content is not None:
            found |= _tree_leaves(full, content, depth + 1)
        else:
            found[full] = _python_leaf(value) if array is None else _array_leaf(value, array)
    return found


def _content_of(value: Any) -> Any:
    """Return the content of a dataclass or of an array of objects, or None for any other value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.hasobject else None


def _host_array(value: Any) -> np.ndarray | None:
    """Return the data of an array or of PRNG keys; None: another value, or an array of objects."""
    if value is None or value is EMPTY or type(value) in _PYTHON:
        return None
    if is_key_array(value):
        value = jax.random.key_data(value)
    array = np.asarray(jax.device_get(value) if isinstance(value, jax.Array) else value)
    return None if array.dtype.hasobject else array


def _array_leaf(value: Any, array: np.ndarray) -> Leaf:
    kind = f"key<{jax.random.key_impl(value)}>" if is_key_array(value) else dtype_name(array.dtype)
    if array.nbytes <= SMALL_BYTES:
        return _leaf(kind, array.shape, array.tobytes())
    content = np.ascontiguousarray(array)
    return Leaf(kind, array.shape, _digest(memoryview(content.reshape(-1).view(np.uint8))))


def _python_leaf(value: Any) -> Leaf:
    if value is None or value is EMPTY:
        return Leaf("none" if value is None else "empty", (), "")
    if type(value) not in _PYTHON:
        return _unknown(value)
    content = (value.hex() if type(value) is float else repr(value)).encode(errors="backslashreplace")
    return _leaf(f"python {type(value).__name__}", (), content)


def _leaf(kind: str, shape: tuple[int, ...], content: bytes) -> Leaf:
    return Leaf(kind, shape, _digest(content), content if len(content) <= SMALL_BYTES else b"")


def _unknown(value: Any) -> Leaf:
    """Return a leaf of which only the type can be compared, because its repr may contain an address."""
    return Leaf(f"{OBJECT}{type(value).__module__}.{type(value).__qualname__}", (), "")


class ObservedData:
    """A wrapper of `data` that calls `took` with each element before the loop gets it."""

    def __init__(self, data: Any, took: Callable[[Any], None]) -> None:
        self._observed_data, self._observed_took = data, took

    @property  # type: ignore[misc]  # isinstance asks for it
    def __class__(self) -> type:
        """The class of the data, so that `isinstance` accepts the wrapper."""
        kind: type = type(self._observed_data)
        return kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observed_data, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_observed_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._observed_data, name, value)

    def __repr__(self) -> str:
        return repr(self._observed_data)

    def __iter__(self) -> Any:
        iterator = iter(self._observed_data)
        return self if iterator is self._observed_data else observed(iterator, self._observed_took)


def _next(self: ObservedData) -> Any:
    element = next(self._observed_data)
    self._observed_took(element)
    return element


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: ObservedData, *arguments: Any, **named: Any) -> Any:
        return getattr(self._observed_data, name)(*arguments, **named)

    return call


def can_be_observed(data: object) -> bool:
    """Return whether data is an iterator, or an iterable with a position (`get_state`)."""
    return hasattr(data, "__next__") or (hasattr(data, "__iter__") and hasattr(data, "get_state"))


def observed(data: Any, took: Callable[[Any], None]) -> Any:
    """Wrap `data` so that `took` is called with each element."""
    special: dict[str, Any] = {name: _passed_on(name) for name in _PASSED_ON if hasattr(type(data), name)}
    if hasattr(type(data), "__next__"):
        special["__next__"] = _next
    return type("ObservedData", (ObservedData,), special)(data, took)


def plain(value: Any) -> Any:
    """Return the data inside a wrapper, or the value itself."""
    return value._observed_data if issubclass(type(value), ObservedData) else value


class InterruptedRunError(Exception):
    """Ends a run with `how="raise"`. The loop should not catch it."""


class Recorder:
    """The observer that records the training loop of this process."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan, self._ignores = folder, plan, leaf_filter(plan.ignored)
        self._thread = threading.get_ident()
        self._batches: list[Batch] = []
        self._elsewhere = 0
        self._after: Update | None = None  # the last update, until the next one starts
        self._in_place: dict[str, Any] = {}  # its values that the loop may change in place
        self._polled = False  # since then

    def resumed(self, manager: StepManager, values: dict[str, Any]) -> dict[str, Any]:
        """Record the call of `resume`, and wrap the data."""
        self._thread = threading.get_ident()
        leaves = leaves_of({name: value for name, value in values.items() if name != DATA_NAME})
        start = Resumed(manager.restored_step, manager.directory, tuple(values), leaves, host_random())
        add_record(self._folder, start)
        data = values.get(DATA_NAME)
        return {**values, DATA_NAME: observed(data, self._took)} if can_be_observed(data) else values

    def _took(self, element: Any) -> None:
        if threading.get_ident() == self._thread:
            self._end_between(compares=True)
            self._batches.append(batch_of(element))
        else:
            self._elsewhere += 1

    def polled(self) -> None:
        """Record a call of `ckpt.poll()` between two updates."""
        self._polled = True

    def _end_between(self, compares: bool) -> None:
        """Record what was observed before the next update; `compares` is False if that update is already complete."""
        after, self._after = self._after, None
        if after is None:
            return
        now, before = leaves_of(self._in_place) if compares else {}, after.leaves
        changed = tuple(name for name, leaf in now.items() if name in before and not leaf.same(before[name]))
        if self._polled or changed:
            add_record(self._folder, Between(after.step, self._polled, changed))

    def update_completed(self, manager: StepManager, loop: LoopState) -> None:
        """Record the update. Interrupt the run if the plan says so."""
        assert loop.last is not None
        self._end_between(compares=False)
        loop.last = {name: plain(value) for name, value in loop.last.items()}
        saved = {name: value for name, value in loop.last.items() if name != DATA_NAME}
        metrics = metrics_of(loop.metrics)
        ignored = tuple(filter(self._ignores, metrics))
        update = Update(
            loop.step,
            tuple(self._batches),
            self._elsewhere,
            {name: leaf for name, leaf in metrics.items() if name not in ignored},
            leaves_of(saved),
            host_random(),
            ignored,
        )
        add_record(self._folder, update)
        self._batches, self._elsewhere = [], 0
        if loop.step == self._plan.stop_at:
            self._interrupt(manager, loop)
        self._after, self._polled = update, False
        self._in_place = {name: value for name, value in saved.items() if keeps_itself_current(value)}

    def _interrupt(self, manager: StepManager, loop: LoopState) -> None:
        """End the run as planned. A kill waits for the pending save, so that each proof resumes at the same step."""
        if self._plan.saves_first and self._plan.how != "preempt":
            manager.save(loop.step, loop.last or {}, force=True)
        if self._plan.how == "kill":
            manager.wait()
        add_record(self._folder, Stopped(self._plan.stop_at or 0))
        if self._plan.how == "raise":
            raise InterruptedRunError(f"the resume proof interrupts the run in update {self._plan.stop_at}")
        signal.raise_signal(signal.SIGKILL if self._plan.how == "kill" else signal.SIGTERM)


def main(folder: str) -> None:
    """Run the plan in the folder of a process."""
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT)  # sent at the time limit, to show where a hanging process waits
    plan = Plan.read(Path(folder))
    loop_observer.observe(Recorder(Path(folder), plan))
    run(plan.target, Path(plan.directory))

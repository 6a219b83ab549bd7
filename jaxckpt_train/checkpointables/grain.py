"""The handler of Grain's iterators: it saves their position in the data and checks that a restore can use it.

This module never imports Grain: if the program has not imported it, no object can be a Grain iterator. It knows Grain's
classes by their names, and assumes that an unknown one counts elements of one process's share.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxckpt_train.checkpointables.base import ORBAX_GRAIN, Json, JsonValue, Saved, Staged
from jaxckpt_train.checkpointables.iterator_state import (
    check_fingerprint,
    current_fingerprint,
    decode_state,
    encode_state,
    refuse_missing,
)
from jaxckpt_train.distributed.jax_service import current
from jaxckpt_train.errors import CorruptCheckpointError, IteratorStateError

# Nodes that yield one element for each element of their parent, in the same order.
_ONE_TO_ONE = frozenset({"_MapDatasetIterator", "ThreadPrefetchDatasetIterator", "MapMapDataset"})
_DATA_LOADER = "DataLoaderIterator"
_LISTS = (list, tuple, np.ndarray)
_log = logging.getLogger("jaxckpt_train")
_FIELDS = frozenset({"grain_version", "iterator", "workers", "processes", "process", "fingerprint", "state"})
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# The errors that set_state raises for a state that does not fit. An error of reading the data is none of these.
_REFUSALS = (LookupError, ValueError, TypeError, AttributeError, StopIteration)
_START_OVER = "or omit it from the restore, to start the data from the beginning"


class GrainHandler:
    """The handler of the iterators of Grain's `DataLoader` and of its `Dataset` pipelines."""

    kind = "grain"
    restores = (ORBAX_GRAIN,)
    early = True

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def handles(self, value: object) -> bool:
        """Return whether it is a Grain iterator."""
        return isinstance(value, _iterator_classes())

    def stage(self, value: Any) -> Staged:
        """Return the position after the last element of the iterator, with what a restore compares."""
        mark_absl_flags_parsed()
        state = _take_state(value)
        if _is_data_loader(value):
            self._warn_of_addresses(state)
        self._warn_of_another_order(state)
        job = current()
        same = {
            "grain_version": _grain_version(),
            "iterator": _name_of(value),
            "workers": _worker_count(value),
            "processes": job.processes,
            "counts": list(_what_it_counts(value)),
            "fingerprint": current_fingerprint(),
            "state": state,
        }
        return Staged(value={**same, "process": job.process}, same=same)

    def restore(self, target: Any, saved: Saved) -> Any:
        """Set the target to the saved position, let it start prefetching, and return it. A refusal changes nothing.

        Without a target, return the saved data as a dict, which does not require Grain.
        """
        if target is None:
            if saved.kind == ORBAX_GRAIN:
                return JsonValue(saved.value())
            data, state = _read(saved)
            return {**data, "state": state}
        mark_absl_flags_parsed()
        if saved.kind == ORBAX_GRAIN:  # Orbax records nothing but the state
            return _set_position(target, _own_state(saved), saved.name, None)
        data, state = _read(saved)
        version = data["grain_version"]
        if version != _grain_version():
            _log.warning(
                "iterator %r was saved with Grain %s, this is Grain %s; Grain only guarantees that a state works with "
                "the version that created it",
                saved.name,
                version,
                _grain_version(),
            )
        self._check_run(target, data, saved)
        self._warn_of_another_order(data["state"])
        return _set_position(target, state, saved.name, version)

    def _check_run(self, target: Any, data: Json, saved: Saved) -> None:
        name = saved.name
        if (data["iterator"] == _DATA_LOADER) != _is_data_loader(target):
            raise IteratorStateError(
                f"iterator {name!r}: saved from a {data['iterator']}, found a {_name_of(target)}; pass an iterator of "
                f"the same kind, {_START_OVER}"
            )
        check_fingerprint(name, data["fingerprint"])
        job = current()
        refuse_missing(saved, data["processes"])
        if data["processes"] != job.processes:
            _check_processes(target, data, job.processes, saved)
        elif saved.values > 1 and data["process"] != job.process:
            raise CorruptCheckpointError(
                f"iterator {name!r}: the file of process {job.process} says that it is of process {data['process']}"
            )
        saved_workers, workers = data["workers"], _worker_count(target)
        if saved_workers is not None and workers is not None and saved_workers != workers:
            raise IteratorStateError(
                f"iterator {name!r}: saved with {saved_workers} worker processes, found {workers}; the order of the "
                f"data depends on them: set the worker count back to {saved_workers}, {_START_OVER}"
            )

    def _warn_of_another_order(self, state: Json) -> None:
        version = _grain_version() or ""
        if "window shuffle" not in self._warned and loses_its_order(state, version):
            self._warned.add("window shuffle")
            _log.warning(
                "Grain %s does not resume a WindowShuffleIterDataset exactly: after a resume, its elements have a "
                "different order; install Grain 0.2.16 or newer",
                version,
            )

    def _warn_of_addresses(self, state: Json) -> None:
        """Warn early that Grain, which compares these texts, will refuse them in the next process."""
        for key in ("sampler", "data_source"):
            text = state.get(key) if isinstance(state, dict) else None
            if isinstance(text, str) and _ADDRESS.search(text) and text not in self._warned:
                self._warned.add(text)
                _log.warning(
                    "Grain identifies the %s of this DataLoader by its repr, %.200s, which contains an address, so a "
                    "restart will be refused; give the class a __repr__ that identifies its data",
                    key.replace("_", " "),
                    text,
                )


def _check_processes(target: Any, data: Json, processes: int, saved: Saved) -> None:
    """Refuse a position from another number of processes, unless it has the same meaning for this one."""
    name, saved_counts, counts = saved.name, data.get("counts"), _what_it_counts(target)
    before = _Counted(*saved_counts) if isinstance(saved_counts, list) and len(saved_counts) == 2 else _SHARE
    several = "" if data["processes"] == 1 else "es"
    problem = f"iterator {name!r}: saved by {data['processes']} process{several}, found {processes}"
    same_number = f"restart with {data['processes']}, {_START_OVER}"
    if saved.values > 1 or before.unit == "share" or before.unit != counts.unit:
        raise IteratorStateError(
            f"{problem}; the position counts elements of the data of one process, and is not valid for others: use "
            f"grain.experimental.ElasticIterator, or dataset.shuffle()[i::n].batch(b // n).to_iter_dataset(), in this "
            f"order; {same_number}"
        )
    if before.records != counts.records:
        raise IteratorStateError(
            f"{problem}; the position counts batches of {before.records} records in all processes together, but a "
            f"batch here has {counts.records}: set the batch size of each process to {before.records} // {processes}, "
            f"or {same_number}"
        )
    _log.info("%s: all continue from the common position, in %s of all data", problem, before.unit)


def _take_state(iterator: Any) -> Json:
    """Return the state as JSON data that shares nothing with the iterator."""
    state = iterator.get_state()
    return encode_state(json.loads(state) if _is_data_loader(iterator) else state)


def _read(saved: Saved) -> tuple[Json, Any]:
    """Return the saved data, and the decoded state in it."""
    data = saved.value()
    if not isinstance(data, dict) or not data.keys() >= _FIELDS:
        expected = ", ".join(sorted(_FIELDS))
        raise CorruptCheckpointError(f"iterator {saved.name!r}: expected a dict with {expected}, found {data!s:.200}")
    try:
        return data, decode_state(data["state"])
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"iterator {saved.name!r}: the saved state cannot be read") from error


def _set_position(target: Any, state: Any, name: str, version: str | None) -> Any:
    """Set the state if its structure fits the pipeline, and start prefetching. A refused state changes nothing."""
    encoded, is_loader = _take_state(target), _is_data_loader(target)
    before = decode_state(encoded)
    differences = list(_differences(state, before, "state", True))
    if differences:
        versions = "" if version in (None, _grain_version()) else f", or by Grain {version}"
        raise IteratorStateError(
            f"iterator {name!r}: the saved state belongs to another pipeline{versions}:\n  "
            + "\n  ".join(differences)
            + f"\nbuild the pipeline that it was saved with, {_START_OVER}"
        )
    try:
        target.set_state(_for_set_state(state, is_loader))
    except _REFUSALS as error:
        with contextlib.suppress(*_REFUSALS):
            target.set_state(_for_set_state(decode_state(encoded), is_loader))
        raise IteratorStateError(_refused(target, state, before, name)) from error
    start_prefetch = getattr(target, "start_prefetch", None)
    if start_prefetch is not None:
        with contextlib.suppress(NotImplementedError):  # raised by most iterators of Grain before 0.2.15
            start_prefetch()
    return target


def _for_set_state(state: Any, is_loader: bool) -> Any:
    return json.dumps(state, indent=4).encode() if is_loader else state


def _refused(target: Any, saved: Any, found: Any, name: str) -> str:
    if _is_data_loader(target) and isinstance(saved, dict) and isinstance(found, dict):
        for key in ("worker_count", "sampler", "data_source"):  # what Grain compares
            if saved.get(key) != found.get(key):
                return (
                    f"iterator {name!r}: the DataLoader has another {key.replace('_', ' ')}: "
                    f"saved {saved.get(key)!s:.300}, found {found.get(key)!s:.300}; restore into the DataLoader that "
                    "it was saved with (Grain compares the repr, so a class whose repr contains an address needs its "
                    f"own __repr__), {_START_OVER}"
                )
    return (
        f"iterator {name!r}: {type(target).__name__} refused the saved state (the error above says why): "
        f"saved {saved!s:.300}, found {found!s:.300}; use the data and pipeline that it was saved with, {_START_OVER}"
    )


def mark_absl_flags_parsed() -> None:
    """Mark absl's flags as parsed, unless they already are or absl is not imported.

    Grain reads absl flags when a pipeline with worker processes is asked for its state or its first element. In a
    program that `absl.app.run` did not start, such as every Hydra app, it fails then with `UnparsedFlagAccessError`.
    After the mark, all flags have their defaults; `app.run` may still parse them later.
    """
    flags: Any = sys.modules.get("absl.flags")
    if flags is not None and not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _iterator_classes() -> tuple[type, ...]:
    grain: Any = sys.modules.get("grain")
    elastic = getattr(getattr(grain, "experimental", None), "ElasticIterator", None)
    found = [getattr(grain, _DATA_LOADER, None), getattr(grain, "DatasetIterator", None), elastic]
    return tuple(each for each in found if isinstance(each, type))


def _is_data_loader(iterator: object) -> bool:
    """Return whether it is the iterator of a `DataLoader`, whose state is JSON bytes, and not of a `Dataset`."""
    taken = getattr(sys.modules.get("grain"), _DATA_LOADER, None)
    return isinstance(taken, type) and isinstance(iterator, taken)


def _name_of(iterator: object) -> str:
    """Return the name of the iterator's class, which is the same for all iterators of a DataLoader."""
    return _DATA_LOADER if _is_data_loader(iterator) else type(iterator).__name__


def _grain_version() -> str | None:
    """Return the version of the imported Grain, or None if it is not imported."""
    grain = sys.modules.get("grain")
    version: str | None = getattr(grain, "__version__", None)
    if grain is not None and version is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("grain")
    return version


def _worker_count(iterator: Any) -> int | None:
    """Return the number of worker processes of the pipeline, or None if this version of Grain does not show it."""
    if _is_data_loader(iterator):
        options = getattr(getattr(iterator, "_data_loader", None), "multiprocessing_options", None)
        return getattr(options, "num_workers", None)
    count, nodes = 0, [iterator]
    while nodes:
        node = nodes.pop()
        nodes.extend(getattr(node, "_parents", ()))
        count += type(node).__name__ == "ProcessPrefetchDatasetIterator"
        count += getattr(getattr(node, "_multiprocessing_options", None), "num_workers", 0)  # for an elastic iterator
        shards = getattr(node, "_datasets", ())  # for an interleave; do not evaluate a lazy MapDataset of data sets
        if isinstance(shards, (list, tuple)):
            count += sum(type(shard).__name__ == "ProcessPrefetchIterDataset" for shard in shards)
    return count


class _Counted(NamedTuple):
    """What a position counts: "records" of all data, "batches" of all processes, or elements of a "share"."""

    unit: str
    records: int = 0  # in a batch of all processes together, if it counts batches


_SHARE = _Counted("share")


def _what_it_counts(iterator: Any) -> _Counted:
    """Return what the position of an iterator counts.

    For `dataset.shuffle()[i::n].batch(b // n).to_iter_dataset()` it counts batches of `b` records, also without the
    slice. If the batch comes after `to_iter_dataset`, or a shuffle or repeat after the slice, it counts elements of
    this process's share, which another number of processes divides differently.
    """
    iterator = getattr(iterator, "_default_iterator", iterator)  # set if an ElasticIterator is its own iterator
    for node in _chain(iterator):
        name = type(node).__name__
        if name == "_ElasticMapDatasetIterator":
            return _Counted("records")
        if name == "PrefetchDatasetIterator":
            return _of_map(getattr(node, "_map_parent", None))
        if name not in _ONE_TO_ONE:
            return _SHARE
    return _SHARE


def _of_map(dataset: Any) -> _Counted:
    batch, is_global = 0, False
    for node in _chain(dataset):
        name = type(node).__name__
        if name == "SliceMapDataset":
            step = _whole(node, "_step")
            if is_global or not batch or not _is_strided_slice(node, step):
                return _SHARE
            if step > 1:
                return _Counted("batches", batch * step)
        if name == "BatchMapDataset" and not is_global:
            batch = (batch or 1) * _whole(node, "_batch_size")
        elif name not in _ONE_TO_ONE:
            is_global = True  # if this shuffles a share, the loop finds the slice before it
        if len(getattr(node, "_parents", ())) > 1:
            return _SHARE  # a mix or a zip may combine shares
    return _Counted("batches", batch) if batch else _SHARE


def _is_strided_slice(node: Any, step: int) -> bool:
    """Return whether a slice is `[i::n]` with i below n. Contiguous parts start elsewhere for another n."""
    start, stop, length = (getattr(node, name, None) for name in ("_start", "_stop", "_parent_length"))
    return type(start) is int and 0 <= start < step and stop is not None and stop == length


def _whole(node: Any, name: str) -> int:
    """Return a positive number from an attribute, or 0 if this version of Grain has no such attribute."""
    found = getattr(node, name, None)
    return found if type(found) is int and found > 0 else 0


def _chain(node: Any) -> Iterator[Any]:
    """Yield a node and its ancestors, as long as each has exactly one parent."""
    while node is not None:
        yield node
        parents = getattr(node, "_parents", ())
        node = parents[0] if isinstance(parents, (list, tuple)) and len(parents) == 1 else None


def loses_its_order(state: Any, version: str) -> bool:
    """Return whether the state has a window shuffle, which Grain before 0.2.16 resumes in another order."""
    return [int(part) for part in re.findall(r"\d+", version)[:3]] < [0, 2, 16] and _has_window_shuffle(state)


def _has_window_shuffle(state: Any) -> bool:
    if isinstance(state, dict):
        return state.keys() >= _WINDOW_SHUFFLE or any(map(_has_window_shuffle, state.values()))
    return isinstance(state, list) and any(map(_has_window_shuffle, state))


def _own_state(saved: Saved) -> Any:
    """Return the state of this process, in the form that Grain accepts, from those that Orbax saved by file name."""
    states, job = saved.value(), current()
    if not isinstance(states, dict):
        raise CorruptCheckpointError(f"iterator {saved.name!r}: expected states by file name, found {states!s:.200}")
    own = f"process_{job.process}-of-{job.processes}"
    name = next((file for file in states if file.rpartition(".")[0] == own), None)
    if name is None:
        raise IteratorStateError(
            f"iterator {saved.name!r}: expected a state of {own}, found those of {', '.join(states):.200} that Orbax "
            "saved; each position counts elements of the data of one process: restart with as many processes, "
            f"{_START_OVER}"
        )
    try:
        return json.loads(states[name]) if isinstance(states[name], str) else states[name]
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"iterator {saved.name!r}: expected the state of a Grain iterator as JSON in {name}: {error}"
        ) from error


# The keys in the states of Grain's own iterators (0.2.18). Other keys are unknown. `future_states` is newer.
_OPTIONAL = frozenset({"future_states"})
_WINDOW_SHUFFLE = frozenset({"parent_window_start_state", "window_index", "pos_in_window"})
_GRAIN_NODES = frozenset(
    frozenset(keys.split())
    for keys in (
        "next_index",
        "parent epoch",
        "parent position cache_filled",
        "parent next_index_in_buffer",
        "parent count_elements_read",
        "parent index_for_rng",
        "parent counter",
        "parent batch_idx",
        "parent next_row counter",
        "parent_state remainder_slices elements_from_buffer_after_checkpoint",
        "parent_window_start_state window_index pos_in_window",
        "parents",
        "parents index stop",
        "next_index_in_cycle next_index_in_datasets iterators_in_use_indices iterators_in_use_states exhausted",
        "row_group index_within_row_group",
        "reader_offset",
        "global_next_index",
        "version last_seen_indices last_worker_index worker_count sampler data_source",
    )
)


def _differences(saved: Any, found: Any, path: str, strict: bool) -> Iterator[str]:
    """Yield why a saved state cannot belong to the pipeline with the state `found`, one line for each difference.

    The function compares neither values nor parts that change while a pipeline runs: optional values, the contents of
    lists, the data sets that an interleave has open, and the states of iterators that are not Grain's own.
    """
    if not isinstance(saved, dict) or not isinstance(found, dict):
        is_other = any(isinstance(saved, kind) != isinstance(found, kind) for kind in (dict, _LISTS))
        if strict and saved is not None and found is not None and is_other:
            yield f"{path}: saved {_form(saved)}; found {_form(found)}"
        return
    grains = any(side.keys() - _OPTIONAL in _GRAIN_NODES for side in (saved, found))
    same = saved.keys() - _OPTIONAL == found.keys() - _OPTIONAL
    if (grains and not same) or (strict and saved and found and saved.keys().isdisjoint(found)):
        yield f"{path}: saved {_form(saved)}; found {_form(found)}"
        return
    for key in (key for key in saved if key in found and key not in _OPTIONAL):
        inner = f"{path}[{key!r}]"
        if grains and key == "parents":
            yield from _parents_differences(saved[key], found[key], inner)
        elif grains and key == "iterators_in_use_states":
            yield from _interleave_differences(saved, found, inner)
        else:
            yield from _differences(saved[key], found[key], inner, grains)


def _parents_differences(saved: Any, found: Any, path: str) -> Iterator[str]:
    """Yield the differences between the parents of a mix or a zip, which are a list, or a dict by name."""
    one, other = (dict(enumerate(side)) if isinstance(side, (list, tuple)) else side for side in (saved, found))
    if not isinstance(one, dict) or not isinstance(other, dict) or one.keys() != other.keys():
        yield f"{path}: saved {_form(one)}; found {_form(other)}"
        return
    for key in one:
        yield from _differences(one[key], other[key], f"{path}[{key!r}]", True)


def _interleave_differences(saved: dict[Any, Any], found: dict[Any, Any], path: str) -> Iterator[str]:
    """Yield the differences of an interleave. Its open data sets may have any structure, so compare equal ones only."""
    states = [side["iterators_in_use_states"] for side in (saved, found)]
    indices = [side["iterators_in_use_indices"] for side in (saved, found)]
    if not all(isinstance(part, (list, tuple)) for part in states + indices):
        return
    if len(states[0]) != len(states[1]):
        yield f"{path}: saved {len(states[0])} interleaved iterators; found {len(states[1])}"
        return
    for i, (index, other, one, two) in enumerate(zip(*indices, *states, strict=False)):
        if index == other:
            yield from _differences(one, two, f"{path}[{i}]", True)


def _form(value: Any) -> str:
    if not isinstance(value, dict):
        return f"a {type(value).__name__}"
    names = [str(key) for key in value]
    return f"keys {', '.join(names[:12])}{' and more' if len(names) > 12 else ''}"

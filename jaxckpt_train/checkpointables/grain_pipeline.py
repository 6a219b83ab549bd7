"""What can be seen of a Grain pipeline from outside: its kind, its workers, the structure of its state.

Grain is never imported here: where nobody imported it, nothing can be a Grain iterator.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

DATA_LOADER = "DataLoaderIterator"

# The states of Grain's own iterators (0.2.18), by their keys. Of other keys nothing is known; `future_states` is newer.
_OPTIONAL = frozenset({"future_states"})
_INTERLEAVE_KEYS = (
    "next_index_in_cycle next_index_in_datasets iterators_in_use_indices iterators_in_use_states exhausted"
)
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
        _INTERLEAVE_KEYS,
        "row_group index_within_row_group",
        "reader_offset",
        "global_next_index",
        "version last_seen_indices last_worker_index worker_count sampler data_source",
    )
)

_WINDOW_SHUFFLE = frozenset({"parent_window_start_state", "window_index", "pos_in_window"})


def iterator_classes() -> tuple[type, ...]:
    """The classes of Grain's iterators; none where Grain was not imported."""
    grain: Any = sys.modules.get("grain")
    elastic = getattr(getattr(grain, "experimental", None), "ElasticIterator", None)
    found = [getattr(grain, DATA_LOADER, None), getattr(grain, "DatasetIterator", None), elastic]
    return tuple(each for each in found if isinstance(each, type))


def is_data_loader(iterator: object) -> bool:
    """Whether it is the iterator of a `DataLoader`, whose state is JSON bytes, and not of a `Dataset`."""
    taken = getattr(sys.modules.get("grain"), DATA_LOADER, None)
    return isinstance(taken, type) and isinstance(iterator, taken)


def name_of(iterator: object) -> str:
    """The name of its class; of a DataLoader's always the same."""
    return DATA_LOADER if is_data_loader(iterator) else type(iterator).__name__


def describe(name: str) -> str:
    """What `name_of` gave, for people."""
    return "DataLoader's iterator" if name == DATA_LOADER else f"Dataset's iterator ({name})"


def grain_version() -> str | None:
    """The version of the imported Grain; None if nobody imported it."""
    grain = sys.modules.get("grain")
    version = getattr(grain, "__version__", None)
    if grain is None or isinstance(version, str):
        return version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("grain")
    return None


def loses_its_order(state: Any, version: str) -> bool:
    """Whether the state has a window shuffle, to which this version of Grain (before 0.2.16) gives another order."""
    return [int(part) for part in re.findall(r"\d+", version)[:3]] < [0, 2, 16] and _has_window_shuffle(state)


def _has_window_shuffle(state: Any) -> bool:
    if isinstance(state, dict):
        return state.keys() >= _WINDOW_SHUFFLE or any(map(_has_window_shuffle, state.values()))
    return isinstance(state, list) and any(map(_has_window_shuffle, state))


def worker_count(iterator: Any) -> int | None:
    """How many worker processes the pipeline has; None where this version of Grain does not show it."""
    if is_data_loader(iterator):
        options = getattr(getattr(iterator, "_data_loader", None), "multiprocessing_options", None)
        count = getattr(options, "num_workers", None)
        return count if isinstance(count, int) else None
    count, nodes = 0, [iterator]
    while nodes:
        node = nodes.pop()
        nodes.extend(getattr(node, "_parents", ()))
        count += type(node).__name__ == "ProcessPrefetchDatasetIterator"
        count += getattr(getattr(node, "_multiprocessing_options", None), "num_workers", 0)  # an elastic iterator
        shards = getattr(node, "_datasets", ())  # an interleave; a lazy MapDataset of data sets is not evaluated
        if isinstance(shards, (list, tuple)):
            count += sum(type(shard).__name__ == "ProcessPrefetchIterDataset" for shard in shards)
    return count


def structure_differences(saved: Any, found: Any) -> list[str]:
    """Where a saved state cannot be one of the pipeline that has the state `found`: one line of text each.

    Values are not compared, nor what legitimately changes while a pipeline runs: what is None at times, what is in
    lists, which data sets an interleave has open, and what iterators that are not Grain's own keep for themselves.
    """
    return list(_differences(saved, found, "state", True))


def _differences(saved: Any, found: Any, path: str, strict: bool) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(found, dict):
        yield from _dict_differences(saved, found, path, strict)
    elif strict and saved is not None and found is not None:
        kinds = [_kind_of(value) for value in (saved, found)]
        if kinds[0] != kinds[1]:
            yield f"{path}: saved {kinds[0]}, found {kinds[1]}"


def _dict_differences(saved: dict[Any, Any], found: dict[Any, Any], path: str, strict: bool) -> Iterator[str]:
    grains = _is_grains(saved) or _is_grains(found)
    same = saved.keys() - _OPTIONAL == found.keys() - _OPTIONAL
    if (grains and not same) or (strict and saved and found and saved.keys().isdisjoint(found)):
        yield f"{path}: saved keys {_keys_text(saved)}; found keys {_keys_text(found)}"
        return
    for key in (key for key in saved if key in found):
        inner = f"{path}[{key!r}]"
        if grains and key == "parents":
            yield from _children_differences(saved[key], found[key], inner)
        elif grains and key == "iterators_in_use_states":
            yield from _interleave_differences(saved, found, inner)
        elif key not in _OPTIONAL:
            yield from _differences(saved[key], found[key], inner, grains)


def _children_differences(saved: Any, found: Any, path: str) -> Iterator[str]:
    """Of the parents of a mix or a zip: a list, or a dict by name."""
    pair = [dict(enumerate(side)) if isinstance(side, (list, tuple)) else side for side in (saved, found)]
    if not all(isinstance(side, dict) for side in pair) or pair[0].keys() != pair[1].keys():
        yield f"{path}: saved {_children_text(saved)}; found {_children_text(found)}"
        return
    for key in pair[0]:
        yield from _differences(pair[0][key], pair[1][key], f"{path}[{key!r}]", True)


def _interleave_differences(saved: dict[Any, Any], found: dict[Any, Any], path: str) -> Iterator[str]:
    """Of an interleave: what it has open may be of any structure, so only states of the same data set are compared."""
    states = [side["iterators_in_use_states"] for side in (saved, found)]
    indices = [side["iterators_in_use_indices"] for side in (saved, found)]
    if not all(isinstance(part, (list, tuple)) for part in states + indices):
        return
    if len(states[0]) != len(states[1]):
        yield f"{path}: saved {len(states[0])} iterators side by side; found {len(states[1])}"
        return
    for i, (one, other) in enumerate(zip(*indices, strict=False)):
        if one == other and i < len(states[0]):
            yield from _differences(states[0][i], states[1][i], f"{path}[{i}]", True)


def _is_grains(state: Mapping[Any, Any]) -> bool:
    return state.keys() - _OPTIONAL in _GRAIN_NODES


def _kind_of(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with keys {_keys_text(value)}"
    return "a list" if isinstance(value, (list, tuple, np.ndarray)) else "a plain value"


def _keys_text(state: Mapping[Any, Any]) -> str:
    names = [str(key) for key in state]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "(none)"


def _children_text(parents: Any) -> str:
    if isinstance(parents, (list, tuple)):
        return f"{len(parents)} parents"
    return f"parents {_keys_text(parents)}" if isinstance(parents, dict) else _kind_of(parents)

"""Grain pipelines of every kind for the tests, a checkpointable from memory, and elements as bytes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grain
import msgspec
import numpy as np

from jaxckpt_train.checkpointables import grain as grain_handler
from jaxckpt_train.checkpointables.base import NOTHING, Json, Staged
from jaxckpt_train.checkpointables.grain import GrainHandler
from jaxckpt_train.checkpointables.iterator_state import with_fingerprint

Pipeline = Callable[[], Any]
x = grain.experimental
SOURCE = np.arange(400, dtype=np.int64)
IS_NEW = hasattr(x, "multithread_prefetch")  # not one of Grain 0.2.10 to 0.2.14


@dataclasses.dataclass
class FakeSaved:
    """A saved checkpointable in memory; its value goes through JSON as on disk."""

    content: Json
    name: str = "data"
    kind: str = "grain"
    values: int = 1
    process: int = 0

    def value(self) -> Json:
        return msgspec.json.decode(msgspec.json.encode(self.content))

    def tree(self, like: Any) -> Any:
        raise AssertionError("a Grain iterator has no tree")

    def directory(self) -> Path:
        raise AssertionError("a Grain iterator has no directory")


class Halve(grain.transforms.Map):
    def map(self, element: Any) -> Any:
        return element / 2


class Twice(grain.experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element: Any) -> Any:
        return [element, -element]


class Jitter(grain.transforms.RandomMap):
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return element + rng.random()


def loader(source: Any = SOURCE, *operations: Any, records: int = 400, workers: int = 0) -> grain.DataLoader:
    sampler = grain.samplers.IndexSampler(
        num_records=records, shard_options=grain.sharding.NoSharding(), shuffle=True, seed=1
    )
    batch = grain.transforms.Batch(4)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[*operations, batch], worker_count=workers)


def mapped() -> Any:
    return grain.MapDataset.source(SOURCE).seed(3).shuffle().map(lambda x: x * 2)


def streamed(threads: int = 2, buffer: int = 8) -> Any:
    return mapped().to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer))


def sequences() -> Any:
    return mapped().map(lambda x: {"tokens": np.arange(x % 7 + 1)}).to_iter_dataset()


def five_kinds_of_datasets() -> list[Any]:
    parts = [grain.MapDataset.source(SOURCE[i * 80 : i * 80 + 20 + 10 * i]) for i in range(5)]
    return [
        parts[0],
        x.RepeatIterDataset(parts[1].to_iter_dataset(), 2) if IS_NEW else parts[1].repeat(2).to_iter_dataset(),
        parts[2].repeat(2),
        parts[3].to_iter_dataset(),
        parts[4],
    ]


class Countdown(grain.DatasetIterator):
    """An iterator of the user, with NumPy values and changing keys in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(5)
        self.left = np.int64(300)
        self.seen: dict[int, np.ndarray] = {}

    def __next__(self) -> np.ndarray:
        self.left -= np.int64(1)
        self.seen[int(self.left) % 3] = self.rng.random(2, dtype=np.float32)
        return self.left + sum(self.seen.values())

    def get_state(self) -> dict[str, Any]:
        return {"left": self.left, "seen": dict(self.seen), "rng": self.rng.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        assert type(state["left"]) is np.int64
        self.left, self.seen, self.rng.bit_generator.state = state["left"], dict(state["seen"]), state["rng"]


class LiveCountdown(Countdown):
    """An iterator whose returned state changes with it."""

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"seen": self.seen}


class CountdownDataset(grain.IterDataset):
    def __init__(self, iterator: type[Countdown] = Countdown) -> None:
        super().__init__()
        self.iterator = iterator

    def __iter__(self) -> Countdown:
        return self.iterator()


def zipped(count: int) -> Any:
    return iter(x.ZipIterDataset([streamed() for _ in range(count)]))


def interleaved(cycle_length: int) -> Any:
    return iter(x.InterleaveIterDataset(five_kinds_of_datasets(), cycle_length=cycle_length))


def mixed(*names: str) -> Any:
    return iter(grain.IterDataset.mix({name: streamed() for name in names}))


PIPELINES: dict[str, Pipeline] = {
    "DataLoader": lambda: iter(loader()),
    "DataLoader, operations": lambda: iter(loader(SOURCE, Halve(), Jitter())),
    "DataLoader, flat map": lambda: iter(loader(SOURCE, Twice())),
    "map": lambda: iter(mapped().batch(4)),
    "map, repeat": lambda: iter(mapped().batch(30, drop_remainder=True).repeat(3)),
    "map, filter": lambda: iter(mapped().filter(lambda v: v % 3 == 0)),
    "map, window shuffle": lambda: iter(x.WindowShuffleMapDataset(mapped(), window_size=8, seed=1).batch(4)),
    "prefetch": lambda: iter(streamed().batch(4)),
    "no prefetch": lambda: iter(streamed(0, 0).batch(4)),
    "iter, window shuffle": lambda: iter(x.WindowShuffleIterDataset(streamed(), window_size=16, seed=1).batch(4)),
    "iter, repeat": lambda: iter(x.RepeatIterDataset(streamed().batch(30), 3)),
    "iter, filter": lambda: iter(streamed().filter(lambda v: v % 3 == 0).batch(4)),
    "iter, random map": lambda: iter(streamed().seed(4).random_map(Jitter()).batch(4)),
    "iter, map with index": lambda: iter(streamed().map_with_index(lambda i, v: i + v).batch(4)),
    "iter, flat map": lambda: iter(x.FlatMapIterDataset(streamed(), Twice()).batch(4)),
    "iter, limit": lambda: iter(x.LimitIterDataset(streamed().batch(4), 30)),
    "iter, cache": lambda: iter(x.RepeatIterDataset(x.CacheIterDataset(streamed().batch(30)), 3)),
    "iter, rebatch": lambda: iter(x.RebatchIterDataset(streamed().batch(6), 4)),
    "iter, zip": lambda: iter(x.ZipIterDataset([streamed(), streamed().filter(lambda v: v % 3 == 0)]).batch(4)),
    "iter, mix": lambda: iter(
        grain.IterDataset.mix([streamed().seed(1), streamed().filter(lambda v: v % 3 == 0)], [0.4, 0.6]).batch(4)
    ),
    "iter, mix by name": lambda: iter(grain.IterDataset.mix({"a": streamed(), "b": streamed()}, {"a": 0.3, "b": 0.7})),
    "interleave": lambda: iter(x.InterleaveIterDataset(five_kinds_of_datasets(), cycle_length=2).batch(4)),
    "interleave, repeat": lambda: iter(
        x.RepeatIterDataset(x.InterleaveIterDataset(five_kinds_of_datasets(), cycle_length=3).batch(20), 3)
    ),
    "thread prefetch": lambda: iter(x.ThreadPrefetchIterDataset(streamed().batch(4), prefetch_buffer_size=3)),
    "threads": lambda: iter(x.multithread_prefetch(streamed().batch(4), num_threads=3, buffer_size=2)),
    "first fit packing": lambda: iter(
        x.FirstFitPackIterDataset(sequences(), num_packing_bins=4, length_struct={"tokens": 16})
    ),
    "concat then split": lambda: iter(x.ConcatThenSplitIterDataset(sequences(), length_struct={"tokens": 9})),
    "elastic": lambda: iter(
        x.ElasticIterator(mapped(), global_batch_size=4, shard_options=grain.sharding.NoSharding())
    ),
    "elastic, not iterated": lambda: x.ElasticIterator(
        mapped(), global_batch_size=4, shard_options=grain.sharding.NoSharding()
    ),
    "a user's": lambda: iter(CountdownDataset().map(lambda v: v + 1).batch(2)),
    "a user's, live": lambda: iter(CountdownDataset(LiveCountdown)),
    "a user's, wrapped": lambda: iter(x.WindowShuffleIterDataset(CountdownDataset(), window_size=7, seed=1)),
}
# Pipelines that older versions of Grain lack, or do not resume exactly.
NEWER = frozenset(
    (
        "DataLoader, flat map",
        "iter, window shuffle",
        "iter, repeat",
        "iter, cache",
        "iter, rebatch",
        "iter, mix by name",
        "interleave, repeat",
        "threads",
        "a user's, wrapped",
    )
)
EXACT = {name: pipeline for name, pipeline in PIPELINES.items() if IS_NEW or name not in NEWER}


def raw(element: Any) -> Any:
    """Return an element as bytes, for exact comparisons."""
    if isinstance(element, dict):
        return {key: raw(item) for key, item in element.items()}
    if isinstance(element, (list, tuple)):
        return [raw(item) for item in element]
    array = np.asarray(element)
    return array.dtype.str, array.shape, array.tobytes()


def take(iterator: Iterator[Any], count: int) -> list[Any]:
    return [raw(next(iterator)) for _ in range(count)]


class HandlerInJob(GrainHandler):
    """The handler in one process of a job, with a fingerprint of the data."""

    def __init__(self, processes: int = 1, process: int = 0, fingerprint: str | None = None) -> None:
        super().__init__()
        self._job, self._fingerprint = SimpleNamespace(processes=processes, process=process), fingerprint

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        with mock.patch.object(grain_handler, "current", return_value=self._job), with_fingerprint(self._fingerprint):
            yield

    def stage(self, value: Any) -> Staged:
        with self._within():
            return super().stage(value)

    def restore(self, target: Any, saved: Any) -> Any:
        with self._within():
            return super().restore(target, saved)


def saved_from(iterator: Any, handler: GrainHandler | None = None) -> FakeSaved:
    staged = (handler or GrainHandler()).stage(iterator)
    assert isinstance(staged, Staged)
    assert staged.tree is NOTHING
    assert staged.write_files is None
    return FakeSaved(staged.value)

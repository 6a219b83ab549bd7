"""Grain iterators: what a restore compares, and that a refused target keeps its position."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pytest

from jaxckpt_train.checkpointables.base import Json
from jaxckpt_train.checkpointables.grain import GrainHandler
from jaxckpt_train.checkpointables.iterator_state import with_fingerprint
from jaxckpt_train.errors import CorruptCheckpointError, IteratorStateError, UnsupportedLeafError
from jaxckpt_train.store.threads import paused_collection
from tests.support.grain_pipelines import (
    IS_NEW,
    PIPELINES,
    SOURCE,
    Countdown,
    FakeSaved,
    HandlerInJob,
    interleaved,
    loader,
    mapped,
    mixed,
    raw,
    saved_from,
    streamed,
    take,
    x,
    zipped,
)

if not IS_NEW:
    pytest.skip("half of these pipelines need Grain 0.2.15", allow_module_level=True)


def assert_refused(
    target: Any, saved: FakeSaved, match: str, handler: GrainHandler | None = None
) -> IteratorStateError:
    """Assert that a restore fails with this text and that the target keeps its state."""
    state = target.get_state()
    with pytest.raises(IteratorStateError, match=match) as caught:
        (handler or GrainHandler()).restore(target, saved)
    assert target.get_state() == state
    return caught.value


@pytest.mark.parametrize(
    ("saved", "target", "match"),
    [
        (
            "map",
            "iter, repeat",
            r"(?s)another pipeline:.*state: saved keys next_index; found keys parent, epoch\nbuild",
        ),
        ("iter, repeat", "map", r"state: saved keys parent, epoch; found keys next_index"),
        ("iter, repeat", "iter, window shuffle", "saved keys parent, epoch; found keys parent_window_start_state"),
        ("iter, zip", "iter, mix", "saved keys parents; found keys parents, index, stop"),
        ("iter, mix", "iter, mix by name", r"state\['parents'\]: saved keys 0, 1; found keys a, b"),
        ("interleave", "interleave, repeat", "saved keys next_index_in_cycle, .*; found keys parent, epoch"),
        ("a user's", "map", "saved keys left, seen, rng; found keys next_index"),
        ("map", "a user's", "saved keys next_index; found keys left, seen, rng"),
        (
            "a user's, wrapped",
            "iter, window shuffle",
            r"state\['parent_window_start_state'\]: saved keys left, seen, rng",
        ),
        ("DataLoader, flat map", "DataLoader", "saved keys parent, next_index_in_buffer; found keys version"),
        ("first fit packing", "concat then split", "saved keys parent, next_row, counter; found keys parent_state"),
    ],
)
def test_the_state_of_another_pipeline_is_refused(saved: str, target: str, match: str) -> None:
    iterator, other = PIPELINES[saved](), PIPELINES[target]()
    take(iterator, 3)
    take(other, 2)
    expected = PIPELINES[target]()
    take(expected, 2)
    assert_refused(other, saved_from(iterator), match)
    assert take(other, 5) == take(expected, 5)


@pytest.mark.parametrize(
    ("saved", "target", "match"),
    [
        (zipped(2), zipped(3), r"state\['parents'\]: saved keys 0, 1; found keys 0, 1, 2"),
        (interleaved(2), interleaved(3), r"iterators_in_use_states.*saved 2 interleaved iterators; found 3"),
        (mixed("a", "b"), mixed("a", "c"), r"state\['parents'\]: saved keys a, b; found keys a, c"),
    ],
)
def test_a_pipeline_with_other_parts_is_refused(saved: Any, target: Any, match: str) -> None:
    assert_refused(target, saved_from(saved), match)


class Anywhere(grain.DatasetIterator):  # type: ignore[misc]
    """An iterator of a user whose `set_state` accepts whatever it gets."""

    def __init__(self, position: Any) -> None:
        super().__init__()
        self._position = position

    def __next__(self) -> Any:
        return self._position

    def get_state(self) -> Any:
        return self._position

    def set_state(self, state: Any) -> None:
        self._position = state


@pytest.mark.parametrize(("saved", "found"), [([3, 4], 7), (7, [3, 4]), ((1,), "a"), (np.ones(2), 1), ({"a": 1}, 1)])
def test_list_or_dict_for_another_value_is_refused(saved: Any, found: Any) -> None:
    assert_refused(Anywhere(found), saved_from(Anywhere(saved)), "state: saved .*; found ")


def test_state_that_newer_grain_extends_is_not_refused() -> None:
    saved = saved_from(PIPELINES["interleave"]())
    saved.content["state"].pop("future_states", None)
    fresh = GrainHandler().restore(PIPELINES["interleave"](), saved)
    assert take(fresh, 5) == take(PIPELINES["interleave"](), 5)


@pytest.mark.parametrize(
    ("saved", "target", "match"),
    [
        (
            "DataLoader",
            "map",
            r"iterator 'data': saved from a DataLoaderIterator, found a PrefetchDatasetIterator",
        ),
        ("map", "DataLoader", "saved from a PrefetchDatasetIterator, found a DataLoaderIterator"),
    ],
)
def test_data_loader_and_dataset_are_not_exchanged(saved: str, target: str, match: str) -> None:
    assert_refused(PIPELINES[target](), saved_from(PIPELINES[saved]()), match)


def test_another_fingerprint_is_refused() -> None:
    saved = saved_from(PIPELINES["map"](), HandlerInJob(fingerprint="books v1"))
    match = "'books v1', found 'books v2'"
    assert_refused(PIPELINES["map"](), saved, match, HandlerInJob(fingerprint="books v2"))
    with with_fingerprint("books v2"):
        assert_refused(PIPELINES["map"](), saved, match)
    HandlerInJob(fingerprint="books v1").restore(PIPELINES["map"](), saved)
    HandlerInJob(fingerprint="books v2").restore(PIPELINES["map"](), saved_from(PIPELINES["map"]()))
    GrainHandler().restore(PIPELINES["map"](), saved)


def test_other_process_count_is_refused() -> None:
    saved = saved_from(PIPELINES["map"](), HandlerInJob(processes=4))
    saved.values = 4
    match = "saved by 4 processes, found 1"
    assert_refused(PIPELINES["map"](), saved, match)


def test_position_file_of_another_process_is_corrupt() -> None:
    saved = saved_from(PIPELINES["map"](), HandlerInJob(processes=4))
    saved.values = 4
    with pytest.raises(CorruptCheckpointError, match=r"process 3 .* process 0"):
        HandlerInJob(processes=4, process=3).restore(PIPELINES["map"](), saved)


def sharded(process: int, processes: int, batch: int, order: str = "batch last") -> Any:
    """Return an iterator of every n-th of 96 records for one of n processes."""
    records = grain.MapDataset.source(SOURCE[:96])
    if order == "shuffle last":
        return iter(records[process::processes].shuffle(seed=1).batch(batch).to_iter_dataset())
    mine = records.shuffle(seed=1)[process::processes]
    if order == "batch of a stream":
        return iter(mine.to_iter_dataset().batch(batch))
    return iter(mine.map(lambda record: record + 1).batch(batch).to_iter_dataset().map(lambda batch: batch - 1))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 8), (4, 1), (1, 4)])
def test_global_batch_position_fits_any_process_count(before: int, after: int) -> None:
    straight = take(sharded(0, 1, 16), 6)
    iterators = [sharded(process, before, 16 // before) for process in range(before)]
    for iterator in iterators:
        take(iterator, 3)
    saved = [saved_from(iterator, HandlerInJob(processes=before)) for iterator in iterators]
    assert all(each.content == saved[0].content for each in saved)
    seen = set()
    for process in range(after):
        fresh = sharded(process, after, 16 // after)
        HandlerInJob(processes=after, process=process).restore(fresh, saved[0])
        seen |= {int(record) for batch in fresh for record in batch}
    first = {int(value) for batch in straight[:3] for value in np.frombuffer(batch[2], np.int64)}
    assert len(first) == 48
    assert seen == set(range(96)) - first


def test_elastic_iterator_resumes_with_any_process_count() -> None:
    def elastic(process: int, processes: int) -> Any:
        records = grain.MapDataset.source(SOURCE[:96]).shuffle(seed=1)
        options = grain.sharding.ShardOptions(process, processes)
        return iter(grain.experimental.ElasticIterator(records, global_batch_size=16, shard_options=options))

    iterator = elastic(1, 4)
    take(iterator, 2)
    saved, seen = saved_from(iterator, HandlerInJob(processes=4, process=1)), []
    for process in range(2):
        fresh = elastic(process, 2)
        HandlerInJob(processes=2, process=process).restore(fresh, saved)
        seen += [int(record) for batch in fresh for record in batch]
    assert len(seen) == len(set(seen)) == 64


@pytest.mark.parametrize(
    ("order", "batch", "match"),
    [
        ("batch of a stream", 8, "position counts elements of the data of one process"),
        ("shuffle last", 8, "position counts elements of the data of one process"),
        ("batch last", 4, "of 16 records .* has 8: set the batch size .* to 16 // 2"),
    ],
)
def test_position_in_shard_needs_same_process_count(order: str, batch: int, match: str) -> None:
    saved = saved_from(sharded(0, 4, 4, order), HandlerInJob(processes=4))
    handler = HandlerInJob(processes=2)
    assert_refused(sharded(0, 2, batch, order), saved, f"saved by 4 processes, found 2; .*{match}", handler)
    HandlerInJob(processes=4).restore(sharded(0, 4, 4, order), saved)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage collection while Python registers a semaphore of Grain: one freed meanwhile causes a warning."""
    with paused_collection():
        yield


@pytest.mark.usefixtures("no_collection")
def test_other_worker_count_is_refused_before_start() -> None:
    saved, target = iter(loader()), iter(loader(workers=2))
    match = "0 worker processes, found 2"
    assert_refused(target, saved_from(saved), match)
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    assert_refused(iter(streamed().batch(4).mp_prefetch(options)), saved_from(PIPELINES["prefetch"]()), match)
    elastic = x.ElasticIterator(mapped(), 4, grain.sharding.NoSharding(), multiprocessing_options=options)
    assert saved_from(iter(elastic)).content["workers"] == 2
    assert saved_from(iter(x.RepeatIterDataset(streamed().mp_prefetch(options)))).content["workers"] == 2


def test_other_sampler_or_source_is_refused() -> None:
    saved = saved_from(iter(loader()))
    target = iter(loader(records=399))
    error = assert_refused(
        target, saved, r"another sampler: saved IndexSampler\(num_records=400.*found .*399.*; restore"
    )
    assert isinstance(error.__cause__, ValueError)
    error = assert_refused(iter(loader(list(SOURCE))), saved, "another data source: saved .*ndarray.*, found .*list")
    assert isinstance(error.__cause__, ValueError)


def test_position_beyond_smaller_data_is_refused() -> None:
    iterator = iter(grain.MapDataset.source(SOURCE).batch(4))
    take(iterator, 50)
    small = iter(grain.MapDataset.source(SOURCE[:40]).batch(4))
    take(small, 3)
    error = assert_refused(
        small, saved_from(iterator), r"refused the saved state .*: saved \{'next_index': 50\}, found"
    )
    assert isinstance(error.__cause__, IndexError)
    assert take(small, 1) == [raw(SOURCE[12:16])]


def test_another_grain_version_is_a_warning_only(caplog: pytest.LogCaptureFixture) -> None:
    saved = saved_from(PIPELINES["map"]())
    GrainHandler().restore(PIPELINES["map"](), saved)
    assert not caplog.records
    saved.content["grain_version"] = "0.1"
    GrainHandler().restore(PIPELINES["map"](), saved)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("jaxckpt_train", logging.WARNING)
    assert "'data' " in record.getMessage()
    assert f"Grain {grain.__version__}" in record.getMessage()
    assert_refused(PIPELINES["iter, repeat"](), saved, "belongs to another pipeline, or by Grain 0.1:")


class Nameless:
    """A data source without a `__repr__` of its own."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> np.int64:
        return SOURCE[index]


def test_unusable_source_is_reported_at_first_save(caplog: pytest.LogCaptureFixture) -> None:
    handler, iterator = GrainHandler(), iter(loader(Nameless()))
    saved = saved_from(iterator, handler)
    saved_from(iterator, handler)
    (record,) = caplog.records
    assert "Nameless" in record.getMessage()
    assert_refused(iter(loader(Nameless())), saved, "another data source: .* needs its own __repr__")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"state": {}}, "iterator 'data': expected a dict with fingerprint, grain_version"),
        ([1], r"expected a dict with .*, found \[1\]"),
        (
            dict.fromkeys("grain_version iterator workers processes process fingerprint".split())
            | {"state": {"__int__": 1}},
            "the saved state cannot be read",
        ),
    ],
)
def test_a_damaged_value_is_corrupt(content: Json, match: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=match):
        GrainHandler().restore(None, FakeSaved(content))


def test_state_with_unsupported_type_is_not_saved() -> None:
    iterator = Countdown()
    iterator.seen[1] = {1, 2}  # type: ignore[assignment]
    with pytest.raises(UnsupportedLeafError, match=r"state\['seen'\]\[1\] is a builtins.set"):
        GrainHandler().stage(iterator)

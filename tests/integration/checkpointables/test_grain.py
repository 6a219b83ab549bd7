"""Grain iterators: a saved position resumes byte for byte, in every kind of pipeline."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import grain
import msgspec
import numpy as np
import pytest

import jaxckpt_train
from jaxckpt_train.checkpointables.grain import GrainHandler, loses_its_order
from tests.support.grain_pipelines import (
    EXACT,
    IS_NEW,
    PIPELINES,
    Countdown,
    FakeSaved,
    HandlerInJob,
    Pipeline,
    raw,
    saved_from,
    streamed,
    take,
    x,
)
from tests.support.tiers import nightly_after

TAKEN = list(EXACT.values())


@pytest.mark.parametrize("pipeline", TAKEN, ids=list(EXACT))
@pytest.mark.parametrize("consumed", nightly_after(1, [10, 0, 1]))
def test_fresh_iterator_goes_on_where_saved_one_was(pipeline: Pipeline, consumed: int) -> None:
    straight = take(pipeline(), consumed + 10)
    first = pipeline()
    before = take(first, consumed)
    saved = saved_from(first)
    fresh = pipeline()
    assert GrainHandler().restore(fresh, saved) is fresh
    assert before + take(fresh, 10) == straight


@pytest.mark.parametrize("pipeline", TAKEN, ids=list(EXACT))
def test_staged_position_is_fixed_at_the_save(pipeline: Pipeline) -> None:
    iterator = pipeline()
    take(iterator, 5)
    staged = GrainHandler().stage(iterator).value
    copy = msgspec.json.decode(msgspec.json.encode(staged))
    after = take(iterator, 10)
    assert staged == copy
    GrainHandler().restore(iterator, FakeSaved(staged))
    assert staged == copy
    assert take(iterator, 10) == after


@pytest.mark.parametrize(
    "pipeline", nightly_after(1, [PIPELINES[name] for name in ("interleave", "a user's", "concat then split")])
)
def test_pipeline_accepts_each_of_its_positions(pipeline: Pipeline) -> None:
    iterator, target = pipeline(), pipeline()
    for _ in range(25):
        saved = saved_from(iterator)
        GrainHandler().restore(target, saved)
        GrainHandler().restore(pipeline(), saved)
        assert raw(next(target)) == raw(next(iterator))


@pytest.mark.parametrize("pipeline", [EXACT[name] for name in ("map", "iter, repeat", "interleave") if name in EXACT])
def test_an_exhausted_iterator_stays_exhausted(pipeline: Pipeline) -> None:
    iterator = pipeline()
    for _ in iterator:
        pass
    fresh = GrainHandler().restore(pipeline(), saved_from(iterator))
    with pytest.raises(StopIteration):
        next(fresh)


def test_the_value_names_what_a_restore_compares() -> None:
    iterator = PIPELINES["map"]()
    take(iterator, 2)
    handler = HandlerInJob(processes=4, process=2, fingerprint="books v1")
    assert saved_from(iterator, handler).content == {
        "grain_version": importlib.metadata.version("grain"),
        "iterator": "PrefetchDatasetIterator",
        "workers": 0,
        "processes": 4,
        "process": 2,
        "counts": ["batches", 4],
        "fingerprint": "books v1",
        "state": {"next_index": 2},
    }
    value = saved_from(PIPELINES["DataLoader"]()).content
    assert value["iterator"] == "DataLoaderIterator"
    assert value["state"]["last_seen_indices"] == {"0": -1}


def test_without_a_target_the_saved_data_comes_back() -> None:
    iterator = PIPELINES["a user's"]()
    state = GrainHandler().restore(None, saved_from(iterator))["state"]
    assert type(state["left"]) is np.int64
    assert state["rng"] == iterator.get_state()["rng"]


@pytest.mark.parametrize("value", [grain.MapDataset.range(3), grain.DataLoader, {"a": 1}, iter([1]), None])
def test_handler_takes_no_other_objects(value: Any) -> None:
    assert not GrainHandler().handles(value)


@pytest.mark.parametrize("pipeline", TAKEN, ids=list(EXACT))
def test_handler_takes_every_grain_iterator(pipeline: Pipeline) -> None:
    assert GrainHandler().handles(pipeline())


def test_checkpoint_outside_of_run_holds_position(tmp_path: Path) -> None:
    iterator = PIPELINES["iter, random map"]()
    take(iterator, 10)
    jaxckpt_train.save_checkpointables(tmp_path / "a", {"data": iterator, "state": {"w": np.zeros(2)}})
    fresh = PIPELINES["iter, random map"]()
    loaded = jaxckpt_train.load_checkpointables(tmp_path / "a", {"data": fresh, "state": None})
    assert loaded["data"] is fresh
    assert take(fresh, 10) == take(iterator, 10)


WINDOW_SHUFFLES = [
    lambda shuffled: shuffled,
    lambda shuffled: shuffled.batch(4),
    lambda shuffled: grain.IterDataset.mix([shuffled, streamed()], [0.5, 0.5]),
]


@pytest.mark.parametrize("rest", WINDOW_SHUFFLES, ids=["alone", "batched", "mixed"])
def test_window_shuffle_warns_only_if_order_changes(rest: Any, caplog: pytest.LogCaptureFixture) -> None:
    def pipeline() -> Any:
        return iter(rest(x.WindowShuffleIterDataset(streamed(), window_size=16, seed=1)))

    iterator, handler = pipeline(), GrainHandler()
    take(iterator, 5)
    saved = saved_from(iterator, handler)
    is_exact = take(handler.restore(pipeline(), saved), 60) == take(iterator, 60)
    assert is_exact == IS_NEW
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * (not is_exact)
    state = saved.content["state"]
    older = [version for version in ("0.2.10", "0.2.15", "0.2.15.dev1") if loses_its_order(state, version)]
    newer = [version for version in ("0.2.16", "0.2.18", "0.3", "1.0.0rc1") if loses_its_order(state, version)]
    assert (len(older), len(newer)) == (3, 0)
    assert not loses_its_order(saved_from(PIPELINES["map, window shuffle"]()).content["state"], "0.2.10")


class RecordsStart(Countdown):
    """An iterator that records whether it was asked to prefetch."""

    started = False

    def start_prefetch(self) -> None:
        self.started = True


def test_a_restored_iterator_starts_prefetching_at_once() -> None:
    fresh = RecordsStart()
    GrainHandler().restore(fresh, saved_from(RecordsStart()))
    assert fresh.started


WITH_WORKERS = """
import sys

import grain
from absl import flags

from jaxckpt_train.checkpointables.grain import GrainHandler
from tests.support.grain_pipelines import Halve, loader, mapped, saved_from, take, x

OPTIONS = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
PIPELINES = {
    "DataLoader": lambda: iter(loader(workers=2)),
    "mp_prefetch": lambda: iter(mapped().batch(4).to_iter_dataset().mp_prefetch(OPTIONS)),
    "mp_prefetch, window shuffle": lambda: iter(
        x.WindowShuffleIterDataset(mapped().to_iter_dataset(), window_size=16, seed=1).batch(4).mp_prefetch(OPTIONS)
    ),
}

if __name__ == "__main__":
    pipeline = PIPELINES[sys.argv[1]]
    assert not flags.FLAGS.is_parsed()
    straight, handler = pipeline(), GrainHandler()
    at_0 = saved_from(straight, handler)  # asks Grain for the state, which asks absl for its flags
    assert flags.FLAGS.is_parsed()
    assert at_0.content["workers"] == 2
    first = take(straight, 10)
    at_10 = saved_from(straight, handler)
    second = take(straight, 10)
    assert len({str(batch) for batch in first + second}) == 20
    resumed = handler.restore(pipeline(), at_10)
    assert take(resumed, 10) == second
    handler.restore(resumed, at_0)
    assert take(resumed, 10) == first
    print("resumed")
"""


@pytest.mark.timeout(660)  # a pipeline starts processes that import all of it: 10 in all, 100 s on a busy machine
@pytest.mark.parametrize(
    "pipeline", nightly_after(1, ["mp_prefetch", "DataLoader", *["mp_prefetch, window shuffle"] * IS_NEW])
)
def test_pipelines_with_workers_resume_without_parsed_flags(pipeline: str, tmp_path: Path, run_python: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITH_WORKERS)
    assert run_python(script, pipeline, check=True, timeout_s=600).stdout == "resumed\n"


def test_only_unparsed_absl_flags_are_marked_parsed(run_python: Any) -> None:
    script = """
import sys
from jaxckpt_train.checkpointables.grain import mark_absl_flags_parsed
assert "absl.flags" not in sys.modules
mark_absl_flags_parsed()
assert "absl.flags" not in sys.modules
from absl import flags
flags.DEFINE_integer("answer", 1, "")
mark_absl_flags_parsed()
mark_absl_flags_parsed()
assert flags.FLAGS.answer == 1
flags.FLAGS(["program", "--answer=42"])
mark_absl_flags_parsed()
assert flags.FLAGS.answer == 42
"""
    run_python(script, check=True, fresh=True)


def test_handler_works_without_grain_installed(run_python: Any) -> None:
    script = """
import sys
sys.modules["grain"] = None  # importing it fails
from jaxckpt_train.checkpointables.grain import GrainHandler
class Saved:
    name, kind = "data", "grain"
    def value(self):
        return {"grain_version": "0.2.18", "iterator": "I", "workers": 0, "processes": 1, "process": 0,
                "fingerprint": None, "state": {"next_index": {"__numpy__": ["<i8", None, 3]}}}
assert not GrainHandler().handles(iter([]))
assert GrainHandler().restore(None, Saved())["state"] == {"next_index": 3}
"""
    run_python(script, check=True, fresh=True)

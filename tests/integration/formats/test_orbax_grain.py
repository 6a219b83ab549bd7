"""Grain iterators that the real Orbax saved: a load sets them, and the next batches are the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp1
from typer.testing import CliRunner

import jaxckpt_train as jct
from jaxckpt_train.checkpointables import handlers
from jaxckpt_train.cli.main import app
from tests.support.grain_pipelines import PIPELINES, SOURCE, HandlerInJob, loader, raw, take
from tests.support.tiers import nightly_after

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
STATE = {"w": np.arange(6.0)}
TARGET = {"w": np.zeros(6)}
# Without pipelines whose states hold numpy, which JSON cannot, and those that Grain saves only after an iteration.
SAVED = [name for name in PIPELINES if not name.startswith(("a user's", "elastic, not"))]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


def by_manager(directory: Path, iterator: Any) -> Path:
    with ocp.CheckpointManager(directory) as manager:
        items = {"state": ocp.args.StandardSave(STATE), "data": grain.checkpoint.CheckpointSave(iterator)}
        manager.save(7, args=ocp.args.Composite(**items))
    return directory / "7"


def by_second_interface(directory: Path, iterator: Any) -> Path:
    with ocp1.training.Checkpointer(directory) as checkpointer:
        checkpointer.save_checkpointables(7, {"state": STATE, "data": iterator})
    return directory / "7"


HOW: dict[str, Callable[[Path, Any], Path]] = {"v0": by_manager, "v1": by_second_interface}


# The state of every kind of pipeline is one JSON text for Orbax, which checkpointables/test_grain.py sets for each.
SOME = ["DataLoader", "map", "prefetch", "iter, mix", "interleave", "first fit packing"]
WITH_ALL = [(name, how) for name in [*SOME, *(each for each in SAVED if each not in SOME)] for how in HOW]


@pytest.mark.parametrize(("name", "how"), nightly_after(len(SOME) * len(HOW), WITH_ALL))
def test_load_sets_iterator_to_saved_position(name: str, how: str, tmp_path: Path) -> None:
    iterator = PIPELINES[name]()
    take(iterator, 5)
    step = HOW[how](tmp_path, iterator)
    expected = take(iterator, 8)
    fresh = PIPELINES[name]()
    found = jct.load_checkpointables(step, {"state": TARGET, "data": fresh})
    assert found["data"] is fresh
    assert raw(found["state"]["w"]) == raw(STATE["w"])
    assert take(fresh, 8) == expected
    jct.load_checkpointables(step, {"data": fresh})
    assert take(fresh, 8) == expected


@pytest.mark.parametrize("name", ["DataLoader", "prefetch"])
def test_an_item_by_itself_sets_an_iterator(name: str, tmp_path: Path) -> None:
    iterator = PIPELINES[name]()
    take(iterator, 5)
    step = by_manager(tmp_path, iterator)
    fresh = jct.load(step / "data", PIPELINES[name]())
    assert take(fresh, 8) == take(iterator, 8)


@pytest.mark.parametrize("name", ["DataLoader", "prefetch"])
def test_position_is_readable_without_iterator(name: str, tmp_path: Path) -> None:
    iterator = PIPELINES[name]()
    take(iterator, 5)
    step = by_manager(tmp_path, iterator)
    state = iterator.get_state()
    expected = jct.JsonValue({"process_0-of-1.json": json.loads(state) if isinstance(state, bytes) else state})
    assert jct.load_checkpointables(step)["data"] == expected
    assert jct.load_checkpointables(step, {"data": jct.JsonValue(None)})["data"] == expected
    assert jct.load(step / "data") == expected


def test_non_json_state_is_shown_as_text(tmp_path: Path) -> None:
    step = by_manager(tmp_path, PIPELINES["map"]())
    file = step / "data" / "process_0-of-1.json"
    file.write_text('{"next_index": NaN}')
    assert jct.load_checkpointables(step)["data"] == jct.JsonValue({file.name: '{"next_index": NaN}'})
    file.write_text('{"next_index": 4, "large": %d}' % (1 << 200))  # noqa: UP031
    assert jct.load_checkpointables(step)["data"].value[file.name]["large"] == 1 << 200


def test_run_resumes_from_imported_position(tmp_path: Path) -> None:
    iterator = PIPELINES["DataLoader"]()
    take(iterator, 5)
    step = by_manager(tmp_path / "orbax", iterator)
    expected = take(iterator, 8)
    done = CliRunner().invoke(app, ["import", str(step), str(tmp_path / "ours")])
    assert done.exit_code == 0, done.output
    assert jct.verify(tmp_path / "ours").ok
    fresh = PIPELINES["DataLoader"]()
    found = jct.load_checkpointables(tmp_path / "ours", {"state": TARGET, "data": fresh})
    with jct.StepManager(tmp_path / "run") as manager:
        manager.save(7, found)
    assert take(fresh, 8) == expected
    with jct.CheckpointCallback(tmp_path / "run", progress=False) as ckpt:
        _, data = ckpt.resume(TARGET, PIPELINES["DataLoader"]())
    assert take(data, 8) == expected


def assert_refused(step: Path, target: Any, match: str, kind: type[Exception] = jct.IteratorStateError) -> None:
    """Assert that a load is refused and changes neither the iterator nor the state."""
    before, state = target.get_state(), {"w": np.zeros(6)}
    with pytest.raises(kind, match=match):
        jct.load_checkpointables(step, {"state": state, "data": target})
    assert target.get_state() == before
    assert not state["w"].any()


def test_state_of_other_data_or_kind_is_refused(tmp_path: Path) -> None:
    steps = {}
    for name in ("DataLoader", "map", "iter, repeat"):
        iterator = PIPELINES[name]()
        take(iterator, 12)
        steps[name] = by_manager(tmp_path / name.replace(", ", "-"), iterator)
    target = iter(loader(records=399))
    take(target, 3)
    assert_refused(steps["DataLoader"], target, r"another sampler: saved IndexSampler\(num_records=400.*found .*399")
    assert take(target, 1) == take(_after(iter(loader(records=399)), 3), 1)
    small = iter(grain.MapDataset.source(SOURCE[:40]).batch(4))
    take(small, 3)
    assert_refused(steps["map"], small, r"refused the saved state .*: saved \{'next_index': 12\}, found")
    assert take(small, 1) == [raw(SOURCE[12:16])]
    assert_refused(
        steps["map"], PIPELINES["DataLoader"](), "another pipeline:\n.*saved keys next_index; found keys vers"
    )
    assert_refused(steps["DataLoader"], PIPELINES["map"](), "saved keys version, .*; found keys next_index")
    assert_refused(steps["iter, repeat"], PIPELINES["map"](), "saved keys parent, epoch; found keys next_index")
    with pytest.raises(jct.MismatchError, match=r"'orbax_grain'.* dict"):
        jct.load_checkpointables(steps["map"], {"data": {"a": 1}})


def _after(iterator: Any, count: int) -> Any:
    take(iterator, count)
    return iterator


def test_iterator_keeps_position_if_state_mismatches(tmp_path: Path) -> None:
    step = by_manager(tmp_path, _after(PIPELINES["prefetch"](), 5))
    target = PIPELINES["prefetch"]()
    with pytest.raises(jct.MismatchError, match="leaf 'w'"):
        jct.load_checkpointables(step, {"data": target, "state": {"w": np.zeros(7)}})
    assert take(target, 3) == take(PIPELINES["prefetch"](), 3)


def test_other_process_count_and_wrong_files_are_reported(tmp_path: Path) -> None:
    step = by_manager(tmp_path, PIPELINES["map"]())
    file = step / "data" / "process_0-of-1.json"
    for damage in (b'{"next_index": 3', b'{"next_\xff": 3}', b""):
        file.write_bytes(damage)
        message = "as JSON in process_0-of-1.json"
        assert_refused(step, PIPELINES["map"](), message, jct.CorruptCheckpointError)
        assert raw(jct.load(step, TARGET)["w"]) == raw(STATE["w"])
    file.rename(file.with_name("process_0-of-4.json"))
    assert_refused(step, PIPELINES["map"](), "process_0-of-1, found those of process_0-of-4.json that Orbax saved")
    file.with_name("process_0-of-4.json").rename(file.with_name("process_1-of-1.json"))
    assert_refused(step, PIPELINES["map"](), "expected a state of process_0-of-1, found those of process_1-of-1.json")


def test_handler_with_process_number_reads_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_registered", [])
    jct.register_handler(grain.DatasetIterator, HandlerInJob(processes=4, process=2))
    iterator = _after(PIPELINES["map"](), 5)
    file = by_manager(tmp_path, iterator) / "data" / "process_0-of-1.json"
    file.rename(file.with_name("process_2-of-4.json"))
    fresh = jct.load_checkpointables(tmp_path / "7", {"data": PIPELINES["map"]()})["data"]
    assert take(fresh, 3) == take(iterator, 3)

"""The link to the best step: where it points while metrics and steps change, and which entries it never replaces."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxckpt_train as jct
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.run.catalog import scan
from jaxckpt_train.run.entry import Entry
from jaxckpt_train.run.retention import BestLink, LinkToBest
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.memory_backend import MemoryBackend
from tests.support.runs import state_of


def save(manager: jct.StepManager, step: int, **metrics: float) -> None:
    manager.save(step, {"state": state_of(step)}, metrics=metrics)
    manager.wait()


def test_the_link_follows_the_best_step(tmp_path: Path) -> None:
    link = tmp_path / "best"
    with jct.StepManager(tmp_path, best_link=BestLink("loss")) as manager:
        save(manager, 1)
        assert not os.path.lexists(link)
        for step, loss, best in ((2, 0.5, 2), (3, 0.7, 2), (4, 0.4, 4), (5, float("nan"), 4)):
            save(manager, step, loss=loss)
            assert os.readlink(link) == f"step-{best:010d}"
        manager.attach_metrics(1, {"loss": 0.1})  # from an evaluation that ends later
        assert os.readlink(link) == "step-0000000001"
    assert np.array_equal(jct.load(link)["w"], np.asarray(state_of(1)["w"]))
    assert np.array_equal(load_file(link / "state" / "p00000-s000.safetensors")["w"], np.asarray(state_of(1)["w"]))


def test_link_never_points_to_deleted_step(tmp_path: Path) -> None:
    policy = jct.LatestN(1)
    with jct.StepManager(tmp_path, preservation_policy=policy, best_link=BestLink("acc", "max")) as manager:
        for step in range(1, 6):
            save(manager, step, acc=-float(step))
            assert os.readlink(tmp_path / "best") == f"step-{step:010d}"
    assert (tmp_path / "best").is_dir()


def test_later_job_creates_missing_link(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save(manager, 1, loss=0.3)
        save(manager, 2, loss=0.2)
    with jct.StepManager(tmp_path, best_link=BestLink("loss", name="top")) as manager:
        manager.own()
        assert os.readlink(tmp_path / "top") == "step-0000000002"


def test_callback_creates_best_link(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_interval_steps": 1, "keep_best": 1, "keep_latest": 1, "best_metric": "loss"}
    with jct.CheckpointCallback(tmp_path, best_link=True, **options) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(4):
            ckpt(state_of(step + 1), metrics={"loss": abs(step - 1)})
    assert os.readlink(tmp_path / "best") == "step-0000000002"
    assert jct.StepManager(tmp_path).steps == [2, 4]
    with pytest.raises(SettingsError, match=r"best_link: expected checkpoint\.best_metric"):
        jct.CheckpointCallback(tmp_path, best_link=True)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_other_entry_is_not_replaced(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    entry = tmp_path / "best"
    entry.mkdir() if kind == "directory" else entry.write_text("mine")
    with jct.StepManager(tmp_path, best_link=BestLink("loss")) as manager:
        save(manager, 1, loss=0.3)
        save(manager, 2, loss=0.2)
    assert entry.is_dir() if kind == "directory" else entry.read_text() == "mine"
    logged = [record for record in caplog.records if "no link to the best" in record.message]
    assert [record.levelno for record in logged][:1] == [logging.WARNING]
    assert sum(record.levelno == logging.WARNING for record in logged) == 1
    assert "exists and is not a link" in logged[0].message


def test_storage_without_links_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with jct.StepManager("/run", backend=MemoryBackend(), best_link=BestLink("loss")) as manager:
        save(manager, 1, loss=0.3)
        save(manager, 2, loss=0.2)
    assert sum("this storage has no links" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("name", ["", "a/b", "..", ".lock", "step-0000000001", "b c", 3])
def test_reserved_link_names_are_refused(name: Any) -> None:
    with pytest.raises(SettingsError, match=r"BestLink\.name: expected a plain name"):
        BestLink("loss", name=name)


def test_outdated_update_does_not_move_link_back(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path) as manager:
        save(manager, 1, loss=0.5)
        save(manager, 2, loss=0.4)
    entries = scan(LocalBackend(), str(tmp_path))
    link = LinkToBest(LocalBackend(), str(tmp_path), BestLink("loss"))

    def overtaken() -> list[Entry]:
        link.update(lambda: entries)
        return [entry for entry in entries if entry.step == 1]

    link.update(overtaken)
    assert os.readlink(tmp_path / "best") == "step-0000000002"

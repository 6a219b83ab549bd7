"""`jaxckpt mv`: the source is removed once the copy is complete, unless its run needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.inspection import copying
from jaxckpt_train.run.retention import BestLink
from tests.support.commands import json_of, printed, refused, run
from tests.support.runs import (
    files_below,
    flip_a_payload_byte,
    folder_of,
    made_run,
    remove_the_segment,
    save_steps,
    step_of,
    step_path,
)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_checkpoint_is_moved_with_all_that_it_holds(tmp_path: Path) -> None:
    saved = jct.save(tmp_path / "c", {"w": np.arange(5000)}, custom_metadata=[1])
    before = files_below(folder_of(tmp_path / "c"))
    found = json_of("mv", tmp_path / "c", f"{tmp_path}/new/")
    assert found == {
        "source": str(tmp_path / "c"), "path": str(tmp_path / "new" / "c"), "bytes": saved.bytes, "removed": True,
        "skipped": [],
    }  # fmt: skip
    assert files_below(folder_of(tmp_path / "new" / "c")) == before
    assert names(tmp_path) == ["new"]


def test_step_is_moved_by_owner_of_its_run(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    assert json_of("mv", directory, f"{tmp_path}/old/", "--step", 1)["path"] == str(step_path(tmp_path / "old", 1))
    assert json_of("mv", step_path(directory, 2), tmp_path / "two")["removed"] is True
    manager = jct.StepManager(directory)
    assert manager.steps == [3]
    history = [(event["event"], event.get("name")) for event in manager.history.events()]
    assert [name for event, name in history if event == "delete"] == ["step-0000000001", "step-0000000002"]
    assert names(directory) == [".lock", "history.jsonl", "step-0000000003"]
    assert step_of(jct.StepManager(tmp_path / "old").restore()) == 1
    assert step_of(jct.load_checkpointables(tmp_path / "two")) == 2


def test_steps_that_a_run_needs_are_kept(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run", best_link=BestLink("loss")) as manager:
        for step, loss in enumerate([1, 3, 2, 5, 4], 1):
            save_steps(manager, step, metrics={"loss": loss})
        manager.pin(2)
    remove_the_segment(step_path(tmp_path / "run", 5))
    before = files_below(tmp_path)
    for step, why in ((1, "the target of the link 'best'"), (2, "a pinned step"), (4, "the newest valid step")):
        assert f"because it is {why};" in refused("mv", tmp_path / "run", tmp_path / "new", "--step", step, code=2)
    assert "because it is the newest step;" in refused("mv", tmp_path / "run", tmp_path / "new", "--step", 5, code=2)
    assert files_below(tmp_path) == before
    assert json_of("mv", tmp_path / "run", tmp_path / "new", "--step", 3)["removed"] is True


def test_steps_behind_a_roll_back_may_move(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    with jct.StepManager(directory) as manager:
        manager.restore(step=1)
        save_steps(manager, 2)
    assert json_of("mv", directory, tmp_path / "left", "--step", 3)["removed"] is True  # no process resumes from it
    refused("mv", directory, tmp_path / "new", "--step", 2, code=2)
    assert jct.StepManager(directory).steps == [1, 2]


def test_damaged_source_is_not_moved(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    jct.save(tmp_path / "c", {"w": np.arange(100)})
    flip_a_payload_byte(step_path(directory, 1))
    flip_a_payload_byte(folder_of(tmp_path / "c"))
    before = files_below(tmp_path)
    assert "p00000-s000.safetensors" in refused("mv", directory, tmp_path / "new", "--step", 1, code=1)
    assert "p00000-s000.safetensors" in refused("mv", tmp_path / "c", tmp_path / "new", code=1)
    assert files_below(tmp_path) == before
    assert jct.StepManager(directory).steps == [1, 2]


def test_checkpoint_with_own_files_is_not_moved(tmp_path: Path) -> None:
    jct.save(tmp_path / "c", {"w": 1})
    (tmp_path / "c" / "notes.txt").write_text("mine")
    assert "found also notes.txt" in refused("mv", tmp_path / "c", tmp_path / "new", code=2)
    (tmp_path / "c" / "notes.txt").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert "found a link" in refused("mv", tmp_path / "link", tmp_path / "new", code=2)
    assert names(tmp_path) == ["c", "link"]
    assert jct.load(tmp_path / "link") == {"w": 1}


def test_foreign_directory_is_not_moved(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    save_file({"w": np.zeros(3)}, tmp_path / "folder" / "model.safetensors")
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(20, args=ocp.args.StandardSave({"w": np.zeros(3)}))
    before = files_below(tmp_path)
    for source in (tmp_path / "orbax" / "20", tmp_path / "folder", tmp_path / "folder" / "model.safetensors"):
        message = refused("mv", source, tmp_path / "new", code=3)
        assert message == refused("cp", source, tmp_path / "new", code=3)
        assert message.endswith(", which stores none")
    assert files_below(tmp_path) == before


def test_move_onto_itself_is_refused(tmp_path: Path) -> None:
    """The copy would be its source, which is removed afterwards."""
    jct.save(tmp_path / "real" / "c", {"w": 1})
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    assert "found the same" in refused("mv", tmp_path / "real" / "c", tmp_path / "alias" / "c", "--overwrite", code=2)
    assert jct.load(tmp_path / "real" / "c") == {"w": 1}


def test_move_into_itself_is_refused(tmp_path: Path) -> None:
    """The copy would be removed with its source."""
    directory = made_run(tmp_path / "run", 1, 2)
    jct.save(tmp_path / "real" / "c", {"w": 1})
    (tmp_path / "alias").symlink_to(tmp_path)
    before = files_below(tmp_path / "run"), files_below(tmp_path / "real")
    inner = step_path(directory, 1) / "inner"
    assert "outside of the source" in refused("mv", tmp_path / "alias" / "run", inner, "--step", 1, code=2)
    inner = tmp_path / "real" / "c" / "deep" / "inner"
    assert "outside of the source" in refused("mv", tmp_path / "alias" / "real" / "c", inner, code=2)
    assert (files_below(tmp_path / "run"), files_below(tmp_path / "real")) == before


def test_link_target_stays_under_any_run_name(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3, 4)
    (directory / "best").symlink_to(step_path(directory, 1))
    (directory / "inside").symlink_to(f"{step_path(directory, 2)}/state")
    (directory / "a").symlink_to("b")
    (directory / "b").symlink_to(step_path(directory, 3))
    (tmp_path / "alias").symlink_to(directory)
    for step, link in ((1, "best"), (2, "inside")):
        message = refused("mv", tmp_path / "alias", tmp_path / "new", "--step", step, code=2)
        assert f"the target of the link '{link}'" in message
    assert "the target of the link" in refused("mv", tmp_path / "alias", tmp_path / "new", "--step", 3, code=2)
    printed("prune", tmp_path / "alias", "--keep-latest", 1, "--yes")
    assert jct.StepManager(directory).steps == [1, 2, 3, 4]


def test_target_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    jct.save(tmp_path / "a", {"w": 1})
    jct.save(tmp_path / "b", {"w": 2})
    assert "pass --overwrite" in refused("mv", tmp_path / "a", tmp_path / "b", code=4)
    assert (jct.load(tmp_path / "a"), jct.load(tmp_path / "b")) == ({"w": 1}, {"w": 2})
    assert printed("mv", tmp_path / "a", tmp_path / "b", "--overwrite").endswith("moved\n")
    assert names(tmp_path) == ["b"]
    assert jct.load(tmp_path / "b") == {"w": 1}


def test_undeletable_source_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxckpt_train.store.backends.local import LocalBackend

    directory = made_run(tmp_path / "run", 1, 2)
    rename = LocalBackend.rename

    def refuse(self: LocalBackend, source: str, target: str) -> None:
        if source == str(step_path(directory, 1)):
            raise StorageError(13, "cannot rename: Permission denied", source)
        rename(self, source, target)

    monkeypatch.setattr(LocalBackend, "rename", refuse)
    done = run("mv", directory, tmp_path / "new", "--step", 1)
    assert done.exit_code == 4
    assert "the source was not removed" in done.stderr
    assert jct.verify(tmp_path / "new").ok
    assert jct.StepManager(directory).steps == [1, 2]


def test_interrupt_before_removal_leaves_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jct.save(tmp_path / "a", {"w": 1})
    seen: list[Any] = []

    def interrupt(*arguments: Any) -> None:
        seen.append((jct.load(tmp_path / "a"), jct.load(tmp_path / "b")))
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "rename_to_free", interrupt)
    assert run("mv", tmp_path / "a", tmp_path / "b").exit_code != 0
    assert seen == [({"w": 1}, {"w": 1})]


def test_half_removed_source_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jct.save(tmp_path / "a", {"w": 1})
    remove = copying.remove_replaced
    monkeypatch.setattr(copying, "remove_replaced", lambda *_: None)
    done = run("mv", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 0
    (hidden,) = [name for name in names(tmp_path) if name != "b"]
    assert hidden.startswith(".a.tmp-")
    monkeypatch.setattr(copying, "remove_replaced", remove)
    json_of("mv", tmp_path / "b", tmp_path / "a")
    assert "b" not in names(tmp_path)

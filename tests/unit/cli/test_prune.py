"""`jaxckpt prune`: it deletes the steps that a policy would delete, as the owner of the run, and no others."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.run.retention import BestLink
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.commands import json_of, printed, refused, run
from tests.support.locks import is_owned
from tests.support.runs import (
    Clock,
    becomes_newer,
    files_below,
    flip_a_payload_byte,
    made_run,
    remove_the_segment,
    save_steps,
    step_path,
    truncate_the_manifest,
)

KEYS = {"run", "kept_by", "deleted", "bytes", "data_stays", "failed", "owner", "steps"}


def run_with_losses(directory: Path, *losses: float) -> Path:
    with jct.StepManager(directory, clock=Clock()) as manager:
        for step, loss in enumerate(losses, 1):
            save_steps(manager, step, metrics={"loss": loss})
    return directory


def going(found: dict[str, Any]) -> list[int]:
    return [each["step"] for each in found["steps"] if each["goes"]]


def why(found: dict[str, Any], step: int) -> list[str]:
    return next(each["why"] for each in found["steps"] if each["step"] == step)


def test_dry_run_shows_reasons_and_changes_nothing(tmp_path: Path) -> None:
    directory = run_with_losses(tmp_path / "run", 5, 1, 4, 3, 2, 6)
    before = files_below(tmp_path)
    found = json_of("prune", directory, "--keep-latest", 2, "--keep-every", 3, "--keep-best", 1, "--metric", "loss")
    assert set(found) == KEYS
    assert set(found["steps"][0]) == {"step", "name", "bytes", "goes", "why"}
    assert going(found) == [1, 4]
    assert (found["deleted"], found["failed"], found["owner"]) == (False, [], None)
    assert found["bytes"] == sum(each["bytes"] for each in found["steps"] if each["step"] in (1, 4))
    assert why(found, 1) == ["no policy keeps it"]
    assert why(found, 2) == ["--keep-best 1 --metric loss --mode min"]
    assert why(found, 3) == ["--keep-every 3"]
    assert why(found, 5) == ["--keep-latest 2"]
    assert why(found, 6) == ["newest", "--keep-latest 2", "--keep-every 3"]
    text = printed("prune", directory, "--keep-latest", 2, "--keep-every", 3, "--keep-best", 1, "--metric", "loss")
    assert "2 of 6 steps would be deleted" in text
    assert "Nothing is deleted without --yes" in text
    assert files_below(tmp_path) == before
    assert not is_owned(directory)


def test_yes_deletes_what_the_dry_run_shows(tmp_path: Path) -> None:
    directory = run_with_losses(tmp_path / "run", 5, 1, 4, 3, 2, 6)
    rules = ("--keep-latest", 1, "--keep-best", 2, "--metric", "loss", "--mode", "max")
    dry = json_of("prune", directory, *rules)
    assert going(dry) == [2, 3, 4, 5]
    done = json_of("prune", directory, *rules, "--yes")
    assert done == {**dry, "deleted": True}
    assert sorted(path.name for path in directory.iterdir()) == [
        ".lock", "history.jsonl", "step-0000000001", "step-0000000006",
    ]  # fmt: skip
    manager = jct.StepManager(directory)
    assert manager.steps == [1, 6]
    deleted = [event["name"] for event in manager.history.events() if event["event"] == "delete"]
    assert deleted == [step_path(directory, step).name for step in (2, 3, 4, 5)]
    assert going(json_of("prune", directory, *rules, "--yes")) == []
    assert int(manager.restore()["state"]["step"]) == 6


def test_text_shows_the_deleted_steps(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    text = printed("prune", directory, "--keep-latest", 1, "--yes")
    assert "1 of 2 steps deleted, 15.7 KiB" in text
    assert "deleted  no policy keeps it" in text


def test_pinned_steps_stay(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    with jct.StepManager(directory) as manager:
        manager.pin(1)
    found = json_of("prune", directory, "--keep-latest", 1, "--yes")
    assert (going(found), why(found, 1)) == ([2], ["pinned"])
    assert jct.StepManager(directory).steps == [1, 3]


@pytest.mark.parametrize("check", [[], ["--no-check"]], ids=["every byte", "a look"])
def test_newest_valid_step_is_kept(tmp_path: Path, check: list[str]) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3, 4)
    remove_the_segment(step_path(directory, 4))
    (flip_a_payload_byte if not check else remove_the_segment)(step_path(directory, 3))
    found = json_of("prune", directory, "--keep-latest", 1, "--yes", *check, code=1)
    assert going(found) == [1]
    assert why(found, 2) == ["newest valid"]
    assert why(found, 3)[0].startswith("damaged: ")
    assert "p00000-s000.safetensors" in why(found, 3)[0]
    assert why(found, 4)[0] == "newest"
    assert int(jct.StepManager(directory).restore()["state"]["step"]) == 2


def test_without_check_flipped_byte_is_not_seen(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    flip_a_payload_byte(step_path(directory, 2))
    assert going(json_of("prune", directory, "--keep-latest", 1, code=1)) == []
    assert going(json_of("prune", directory, "--keep-latest", 1, "--no-check")) == [1]


def test_run_without_valid_step_is_not_pruned(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    for step in (1, 2, 3):
        flip_a_payload_byte(step_path(directory, step))
    assert "none of its steps is valid" in refused("prune", directory, "--keep-latest", 1, "--yes", code=1)
    assert len(list(directory.glob("step-*"))) == 3


def test_link_target_is_kept(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run", best_link=BestLink("loss")) as manager:
        for step, loss in enumerate([3, 1, 2, 4], 1):
            save_steps(manager, step, metrics={"loss": loss})
    found = json_of("prune", tmp_path / "run", "--keep-latest", 1, "--yes")
    assert (going(found), why(found, 2)) == ([1, 3], ["the link 'best'"])
    assert (tmp_path / "run" / "best" / "COMMIT").exists()


def test_unreadable_and_uncommitted_steps_are_kept(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3, 4)
    truncate_the_manifest(step_path(directory, 1))
    (step_path(directory, 2) / "COMMIT").unlink()
    found = json_of("prune", directory, "--keep-latest", 1, "--yes")
    assert going(found) == [3]
    assert "cannot be read" in why(found, 1)[0]
    assert why(found, 2)[0].startswith("not committed: ")
    assert sorted(path.name for path in directory.glob("step-*")) == [
        step_path(directory, step).name for step in (1, 2, 4)
    ]


def test_step_of_newer_version_is_not_damaged(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    becomes_newer(step_path(directory, 3))
    found = json_of("prune", directory, "--keep-latest", 1, "--yes", code=1)
    assert (going(found), why(found, 2)) == ([1], ["newest", "newest valid", "--keep-latest 1"])
    assert not any(reason.startswith("damaged") for reason in why(found, 3))
    becomes_newer(step_path(directory, 2))
    assert "FormatVersionError" in run("prune", directory, "--keep-latest", 1, "--json").stdout


def test_steps_behind_a_roll_back_are_kept(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2, 3)
    with jct.StepManager(directory) as manager:
        manager.restore(step=1)
        save_steps(manager, 2, 4)
    found = json_of("prune", directory, "--keep-latest", 1, "--yes")
    assert {each["name"]: each["goes"] for each in found["steps"]} == {
        "step-0000000001": True,
        "step-0000000002.g1": True,
        "step-0000000003": False,
        "step-0000000004": False,
    }
    assert "roll-back" in why(found, 3)[0]
    assert sorted(path.name for path in directory.glob("step-*")) == ["step-0000000003", "step-0000000004"]


def test_failing_sync_deletes_no_older_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxckpt_train.errors import StorageError
    from jaxckpt_train.store.backends.local import LocalBackend

    directory = made_run(tmp_path / "run", 1, 2)
    sync = LocalBackend.sync

    def refuse(self: LocalBackend, path: str) -> None:
        if path.endswith(".safetensors"):
            raise StorageError(5, "cannot sync: Input/output error", path)
        sync(self, path)

    monkeypatch.setattr(LocalBackend, "sync", refuse)
    found = json_of("prune", directory, "--keep-latest", 1, "--yes", code=4)
    assert found["failed"] == [step_path(directory, 1).name]
    assert step_path(directory, 1).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected at least one of --keep-latest"),
        (["--keep-best", 1], "expected --metric NAME too"),
        (["--keep-latest", 1, "--metric", "loss"], "expected --keep-best N too"),
        (["--keep-latest", 1, "--mode", "max"], "expected --keep-best N too"),
        (["--keep-best", 1, "--metric", "accuracy"], '--mode: expected "max" or "min"'),
        (["--keep-best", 1, "--metric", "lose"], "'lose', found none; the metrics are loss"),
    ],
)
def test_wrong_rules_are_refused_with_2(tmp_path: Path, options: list[Any], message: str) -> None:
    directory = run_with_losses(tmp_path / "run", 1, 2)
    assert message in refused("prune", directory, *options, code=2)
    assert message in refused("prune", directory, *options, "--yes", code=2)
    assert len(list(directory.glob("step-*"))) == 2


@pytest.mark.parametrize(
    "option", [["--keep-latest", "0"], ["--keep-every", "x"], ["--keep-best", "-1"], ["--mode", "most"]]
)
def test_wrong_values_are_refused_with_2(tmp_path: Path, option: list[str]) -> None:
    done = run("prune", tmp_path, *option)
    assert done.exit_code == 2
    assert option[0] in done.stderr


def test_path_without_a_run_exits_with_3(tmp_path: Path) -> None:
    jct.save(tmp_path / "single", {"w": 1})
    for yes in ([], ["--yes"]):
        refused("prune", tmp_path / "gone", "--keep-latest", 1, *yes, code=3)
        refused("prune", tmp_path / "single", "--keep-latest", 1, *yes, code=3)
    assert [path.name for path in tmp_path.iterdir()] == ["single"]
    assert not is_owned(tmp_path / "single")


@pytest.mark.parametrize("command", [["prune", "--keep-latest", "1", "--yes"], ["mv", "elsewhere", "--step", "1"]])
def test_full_disk_error_suggests_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    before = files_below(directory)

    def full(self: LocalBackend, path: str, data: bytes) -> bool:
        raise StorageError(errno.ENOSPC, "cannot create the file: No space left on device", path)

    monkeypatch.setattr(LocalBackend, "write_new", full)
    name, *rest = [str(tmp_path / each) if each == "elsewhere" else each for each in command]
    message = refused(name, directory, *rest, code=4)
    assert "No space left on device" in message
    assert "the oldest step" in message
    assert files_below(directory) == before

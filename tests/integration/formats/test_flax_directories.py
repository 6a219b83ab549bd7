"""Directories that Flax itself wrote: the checkpoint that Flax restores is loaded, or an error names the reason."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training import checkpoints
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt_train as jct
from jaxckpt_train import checkpoint
from jaxckpt_train.formats.step_folders import sort_like_flax
from jaxckpt_train.integrations.orbax_manager import CheckpointManager
from jaxckpt_train.store.backends.local import LocalBackend
from tests.support.flax_saves import save, state_of
from tests.support.runs import made_run
from tests.support.same_trees import raw

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


def assert_is(found: Any, step: float) -> None:
    expected = state_of(step)["params"]
    assert {name: raw(leaf) for name, leaf in found["params"].items()} == {
        name: raw(leaf) for name, leaf in expected.items()
    }


def assert_as_flax(directory: Path, **options: Any) -> None:
    """Fail unless the loaded tree is the one that Flax restores."""
    expected, found = checkpoints.restore_checkpoint(str(directory), None, **options), jct.load(directory)
    assert {name: raw(leaf) for name, leaf in found["params"].items()} == {
        name: raw(leaf) for name, leaf in expected["params"].items()
    }


@pytest.mark.parametrize("prefix", ["checkpoint_", "ckpt_", "model", ""])
def test_newest_checkpoint_loads_as_flax_restores_it(tmp_path: Path, prefix: str) -> None:
    save(tmp_path, 8, 9, 10, 100, prefix=prefix)
    assert_as_flax(tmp_path, prefix=prefix)
    assert_is(jct.load(tmp_path), 100)
    target = {"params": {"w": np.zeros((2, 3)), "b": np.zeros(3, np.float32)}}
    assert_is(jct.load(tmp_path, target), 100)
    assert_is(jct.load_checkpointables(tmp_path)["state"], 100)
    found = jct.metadata(tmp_path)
    if prefix.endswith("_") or not prefix:
        assert (found.path, found.step) == (f"{tmp_path}/{prefix}100", 100)


def test_checkpoints_deleted_or_overwritten_by_flax_are_gone(tmp_path: Path) -> None:
    save(tmp_path, *range(1, 9), keep=2, keep_every_n_steps=3)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"checkpoint_{step}" for step in (1, 4, 7, 8)]
    assert_is(jct.load(tmp_path), 8)
    save(tmp_path, 5, overwrite=True)  # removes newer checkpoints
    assert_as_flax(tmp_path)
    assert_is(jct.load(tmp_path), 5)


@pytest.mark.parametrize(
    "steps", [(0.001, 0.01, 0.1), (-1.0, 1.0, 1e5), (1e-05, 0.5), (2, 10.5, 11)], ids=lambda steps: str(steps)
)
def test_steps_may_be_floats(tmp_path: Path, steps: tuple[float, ...]) -> None:
    save(tmp_path, *steps)
    assert_as_flax(tmp_path)
    assert_is(jct.load(tmp_path), steps[-1])


names = st.text(st.sampled_from("a_.-+e0179"), min_size=1, max_size=9).filter(lambda name: name not in (".", ".."))


@given(st.lists(names, unique=True))
def test_names_are_in_the_order_of_flax(found: list[str]) -> None:
    assert sort_like_flax(found) == checkpoints.natural_sort(sorted(found))


def test_temporary_files_and_sidecars_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    data = (tmp_path / "checkpoint_5").read_bytes()
    for name in ("checkpoint_tmp", "events.out.tfevents.17.host.1.0"):
        (tmp_path / name).write_bytes(data[:-1])
    for name in ("checkpoint_10_gda", "checkpoint_11_gda", "checkpoint_11.orbax-checkpoint-tmp-1", "plots"):
        (tmp_path / name).mkdir()
    assert checkpoints.latest_checkpoint(str(tmp_path)) == f"{tmp_path}/checkpoint_10"
    assert_is(jct.load(tmp_path), 10)


def test_every_file_with_the_prefix_is_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    (tmp_path / "checkpoint_best").write_bytes((tmp_path / "checkpoint_5").read_bytes())
    assert_as_flax(tmp_path)
    assert_is(jct.load(tmp_path), 5)
    assert jct.metadata(tmp_path).path == f"{tmp_path}/checkpoint_best"


def test_several_prefixes_are_refused_unless_flax_default(tmp_path: Path) -> None:
    save(tmp_path, 5, 10, prefix="ckpt_")
    save(tmp_path, 3, prefix="best_")
    with pytest.raises(jct.NotACheckpointError, match=r"2 prefixes.*/best_3, .*/ckpt_10"):
        jct.load(tmp_path)
    save(tmp_path, 4)
    assert_as_flax(tmp_path)
    assert_is(jct.load(tmp_path), 4)


def test_orbax_folders_written_by_flax_load(tmp_path: Path) -> None:
    save(tmp_path, 9, 10, orbax=True)
    assert (tmp_path / "checkpoint_10").is_dir()
    assert_as_flax(tmp_path)
    assert_is(jct.load(tmp_path), 10)
    save(tmp_path, 11, orbax=False)
    assert_is(jct.load(tmp_path), 11)
    save(tmp_path, 12, orbax=True)
    assert_as_flax(tmp_path)
    assert_is(jct.load(tmp_path), 12)


def test_steps_of_orbax_manager_are_listed_not_loaded(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint")
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state_of(step)))
    with pytest.raises(jct.NotACheckpointError, match=r"2 steps, .* 1, 2; .*/checkpoint_2"):
        jct.load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", r"found .* \(it is empty"),
        (lambda data: data[: len(data) // 2], r"found .* \(.*Error: "),
        (lambda data: b"\xff" + data[1:], r"expected a Flax msgpack file, found"),
    ],
)
def test_damaged_newest_checkpoint_is_not_skipped(tmp_path: Path, damage: Any, message: str) -> None:
    save(tmp_path, 5, 10)
    newest = tmp_path / "checkpoint_10"
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.raises(jct.CorruptCheckpointError, match=f"{newest}: .*{message}.*, pass {tmp_path}/checkpoint_5"):
        jct.load(tmp_path)
    assert_is(jct.load(tmp_path / "checkpoint_5"), 5)
    (tmp_path / "checkpoint_5").unlink()
    with pytest.raises(jct.CorruptCheckpointError, match=message):
        jct.load(tmp_path)


def test_newest_link_or_directory_is_reported(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "checkpoint_6").mkdir()
    with pytest.raises(jct.NotACheckpointError, match=r"checkpoint_6: .* found a directory"):
        jct.load(tmp_path)
    (tmp_path / "checkpoint_6").rmdir()
    (tmp_path / "checkpoint_6").symlink_to("checkpoint_5")
    with pytest.raises(jct.StorageError, match="symbolic link"):
        jct.load(tmp_path)


def test_empty_file_by_itself_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(jct.NotACheckpointError, match=r"found .* \(it is empty"):
        jct.load(tmp_path / "a")


@pytest.mark.parametrize("names", [["notes_1", "notes_2"], ["frame_0001.png"], []])
def test_other_directories_are_no_checkpoints(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("nothing of Flax")
    with pytest.raises(jct.NotACheckpointError, match="COMMIT and manifest"):
        jct.load(tmp_path)


def test_own_run_in_same_directory_is_used(tmp_path: Path) -> None:
    save(tmp_path, 10)
    made_run(tmp_path, 11, 12)
    with pytest.raises(jct.NotACheckpointError, match=r"directory of 2; .*/step-0000000012"):
        jct.load(tmp_path)
    jct.save(tmp_path / "imported", jct.load(tmp_path / "checkpoint_10"))
    for each in tmp_path.glob("step-*"):
        each.rename(tmp_path.parent / f"{tmp_path.name}-{each.name}")
    assert_is(jct.load(tmp_path), 10)


class RemovesTheNewest(LocalBackend):
    """A disk on which Flax replaces the newest checkpoint by a newer one just before it is opened."""

    def open(self, directory: str, name: str, *, direct: Any) -> Any:
        if name == "checkpoint_10" and os.path.exists(f"{directory}/{name}"):
            os.rename(f"{directory}/{name}", f"{directory}/checkpoint_11")
        return super().open(directory, name, direct=direct)


def test_checkpoint_removed_meanwhile_is_replaced_by_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10)
    monkeypatch.setattr(checkpoint, "backend_for", lambda _: RemovesTheNewest())
    assert jct.metadata(tmp_path).step == 11
    (tmp_path / "checkpoint_11").rename(tmp_path / "checkpoint_10")
    with pytest.raises(jct.StorageError, match="No such file"):
        jct.load(tmp_path / "checkpoint_10")


def test_arrays_stored_elsewhere_are_reported(tmp_path: Path) -> None:
    """The file as a job writes it; tests/integration/distributed/test_other_formats.py has one of a real job."""
    tree = {"params": {"w": "//GDAPlaceholder:params/w", "b": np.ones(3)}, "step": 3}
    (tmp_path / "checkpoint_3").write_bytes(serialization.msgpack_serialize(tree))
    message = "'params/w': .*checkpoint_3_gda;"
    for path in (tmp_path, tmp_path / "checkpoint_3"):
        with pytest.raises(jct.UnsupportedLeafError, match=message):
            jct.load(path)


@pytest.mark.parametrize("directory", ["run", "old"])
def test_run_starts_from_newest_checkpoint(tmp_path: Path, directory: str) -> None:
    save(tmp_path / "old", 9, 10)
    for step in (10, 11):
        with jct.CheckpointCallback(tmp_path / directory, init_from=tmp_path / "old", progress=False) as ckpt:
            state = ckpt.resume({"params": {"w": np.zeros((2, 3)), "b": np.zeros(3, np.float32)}})
            assert_is(state, step)
            ckpt(state_of(11))
            ckpt.save_now()
    assert_is(jct.load(tmp_path / "old" / "checkpoint_10"), 10)


@pytest.mark.parametrize("prefix", ["checkpoint_", "actor_", "Levanter_"])
@pytest.mark.parametrize("orbax", [False, True])
def test_fresh_run_next_to_flax_checkpoints_is_refused(tmp_path: Path, prefix: str, orbax: bool) -> None:
    save(tmp_path, 9, 10, orbax=orbax, prefix=prefix)
    found = (
        "steps of Orbax, the last ones 9, 10" if orbax else f"checkpoints of Flax, the last ones {prefix}9, {prefix}10"
    )
    message = rf"found {found}, .*init_from=.*/{prefix}10\)"
    for _ in range(2):  # files that the first attempt left in the directory change nothing
        with pytest.raises(jct.SettingsError, match=message), jct.CheckpointCallback(tmp_path) as ckpt:
            ckpt.resume({"w": np.zeros(3)})
    with pytest.raises(jct.SettingsError, match=message), jct.CheckpointCallback(tmp_path) as ckpt:
        ckpt({"w": np.zeros(3)})
    with pytest.raises(jct.SettingsError, match=message):
        CheckpointManager(tmp_path)
    with pytest.raises(jct.StepNotFoundError, match=f"found {found}, which jaxckpt_train.load can read"):
        jct.StepManager(tmp_path).restore({"state": {"w": np.zeros(3)}})
    if prefix == "checkpoint_" and not orbax:
        assert_is(jct.load(tmp_path), 10)


def test_fresh_run_next_to_flax_prefixes_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 10, prefix="actor_")
    save(tmp_path, 10, prefix="critic_")
    found = "checkpoints of Flax, the last ones actor_10, critic_10"
    with pytest.raises(jct.SettingsError, match=found), jct.CheckpointCallback(tmp_path) as ckpt:
        ckpt.resume({"w": np.zeros(3)})


def test_existing_run_continues_next_to_flax_files(tmp_path: Path) -> None:
    """A program may use both. If it was killed before its first save, it has still started a run."""
    with jct.CheckpointCallback(tmp_path) as ckpt:
        ckpt.resume({"w": np.zeros(3)})
    save(tmp_path, 10)
    with jct.CheckpointCallback(tmp_path) as ckpt:
        ckpt.resume({"w": np.zeros(3)})
        ckpt({"w": np.ones(3)})
        ckpt.save_now()
    (tmp_path / "history.jsonl").unlink()
    with jct.CheckpointCallback(tmp_path) as ckpt:
        assert ckpt.resume({"w": np.zeros(3)})["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["checkpoint_3", "replay_3"])
def test_unrelated_files_with_flax_names_are_ignored(tmp_path: Path, name: str) -> None:
    for number, content in enumerate([b"", b"\x80\x04\x95rest of a pickle", b"\x89HDF\r\n\x1a\n", b"text", b"\xde"]):
        (tmp_path / f"{name}{number}").write_bytes(content)
    with jct.CheckpointCallback(tmp_path) as ckpt:
        ckpt.resume({"w": np.zeros(3)})

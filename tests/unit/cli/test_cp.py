"""`jaxckpt cp`: a copy holds everything of its source, or there is no copy."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.errors import StorageError
from jaxckpt_train.inspection import copying
from jaxckpt_train.settings import StoreSettings
from jaxckpt_train.store.backends import local
from jaxckpt_train.store.backends.local import LocalBackend
from jaxckpt_train.store.committed import open_committed
from tests.support.commands import json_of, printed, refused, run
from tests.support.runs import (
    Clock,
    Counter,
    files_below,
    flip_a_payload_byte,
    made_run,
    save_steps,
    segment_of,
    state_of,
    step_of,
    step_path,
    truncate_the_manifest,
)


def manifest_of(path: Path) -> Any:
    return open_committed(LocalBackend(), str(path)).manifest


def saved_step(directory: Path) -> Path:
    """Make a run with one step that uses every field of a manifest, and return the step."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
    state = {
        "sharded": jax.device_put(jnp.arange(64, dtype=jnp.float32).reshape(8, 8), sharding),
        "half": np.arange(10).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3)),
        "key": jax.random.key(3),
        "n": 7,
    }
    data = Counter()
    next(data)
    with jct.StepManager(directory, clock=Clock(), settings=StoreSettings(digest="sha256")) as manager:
        manager.save(5, {"state": state, "data": data}, metrics={"loss": 0.5}, custom_metadata={"why": ["a test"]})
        manager.wait()
    return step_path(directory, 5)


def test_copy_holds_everything_of_its_source(tmp_path: Path) -> None:
    step = saved_step(tmp_path / "run")
    found = json_of("cp", tmp_path / "run", tmp_path / "copy")
    assert found == {
        "source": str(step), "path": str(tmp_path / "copy"), "bytes": jct.metadata(step).bytes, "read_again": False,
        "skipped": [],
    }  # fmt: skip
    ours, theirs = manifest_of(step), manifest_of(tmp_path / "copy")
    assert theirs.info == ours.info
    assert theirs.info["custom_metadata"] == {"why": ["a test"]}
    assert theirs.parts == ours.parts  # with the chunks, digests and shardings of all arrays
    assert theirs.digest == "sha256"
    assert next(each.sharding["mesh"] for each in theirs.parts[0].arrays if each.name == "sharded") == {
        "data": 4,
        "model": 2,
    }
    assert files_below(tmp_path / "copy") == files_below(step)
    assert printed("diff", step, tmp_path / "copy").endswith(" 0 differ\n")
    data = Counter()
    loaded = jct.load_checkpointables(tmp_path / "copy", {"state": None, "data": data})
    np.testing.assert_array_equal(loaded["state"]["sharded"], np.arange(64, dtype=np.float32).reshape(8, 8))
    assert data.position == 1


def test_metrics_attached_later_are_copied(tmp_path: Path) -> None:
    with jct.StepManager(tmp_path / "run") as manager:
        save_steps(manager, 1, metrics={"loss": 0.5})
        manager.attach_metrics(1, {"bleu": float("inf")})
        manager.pin(1)
        save_steps(manager, 2)
    json_of("cp", tmp_path / "run", f"{tmp_path}/new/", "--step", 1)
    json_of("cp", tmp_path / "run", f"{tmp_path}/new/", "--step", 2)
    manager = jct.StepManager(tmp_path / "new")
    assert [(info.metrics, info.pinned) for info in manager.infos] == [
        ({"loss": 0.5, "bleu": float("inf")}, False),
        (None, False),
    ]


def test_run_resumes_from_copied_steps_and_deletes_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Pins and other notes of the source run are not copied."""
    with jct.StepManager(tmp_path / "run") as manager:
        save_steps(manager, 1)
        manager.pin(1)
        save_steps(manager, 2)
        manager.save(3, {"state": state_of(3)}, temporary=True)
        manager.wait()
    for step in (2, 3):
        json_of("cp", tmp_path / "run", f"{tmp_path}/new/", "--step", step)
    with jct.StepManager(tmp_path / "new", preservation_policy=jct.LatestN(2)) as manager:
        assert step_of(manager.restore()) == 3
        save_steps(manager, 4)
    assert jct.StepManager(tmp_path / "new").steps == [3, 4]
    assert caplog.text == ""


def test_copied_step_keeps_its_name_in_a_run(tmp_path: Path) -> None:
    directory, other = made_run(tmp_path / "run", 1, 2), made_run(tmp_path / "other", 7)
    assert json_of("cp", directory, other)["path"] == str(step_path(other, 2))
    assert json_of("cp", step_path(directory, 1), other)["path"] == str(step_path(other, 1))
    assert json_of("cp", directory, f"{tmp_path}/new/deep/")["path"] == str(step_path(tmp_path / "new" / "deep", 2))
    assert json_of("cp", directory, tmp_path / "plain")["path"] == str(tmp_path / "plain")
    assert json_of("cp", tmp_path / "plain", f"{tmp_path}/new/")["path"] == f"{tmp_path}/new/plain"
    assert json_of("cp", tmp_path / "plain", tmp_path / "new" / "deep", "--overwrite")["path"] == str(
        step_path(tmp_path / "new" / "deep", 2)
    )
    assert jct.StepManager(other).steps == [1, 2, 7]
    jct.save(tmp_path / "single", {"w": 1})
    assert "does not record its step" in refused("cp", tmp_path / "single", other, code=2)
    assert json_of("cp", tmp_path / "single", f"{other}/step-0000000003")["path"] == str(step_path(other, 3))


def test_copy_of_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    flip_a_payload_byte(step_path(directory, 1))
    before = files_below(tmp_path)
    message = refused("cp", step_path(directory, 1), tmp_path / "copy", code=1)
    assert f"{step_path(directory, 1)}/state/p00000-s000.safetensors" in message
    assert files_below(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_change_of_source_does_not_reach_the_copy(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    json_of("cp", directory, tmp_path / "copy")
    with open(segment_of(step_path(directory, 1)), "r+b") as file:
        file.write(b"damaged!")
    assert not jct.verify(step_path(directory, 1)).ok
    assert jct.verify(tmp_path / "copy").ok


@pytest.fixture
def shared_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were made as on a file system whose files can share blocks."""
    made = list[str]()

    def share(self: LocalBackend, source: str, target: str) -> bool:
        made.append(target)
        shutil.copyfile(source, target)
        return True

    monkeypatch.setattr(LocalBackend, "share", share)
    return made


def test_copy_that_shares_blocks_is_verified(tmp_path: Path, shared_files: list[str]) -> None:
    step = saved_step(tmp_path / "run")
    found = json_of("cp", tmp_path / "run", tmp_path / "copy", "--check")
    assert found["bytes"] == jct.metadata(step).bytes
    assert len(shared_files) == len([*step.glob("*/*")])
    assert files_below(tmp_path / "copy") == files_below(step)
    flip_a_payload_byte(step)
    before = files_below(tmp_path)
    assert f"{segment_of(step)}: bytes" in refused("cp", step, tmp_path / "other", code=1)
    assert files_below(tmp_path) == before


def test_a_damaged_source_replaces_nothing(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    jct.save(tmp_path / "c", {"w": 1})
    flip_a_payload_byte(step_path(directory, 1))
    refused("cp", directory, tmp_path / "c", "--overwrite", code=1)
    assert jct.load(tmp_path / "c") == {"w": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "run"]


def test_copy_replaces_only_checkpoints_with_overwrite(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    json_of("cp", directory, tmp_path / "copy", "--step", 1)
    assert "pass --overwrite to replace it" in refused("cp", directory, tmp_path / "copy", code=4)
    assert json_of("show", tmp_path / "copy")["step"] == 1
    json_of("cp", directory, tmp_path / "copy", "--overwrite")
    assert json_of("show", tmp_path / "copy")["step"] == 2
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    assert "to put the copy into it" in refused("cp", directory, tmp_path / "folder", code=4)
    refused("cp", directory, tmp_path / "folder", "--overwrite", code=4)
    (tmp_path / "copy" / "notes.txt").write_text("mine")
    assert "other files: notes.txt" in refused("cp", directory, tmp_path / "copy", "--overwrite", code=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "folder", "run"]


@pytest.mark.parametrize("command", ["cp", "mv"])
def test_target_that_appears_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    jct.save(tmp_path / "a", {"w": 1})
    monkeypatch.setattr(copying, "remove_stale_temporaries", lambda _, final: jct.save(final, {"w": 2}, overwrite=True))
    message = refused(command, tmp_path / "a", tmp_path / "b", code=4)
    assert message.startswith(f"{tmp_path / 'b'}: ")
    assert "pass --overwrite" in message
    assert (jct.load(tmp_path / "a"), jct.load(tmp_path / "b")) == ({"w": 1}, {"w": 2})


def test_copy_to_working_directory_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "run", 1)
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "deep")
    assert json_of("cp", "../../run", ".")["path"] == str(step_path(Path.cwd(), 1))
    assert json_of("cp", "../../run", "..")["path"] == str(step_path(tmp_path / "here", 1))
    assert json_of("cp", "../../run", "name")["path"] == str(Path.cwd() / "name")


def test_impossible_targets_are_refused(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", 1)
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    step = step_path(directory, 1)
    assert "found the same" in refused("cp", step, step, "--overwrite", code=2)
    assert "found the same" in refused("cp", directory, directory, code=2)
    assert "found the same" in refused("cp", step, step_path(tmp_path / "alias", 1), "--overwrite", code=2)
    assert "outside of the source" in refused("cp", step, step / "copy", code=2)
    assert "outside of the source" in refused("cp", tmp_path / "alias", step / "copy", code=2)
    assert "outside of the source" in refused("cp", step, step_path(tmp_path / "alias", 1) / "a" / "copy", code=2)
    assert "expected a directory without a checkpoint" in refused("cp", step, f"{step}/", code=2)
    assert "reserved for unfinished saves" in refused("cp", step, tmp_path / ".copy.aside", code=2)
    assert "a URL such as" in refused("cp", step, "https://bucket/copy", code=2)
    assert (len(files_below(step)), jct.verify(step).ok) == (3, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alias", "run"]


def test_copy_with_changed_bytes_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit may flip in memory between the read and the write."""
    jct.save(tmp_path / "c", {"w": np.arange(500_000, dtype=np.float32)})
    write_at = local._LocalSink.write_at

    def flipped(self: Any, offset: int, data: np.ndarray) -> None:
        data[17] ^= 1
        write_at(self, offset, data)

    monkeypatch.setattr(local._LocalSink, "write_at", flipped)
    message = refused("cp", tmp_path / "c", tmp_path / "copy", code=1)
    assert f"{tmp_path / 'c'}/state/p00000-s000.safetensors" in message
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_refusal_of_the_disk_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jct.save(tmp_path / "c", {"w": np.arange(500_000, dtype=np.float32)})

    def full(self: Any, offset: int, data: np.ndarray) -> None:
        raise StorageError(errno.ENOSPC, "cannot write", "the copy")

    monkeypatch.setattr(local._LocalSink, "write_at", full)
    assert "cannot write" in refused("cp", tmp_path / "c", tmp_path / "copy", code=4)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_check_finds_a_disk_that_changes_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jct.save(tmp_path / "c", {"w": np.arange(5000, dtype=np.float32)})
    copy_verified = copying.copy_verified

    def damaging(backend: Any, committed: Any, attempt: Any, *more: Any) -> None:
        copy_verified(backend, committed, attempt, *more)
        flip_a_payload_byte(type(tmp_path)(attempt.directory))

    monkeypatch.setattr(copying, "copy_verified", damaging)
    message = refused("cp", tmp_path / "c", tmp_path / "copy", "--check", code=1)
    assert "do not trust this" in message
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    json_of("cp", tmp_path / "c", tmp_path / "copy")  # unseen without --check


def test_source_deleted_meanwhile_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made_run(tmp_path / "run", 1, 2)
    copy_verified = copying.copy_verified

    def gone(*arguments: Any) -> None:
        if step_path(directory, 1).exists():
            step_path(directory, 1).rename(directory / ".gone")
        copy_verified(*arguments)

    monkeypatch.setattr(copying, "copy_verified", gone)
    done = run("cp", directory, tmp_path / "copy", "--step", 1)
    assert done.exit_code == 3
    assert "was removed" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_source_replaced_meanwhile_is_copied_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jct.save(tmp_path / "c", {"w": np.zeros(9)})
    copy_verified, calls = copying.copy_verified, list[Any]()

    def replaced(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            jct.save(tmp_path / "c", {"w": np.arange(9)}, overwrite=True)
        copy_verified(*arguments)

    monkeypatch.setattr(copying, "copy_verified", replaced)
    json_of("cp", tmp_path / "c", tmp_path / "copy", "--check")
    assert jct.load(tmp_path / "copy")["w"].tolist() == list(range(9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "copy"]


def test_interrupted_copy_leaves_nothing(tmp_path: Path) -> None:
    from jaxckpt_train.inspection.runs import open_at

    directory = made_run(tmp_path / "run", 1)

    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    source = open_at(LocalBackend(), str(directory))
    with pytest.raises(KeyboardInterrupt):
        copying.copy_checked(LocalBackend(), source, f"{tmp_path}/copy", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_foreign_directory_is_not_copied(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(3)}, tmp_path / "w.safetensors")
    assert "expected a checkpoint with digests" in refused("cp", tmp_path / "w.safetensors", tmp_path / "copy", code=3)
    refused("cp", tmp_path / "gone", tmp_path / "copy", code=3)
    directory = made_run(tmp_path / "run", 1)
    truncate_the_manifest(step_path(directory, 1))
    refused("cp", step_path(directory, 1), tmp_path / "copy", code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "w.safetensors"]


@pytest.mark.parametrize("where", ["file/x", "file/", "link/", "link/x"])
def test_target_below_a_file_is_refused(tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    jct.save(tmp_path / "c", {"w": np.zeros(3)})
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("nowhere")
    caplog.clear()
    message = refused("cp", tmp_path / "c", f"{tmp_path}/{where}", code=4)
    assert "\n" not in message
    assert str(tmp_path / where.partition("/")[0]) in message
    assert caplog.records == []

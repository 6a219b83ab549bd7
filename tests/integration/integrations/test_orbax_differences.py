"""The manager in Orbax's form: where it differs from Orbax, and what it refuses or warns about by name."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxckpt_train as jct
from jaxckpt_train.integrations import orbax_manager
from jaxckpt_train.integrations.orbax_manager import CheckpointManager, CheckpointManagerOptions, args
from tests.support.runs import flip_a_payload_byte, step_path
from tests.support.signal_handlers import handlers_put_back


def state_of(step: int) -> dict[str, Any]:
    return {"w": jnp.full(3000, step, jnp.float32)}


def saved(directory: Path, *steps: int, **options: Any) -> Path:
    with CheckpointManager(directory, options=CheckpointManagerOptions(**options)) as manager:
        for step in steps:
            assert manager.save(step, args=args.StandardSave(state_of(step)))
    return directory


def step_in(restored: Any) -> int:
    """Return the step that a restored state belongs to."""
    (step,) = set(np.asarray(restored["w"]).tolist())
    return int(step)


def flip_a_byte(step: Path) -> None:
    (step / "default").rename(step / "state")
    flip_a_payload_byte(step)
    (step / "state").rename(step / "default")


def lowest(metrics: Any) -> float:
    return float(metrics["loss"])


def test_expired_newest_step_stays_until_the_next(tmp_path: Path) -> None:
    options = CheckpointManagerOptions(best_fn=lowest, best_mode="min", max_to_keep=2)
    with CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in enumerate([1.0, 2.0, float("nan"), 3.0, 4.0]):
            manager.save(step, args=args.StandardSave(state_of(step)), metrics={"loss": loss})
        assert (manager.all_steps(), manager.best_step(), manager.latest_step()) == ([0, 1], 0, 1)
        assert manager.metrics(1) == {"loss": 2.0}
    assert jct.StepManager(tmp_path).steps == [0, 1, 4]
    for again in (options, CheckpointManagerOptions(read_only=True)):
        with CheckpointManager(tmp_path, options=again) as manager:
            assert (manager.all_steps(), manager.latest_step(), step_in(manager.restore(None))) == ([0, 1], 1, 1)


@pytest.mark.parametrize("step", [2, 4, 5])
@pytest.mark.parametrize("restores", [False, True])
def test_run_continues_past_an_expired_newest_step(step: int, restores: bool, tmp_path: Path) -> None:
    options = CheckpointManagerOptions(best_fn=lowest, best_mode="min", max_to_keep=2)
    with CheckpointManager(tmp_path, options=options) as manager:
        for number, loss in enumerate([1.0, 2.0, 3.0, 3.0, 4.0]):
            manager.save(number, args=args.StandardSave(state_of(number)), metrics={"loss": loss})
    with CheckpointManager(tmp_path, options=options) as manager:
        assert not restores or step_in(manager.restore(1)) == 1
        assert manager.save(step, args=args.StandardSave(state_of(50)), metrics={"loss": 0.5})
        assert manager.all_steps() == [0, step]
    with CheckpointManager(tmp_path, options=options) as manager:
        assert (manager.latest_step(), step_in(manager.restore(None))) == (step, 50)
    assert step_in(jct.load(jct.StepManager(tmp_path).path(step))) == 50


def test_keeping_nothing_lists_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, options=CheckpointManagerOptions(max_to_keep=0)) as manager:
        for step in range(3):
            assert manager.save(step, args=args.StandardSave(state_of(step)))
            assert (manager.all_steps(), manager.latest_step(), manager.best_step()) == ([], None, None)
        with pytest.raises(FileNotFoundError):
            manager.restore(None)
    assert jct.StepManager(tmp_path).steps == [2]


def test_deleted_steps_move_into_the_subdirectory(tmp_path: Path) -> None:
    options = CheckpointManagerOptions(max_to_keep=1, todelete_subdir="ttl=1h")
    for start in (0, 2):
        with CheckpointManager(tmp_path, options=options) as manager:
            for step in (start, start + 1):
                manager.save(step, args=args.StandardSave(state_of(step)))
    assert jct.StepManager(tmp_path).steps == [3]
    moved = sorted((tmp_path / "ttl=1h").iterdir())
    assert [step_in(jct.load(each)) for each in moved] == [0, 1, 2]
    with CheckpointManager(tmp_path, options=options) as manager:
        assert manager.all_steps() == [3]
        manager.restore(None)
        manager.save(4, args=args.StandardSave(state_of(4)))
    assert step_in(jct.load(sorted((tmp_path / "ttl=1h").iterdir())[-1])) == 3


def test_step_moved_twice_is_kept_twice(tmp_path: Path) -> None:
    options = CheckpointManagerOptions(todelete_subdir="old")
    for value in (10, 20):
        with CheckpointManager(tmp_path, options=options) as manager:
            assert value == 10 or step_in(manager.restore(0)) == 0
            for step in (1,) if value == 20 else (0, 1):
                manager.save(step, args=args.StandardSave(state_of(value * step)))
            manager.wait_until_finished()
            manager.save(2, args=args.StandardSave(state_of(2)))
            manager.wait_until_finished()
            manager.delete(1)
    assert sorted(step_in(jct.load(each)) for each in (tmp_path / "old").iterdir() if "1" in each.name) == [10, 20]


def test_second_manager_of_process_takes_directory_over(tmp_path: Path) -> None:
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    assert first.save(0, args=args.StandardSave(state_of(0)))
    first.wait_until_finished()
    for step, manager in enumerate([second, first, second], start=1):
        assert manager.latest_step() == step - 1
        assert manager.save(step, args=args.StandardSave(state_of(step)))
        manager.wait_until_finished()
        assert step_in(manager.restore(step)) == step
    first.close()
    second.close()
    assert jct.StepManager(tmp_path).steps == [0, 1, 2, 3]


def test_metadata_of_a_run_is_kept_once(tmp_path: Path) -> None:
    read_only = CheckpointManagerOptions(read_only=True)
    found = []
    for name, library in (("orbax", ocp), ("ours", orbax_manager)):
        seen, directory = [], tmp_path / name
        directory.mkdir()
        for metadata, options in [
            ({"a": 0}, library.CheckpointManagerOptions(read_only=True)),
            (None, None),
            ({"a": 1}, library.CheckpointManagerOptions(save_root_metadata=False)),
            ({"a": 2, "b": {"c": [1.5]}}, None),
            ({"a": 3}, None),
            (None, None),
            ({"a": 4}, library.CheckpointManagerOptions(read_only=True)),
        ]:
            with library.CheckpointManager(directory, metadata=metadata, options=options) as manager:
                seen.append(manager.metadata().custom_metadata)
        found.append(seen)
    assert found[0] == found[1]
    with CheckpointManager(tmp_path / "orbax", options=read_only) as manager:
        assert manager.metadata().custom_metadata == {"a": 2, "b": {"c": [1.5]}}
    with pytest.raises(jct.SettingsError, match="metadata"):
        CheckpointManager(tmp_path, metadata={"a": object()})


@pytest.mark.parametrize("library", [ocp, orbax_manager])
def test_metadata_of_a_run_of_an_old_orbax_is_read(library: Any, tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "metadata").write_bytes(b'{"a": {"b": [1.5]}}')
    with library.CheckpointManager(tmp_path) as manager:
        assert manager.metadata().custom_metadata == {"a": {"b": [1.5]}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_ROOT_METADATA", b"{"),
        ("_ROOT_METADATA", b"[1]"),
        ("_ROOT_METADATA", b'{"custom_metadata": 3}'),
        ("metadata", b"[1]"),
    ],
)
def test_broken_metadata_of_a_run_is_refused(name: str, text: bytes, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        (tmp_path / "metadata").mkdir(exist_ok=True)
        (tmp_path / "metadata" / name).write_bytes(text)
        with pytest.raises(jct.CorruptCheckpointError):
            manager.metadata()


HANDLERS: dict[str, Any] = {
    "a single handler": {"item_handlers": ocp.PyTreeCheckpointHandler()},
    "handlers by name": {"item_handlers": {"state": ocp.PyTreeCheckpointHandler()}},
    "names": {"item_names": ("other",)},
    "a checkpointer": {"checkpointers": ocp.PyTreeCheckpointer()},
}


@pytest.mark.parametrize("library", [ocp, orbax_manager])
@pytest.mark.parametrize("name", HANDLERS)
def test_args_without_a_handler_are_refused(name: str, library: Any, tmp_path: Path) -> None:
    given = library.args.StandardSave({"n": 1})
    is_single = name in ("a single handler", "a checkpointer")
    with (
        library.CheckpointManager(tmp_path, **HANDLERS[name]) as manager,
        pytest.raises(ValueError, match="any registered handler"),
    ):
        manager.save(1, args=given if is_single else library.args.Composite(state=given))


@pytest.mark.parametrize("library", [ocp, orbax_manager])
def test_items_that_a_step_lacks_are_key_errors(library: Any, tmp_path: Path) -> None:
    with library.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=library.args.Composite(state=library.args.StandardSave({"n": 1})))
        manager.wait_until_finished()
        with pytest.raises(KeyError, match="state"):
            manager.restore(1, args=library.args.Composite(other=library.args.StandardRestore({"n": 1})))


@pytest.mark.parametrize("library", [ocp, orbax_manager])
def test_names_and_a_single_handler_exclude_each_other(library: Any, tmp_path: Path) -> None:
    for given in ({"item_handlers": ocp.PyTreeCheckpointHandler()}, {"checkpointers": ocp.PyTreeCheckpointer()}):
        with pytest.raises(ValueError, match="item_names"):
            library.CheckpointManager(tmp_path, item_names=("a",), **given)


def test_registered_handlers_say_which_args_an_item_takes(tmp_path: Path) -> None:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for cls in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
        registry.add("params", cls, ocp.PyTreeCheckpointHandler())
    with CheckpointManager(tmp_path, handler_registry=registry) as manager:
        given = {"params": args.PyTreeSave(state_of(1)), "other": args.JsonSave([1])}
        assert manager.save(1, args=args.Composite(**given))
        manager.wait_until_finished()
        assert step_in(manager.restore(1).params) == 1
        with pytest.raises(jct.SettingsError, match="PyTreeSave"):
            manager.save(2, args=args.Composite(params=args.StandardSave(state_of(2))))


def test_items_of_checkpointers_are_saved_and_restored(tmp_path: Path) -> None:
    found = []
    for name, library in (("orbax", ocp), ("ours", orbax_manager)):
        seen: list[Any] = []
        with library.CheckpointManager(tmp_path / name / "one", ocp.PyTreeCheckpointer()) as manager:
            seen.append(manager.save(1, {"w": np.arange(3.0), "n": 2}))
            seen.append((manager.is_saving_in_progress(), manager.all_steps()))
            wanted = {"w": ocp.RestoreArgs(dtype=np.float32), "n": ocp.RestoreArgs(restore_type=float)}
            for restored in (manager.restore(1), manager.restore(1, restore_kwargs={"restore_args": wanted})):
                seen.append((restored["w"].dtype, restored["w"].tolist(), restored["n"], type(restored["n"])))
        several = {
            "params": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()),
            "notes": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
        }
        with library.CheckpointManager(tmp_path / name / "several", several) as manager:
            seen.append(manager.save(1, {"params": {"n": 1}, "notes": {"a": [1]}}, save_kwargs={"params": {}}))
            manager.wait_until_finished()
            restored = manager.restore(1, {"params": {"n": 0}, "notes": None})
            seen.append((restored["params"], restored["notes"]))
            with pytest.raises(ValueError, match="other"):
                manager.save(2, {"other": 1})
        found.append(seen)
    assert found[0] == found[1]


def test_damaged_step_is_skipped_unless_requested(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip_a_byte(step_path(tmp_path, 2))
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(jct.CorruptCheckpointError, match="step 2"):
            manager.restore(2)
        assert step_in(manager.restore(None, args=args.StandardRestore(state_of(0)))) == 1
        assert manager.save(2, args=args.StandardSave(state_of(2)))
        assert step_in(manager.restore(2)) == 2


def test_restored_older_step_is_where_saving_continues(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    with CheckpointManager(tmp_path) as manager:
        assert step_in(manager.restore(1)) == 1
        assert not manager.should_save(1)
        assert manager.should_save(2)
        assert manager.save(2, args=args.StandardSave({"w": jnp.full(3000, 20.0)}))  # Orbax refuses this save
    with CheckpointManager(tmp_path) as manager:
        assert (manager.latest_step(), step_in(manager.restore())) == (2, 20)


def test_restore_after_saves_changes_no_position(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, options=CheckpointManagerOptions(max_to_keep=3)) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=args.StandardSave(state_of(step)))
        assert step_in(manager.restore(1, args=args.StandardRestore(state_of(0)))) == 1
        assert manager.latest_step() == 3
        assert not manager.save(2, args=args.StandardSave(state_of(2)))
        assert manager.save(4, args=args.StandardSave(state_of(4)))
        assert manager.all_steps() == [2, 3, 4]
    assert jct.StepManager(tmp_path).steps == [2, 3, 4]


def test_failed_save_is_reported_and_not_listed(tmp_path: Path) -> None:
    settings = jct.StoreSettings(nonfinite="reject")
    manager = CheckpointManager(tmp_path, settings=settings)
    manager.save(1, args=args.StandardSave(state_of(1)))
    manager.save(2, args=args.StandardSave({"w": jnp.full(3000, jnp.nan)}))
    with pytest.raises(jct.NonFiniteError, match="w"):
        manager.wait_until_finished()
    assert (manager.all_steps(), manager.latest_step()) == ([1], 1)
    assert manager.save(2, args=args.StandardSave(state_of(2)))
    manager.close()
    assert jct.StepManager(tmp_path).steps == [1, 2]


def test_saved_step_is_a_native_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    assert step_in(jct.load(step_path(tmp_path, 7))) == 7
    assert jct.verify(step_path(tmp_path, 7)).ok
    with CheckpointManager(tmp_path) as manager:
        assert manager.item_metadata(7).tree == {"w": jax.ShapeDtypeStruct((3000,), jnp.float32)}
        assert step_in(manager.restore(7, args=args.StandardRestore(manager.item_metadata(7)))) == 7
    with CheckpointManager(tmp_path.with_name("elsewhere")) as manager:
        assert step_in(manager.restore(None, directory=tmp_path)) == 7
        assert manager.all_steps() == []


def test_sigterm_is_handled_from_first_check_on(tmp_path: Path) -> None:
    with handlers_put_back(signal.SIGTERM):
        before = signal.getsignal(signal.SIGTERM)
        with CheckpointManager(tmp_path, options=CheckpointManagerOptions(save_interval_steps=100)) as manager:
            manager.save(0, args=args.StandardSave(state_of(0)))
            assert signal.getsignal(signal.SIGTERM) is before  # it ends the process until the first check
            assert not manager.reached_preemption(1)
            assert not manager.save(1, args=args.StandardSave(state_of(1)))
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.reached_preemption(2)
            assert manager.save(2, args=args.StandardSave(state_of(2)))
        assert signal.getsignal(signal.SIGTERM) is before
    assert jct.StepManager(tmp_path).steps == [0, 2]


def test_program_that_saves_first_leaves_with_its_step(tmp_path: Path) -> None:
    with handlers_put_back(signal.SIGTERM):
        options = CheckpointManagerOptions(save_interval_steps=100)
        with CheckpointManager(tmp_path, options=options) as manager:
            answers = []
            for step in range(20):
                if step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                is_saved = manager.save(step, args=args.StandardSave(state_of(step)))
                if step == 3:
                    assert not manager.should_save(step + 1)
                answers.append((is_saved, manager.reached_preemption(step)))
                if answers[-1][1]:
                    break
    assert answers == [(True, False), *[(False, False)] * 4, (True, True)]
    assert jct.StepManager(tmp_path).steps == [0, 5]


def test_signal_between_two_checks_counts_for_next_step(tmp_path: Path) -> None:
    with handlers_put_back(signal.SIGTERM), CheckpointManager(tmp_path) as manager:
        manager.reached_preemption(0)
        manager.save(1, args=args.StandardSave(state_of(1)))
        os.kill(os.getpid(), signal.SIGTERM)
        assert not manager.reached_preemption(1)  # the save came before the signal
        assert manager.reached_preemption(2)


def test_directory_is_created_unless_options_forbid(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "a" / "b") as manager:
        (manager.directory / "config.json").write_text("{}")
    for unmade in ({"create": False}, {"read_only": True}):
        CheckpointManager(tmp_path / "c", options=CheckpointManagerOptions(**unmade)).close()
    assert not (tmp_path / "c").exists()


def test_commit_callback_does_not_hide_failure(run_python: Any) -> None:
    program = """
import tempfile, numpy as np
from types import SimpleNamespace
import jaxckpt_train as jct
from jaxckpt_train.integrations.orbax_manager import CheckpointManager, CheckpointManagerOptions, args
options = CheckpointManagerOptions(async_options=SimpleNamespace(post_finalization_callback=lambda: print("called")))
directory = tempfile.mkdtemp()
manager = CheckpointManager(directory, options=options, settings=jct.StoreSettings(nonfinite="reject"))
manager.save(1, args=args.StandardSave({"w": np.array([np.nan])}))
"""
    found = run_python(program, check=False)
    assert found.returncode != 0
    assert "NonFiniteError" in found.stderr
    assert "called" not in found.stdout


def test_callback_is_called_after_the_commit(tmp_path: Path) -> None:
    committed, manager = threading.Event(), jct.StepManager(tmp_path)

    def finalized() -> None:
        assert manager.steps == [3]
        committed.set()

    options = CheckpointManagerOptions(async_options=SimpleNamespace(post_finalization_callback=finalized))
    with CheckpointManager(tmp_path, options=options) as saving:
        saving.save(3, args=args.StandardSave(state_of(3)))
    assert committed.wait(60)


def test_the_newest_step_is_not_deleted(tmp_path: Path) -> None:
    with CheckpointManager(saved(tmp_path, 1, 2)) as manager:
        with pytest.raises(jct.SettingsError, match="step 2 is the newest"):
            manager.delete(2)
        assert manager.all_steps() == [1, 2]
        manager.delete(1)
        manager.save(3, args=args.StandardSave(state_of(3)))
        assert manager.all_steps() == [2, 3]


def test_one_manager_has_one_checkpointable_or_several(tmp_path: Path) -> None:
    one, several = args.StandardSave(state_of(1)), args.Composite(state=args.StandardSave(state_of(1)))
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, args=one)
        with pytest.raises(jct.SettingsError, match="expected args of one checkpointable"):
            manager.save(2, args=several)
    with (
        CheckpointManager(tmp_path / "b", item_handlers={"state": ocp.StandardCheckpointHandler()}) as manager,
        pytest.raises(jct.SettingsError, match=r"expected an args\.Composite"),
    ):
        manager.save(1, args=one)


def test_a_composite_is_a_mapping_with_attributes() -> None:
    found = args.Composite(state=1, items=2)
    assert (found.state, found["items"], dict(found), "state" in found, found.get("x")) == (
        1,
        2,
        {"state": 1, "items": 2},
        True,
        None,
    )
    with pytest.raises(AttributeError, match="'data': expected one of 'state', 'items'"):
        _ = found.data
    with pytest.raises(KeyError, match="expected one of 'state'"):
        found["data"]
    with pytest.raises(AttributeError, match="immutable"):
        found.state = 3
    with pytest.raises(jct.SettingsError, match="__x"):
        args.Composite(__x=1)


REFUSED_OPTIONS: dict[str, dict[str, Any]] = {
    "todelete_subdir": {"todelete_subdir": "../old"},
    "todelete_subdir: expected a plain name, found 'step-0000000001'": {"todelete_subdir": "step-0000000001"},
    "todelete_full_path": {"todelete_full_path": "trash/"},
    "save_interval_steps": {"save_interval_steps": 0},
    "max_to_keep": {"max_to_keep": -1},
    "best_mode": {"best_mode": "median"},
    "preservation_policy": {"preservation_policy": jct.LatestN(1), "max_to_keep": 1},
    "prevent_write_metrics": {"prevent_write_metrics": True, "best_fn": len},
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED_OPTIONS))
def test_unsupported_option_is_refused_by_name(name: str) -> None:
    with pytest.raises(jct.SettingsError, match=name):
        CheckpointManagerOptions(**REFUSED_OPTIONS[name])


def test_processes_outside_of_the_job_are_refused(tmp_path: Path) -> None:
    for given in ({"active_processes": {0}}, {"primary_host": None}, {"barrier_sync_key_prefix": "a"}):
        processes = ocp.options.MultiprocessingOptions(**given)
        options = CheckpointManagerOptions(multiprocessing_options=processes)
        with CheckpointManager(tmp_path / next(iter(given)), options=options) as manager:
            assert manager.save(1, args=args.StandardSave(state_of(1)))  # this process is the whole job
    processes = ocp.options.MultiprocessingOptions(active_processes={0, 1})
    with pytest.raises(jct.SettingsError, match="active_processes"):
        CheckpointManager(tmp_path, options=CheckpointManagerOptions(multiprocessing_options=processes))


def test_option_of_newer_orbax_is_refused_by_name(tmp_path: Path) -> None:
    newer = dataclasses.make_dataclass(
        "Newer", [("keep_on_the_moon", bool, False)], bases=(ocp.CheckpointManagerOptions,)
    )
    CheckpointManager(tmp_path, options=newer())
    with pytest.raises(jct.SettingsError, match="keep_on_the_moon: expected False, found True"):
        CheckpointManager(tmp_path, options=newer(keep_on_the_moon=True))


def test_options_without_effect_are_warned_about_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_background_delete=True))
    CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(read_only=True))
    assert caplog.messages == [message for message in caplog.messages if "have no effect" not in message]
    given = {
        "step_prefix": "run",
        "step_format_fixed_length": 8,
        "create": False,
        "num_deletion_threads": 4,
        "enable_should_save_is_saving_in_progress_check": False,
        "atomicity_options": ocp.options.AtomicityOptions(),
        "file_options": ocp.options.FileOptions(path_permission_mode=0o750),
        "async_options": ocp.AsyncOptions(timeout_secs=5),
    }
    CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(**given))
    warning = caplog.messages[-1]
    assert "have no effect: step_prefix" in warning
    for name in [*given, "file_options.path_permission_mode", "async_options.timeout_secs"]:
        assert name in warning


def test_every_option_of_orbax_is_known(tmp_path: Path) -> None:
    known = {field.name: field.default for field in dataclasses.fields(CheckpointManagerOptions)}
    theirs = {field.name: field.default for field in dataclasses.fields(ocp.CheckpointManagerOptions)}
    assert theirs.keys() == known.keys()
    assert {name for name in theirs if theirs[name] != known[name]} == {"multiprocessing_options", "file_options"}


REFUSED_ARGS: dict[str, tuple[Any, Any]] = {
    "strict: expected True": (None, args.StandardRestore(strict=False)),
    "support_layout": (None, ocp.args.StandardRestore(support_layout=True)),
    "transforms: .*rename=": (None, ocp.args.PyTreeRestore(transforms={"a": 1})),
    "custom_metadata: .*save": (ocp.args.StandardSave({"n": 1}, custom_metadata={"a": 1}), None),
    "expected .*args.StandardSave.* found .*StandardRestore": (args.StandardRestore(), None),
    "expected .*args.StandardRestore.* found .*JsonSave": (None, args.JsonSave({})),
    "expected args .* found None": (None, None),
}


@pytest.mark.parametrize("message", list(REFUSED_ARGS))
def test_unsupported_args_are_refused_by_name(message: str, tmp_path: Path) -> None:
    to_save, to_restore = REFUSED_ARGS[message]
    with CheckpointManager(saved(tmp_path, 1)) as manager, pytest.raises(jct.SettingsError, match=message):
        if to_restore is None:
            manager.save(2, args=to_save)
        else:
            manager.restore(1, args=to_restore)


@pytest.mark.parametrize(
    "given",
    [
        {"checkpointers": print},
        {"item_handlers": print},
        {"logger": print},
    ],
    ids=lambda given: next(iter(given)),
)
def test_unsupported_argument_is_refused_by_name(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(jct.SettingsError, match=next(iter(given))):
        CheckpointManager(tmp_path, **given)


def test_items_without_a_handler_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(jct.SettingsError, match=r"args=args\.StandardSave"):
            manager.save(1, state_of(1))
        with pytest.raises(jct.SettingsError, match="by keyword"):
            manager.save(1, args.StandardSave(state_of(1)))
        with pytest.raises(jct.SettingsError, match="by keyword"):
            manager.save(1, state_of(1), args=args.StandardSave(state_of(1)))


def test_leaves_without_sharding_follow_the_fallback(tmp_path: Path) -> None:
    device = jax.devices()[3]
    fallback = jax.sharding.SingleDeviceSharding(device)
    with CheckpointManager(saved(tmp_path, 5)) as manager:
        for item in (None, {"w": jax.ShapeDtypeStruct((3000,), jnp.float32)}):
            found = manager.restore(5, args=args.StandardRestore(item, fallback_sharding=fallback))
            assert (step_in(found), found["w"].devices()) == (5, {device})


def test_arrays_without_jax_dtype_stay_on_host(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args.StandardSave({"n": np.arange(3)}))
        manager.wait_until_finished()
        for target in (None, args.StandardRestore({"n": jax.ShapeDtypeStruct((3,), np.int64)})):
            found = manager.restore(1, args=target)
            assert (type(found["n"]), found["n"].dtype, found["n"].tolist()) == (np.ndarray, np.int64, [0, 1, 2])
            found["n"][0] = 5  # it owns its memory


def test_module_needs_no_orbax(run_python: Any) -> None:
    program = """
import sys
from jaxckpt_train.integrations import orbax_manager as ocp
print("orbax" in sys.modules, ocp.args.StandardSave.__name__)
"""
    assert run_python(program, check=True, fresh=True).stdout.split() == ["False", "StandardSave"]


def test_imported_names_exist() -> None:
    assert all(hasattr(orbax_manager, name) and hasattr(ocp, name) for name in ("CheckpointManager", "args"))
    theirs = {name for name in dir(ocp.args) if name.endswith(("Save", "Restore"))} - {"ProtoSave", "ProtoRestore"}
    assert theirs <= set(dir(args))


@pytest.mark.parametrize("name", ["best_fn", "should_save_fn"])
def test_option_that_is_no_function_is_refused(name: str) -> None:
    with pytest.raises(jct.SettingsError, match=f"CheckpointManagerOptions.{name}: .*found 5"):
        CheckpointManagerOptions(**{name: 5})  # type: ignore[arg-type]

"""Callbacks, managers and integrations with runs and sources on object stores."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import obstore
import orbax.checkpoint as orbax
import pytest
from safetensors.numpy import save_file

import jaxckpt_train as jct
from jaxckpt_train.integrations import orbax_manager as ocp
from tests.support.colocated_states import HOSTS
from tests.support.objects.stand_in import StandIn

STATE = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(3, jnp.bfloat16)}


def assert_equal(found: Any, expected: Any) -> None:
    for name, value in expected.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()


def zeros() -> dict[str, Any]:
    return {name: jnp.zeros_like(value) for name, value in STATE.items()}


@pytest.mark.parametrize("kind", ["ours", "run", "safetensors", "orbax"])
def test_callback_starts_from_a_url(cloud: StandIn, tmp_path: Path, kind: str) -> None:
    source = cloud.url("source")
    if kind == "ours":
        jct.save(source, STATE)
    elif kind == "run":
        with jct.StepManager(source) as manager:
            manager.save(4, {"state": STATE})
            manager.wait()
            source = manager.path(4)
    elif kind == "safetensors":
        save_file({name: np.asarray(value) for name, value in STATE.items()}, tmp_path / "model.safetensors")
        obstore.put(cloud.access.store(), "source/model.safetensors", tmp_path / "model.safetensors")
    else:
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "orbax", STATE)
        for file in (each for each in (tmp_path / "orbax").rglob("*") if each.is_file()):
            obstore.put(cloud.access.store(), f"source/{file.relative_to(tmp_path / 'orbax')}", file)
    with jct.CheckpointCallback(cloud.url("new"), init_from=source) as ckpt:
        assert_equal(ckpt.resume(zeros()), STATE)


def test_manager_of_a_url_loads_a_step_into_a_target(cloud: StandIn) -> None:
    with jct.StepManager(cloud.url("run")) as manager:
        for step in (1, 2):
            manager.save(step, {"state": STATE | {"w": STATE["w"] + step}})
    found = jct.StepManager(cloud.url("run")).load({"state": zeros()}, step=1)["state"]
    assert_equal(found, STATE | {"w": STATE["w"] + 1})


class FileHandler(orbax.CheckpointHandler):
    """A handler that writes and reads files with paths of the operating system."""

    def save(self, directory: Any, args: Any) -> None:
        Path(os.fspath(directory), "text").write_text(args.item)

    def restore(self, directory: Any, args: Any) -> str:
        return Path(os.fspath(directory), "text").read_text()


@orbax.args.register_with_handler(FileHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class FileArgs(orbax.args.CheckpointArgs):
    item: Any = None


def test_orbax_manager_takes_a_url(cloud: StandIn) -> None:
    directory = cloud.url("run")
    names = ("state", "note", "text")
    with ocp.CheckpointManager(directory, metadata={"user": 1}, item_names=names) as manager:
        for step in (1, 2, 3):
            items = {"state": ocp.args.StandardSave(STATE), "note": ocp.args.JsonSave({"step": step})}
            assert manager.save(step, args=ocp.args.Composite(**items, text=FileArgs(f"of step {step}")))
        manager.wait_until_finished()
        manager.delete(2)
        assert manager.all_steps() == [1, 3]
        assert str(manager.directory) == directory
    with ocp.CheckpointManager(directory, item_names=names) as manager:
        assert manager.metadata().custom_metadata == {"user": 1}
        found = manager.restore(
            3,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(zeros()), note=ocp.args.JsonRestore(), text=FileArgs()
            ),
        )
    assert_equal(found["state"], STATE)
    assert (found["note"], found["text"]) == ({"step": 3}, "of step 3")


def test_folder_for_deleted_steps_is_refused_on_a_url(cloud: StandIn) -> None:
    with pytest.raises(jct.SettingsError, match="todelete_subdir"):
        ocp.CheckpointManager(cloud.url("run"), options=ocp.CheckpointManagerOptions(todelete_subdir="old"))


def test_hosts_write_and_read_a_url(cloud: StandIn) -> None:
    state = {"w": jnp.arange(1 << 16, dtype=jnp.float32)}
    jct.save(cloud.url("one"), state, settings=HOSTS)
    like = {"w": jnp.zeros(1 << 16, jnp.float32)}
    assert_equal(jct.load(cloud.url("one"), like, settings=HOSTS), state)
    assert jct.verify(cloud.url("one")).ok

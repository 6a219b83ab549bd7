"""Public classes and functions name this package to users, and no module or object inside of it."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import typing
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct

PUBLIC = [name for name in jct.__all__ if callable(getattr(jct, name)) and name not in dir(jct.errors)]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_those_of_the_package(name: str) -> None:
    found = getattr(jct, name)
    assert found.__module__ == "jaxckpt_train"
    assert pickle.loads(pickle.dumps(found)) is found
    if isinstance(found, type):
        typing.get_type_hints(found)  # its annotations are still found
    try:
        signature = str(inspect.signature(found))
    except ValueError:
        return
    assert " at 0x" not in signature
    for shown in ("settings", "ObjectStoreSettings", "StoreSettings", "FastTierSettings"):
        signature = signature.replace(f"jaxckpt_train.{shown}", "")
    assert "jaxckpt_train." not in signature


@pytest.mark.parametrize("kind", [jct.CheckpointCallback, jct.StepManager])
def test_no_method_shows_an_object_of_the_implementation(kind: type) -> None:
    text = pydoc.plain(pydoc.render_doc(kind))
    assert f"class {kind.__name__}" in text
    assert " at 0x" not in text


def test_objects_show_what_matters_of_them(tmp_path: Path) -> None:
    with jct.CheckpointCallback(tmp_path / "run", save_interval_steps=1) as ckpt:
        ckpt.resume({"w": 1})
        for _ in ckpt.steps(2):
            ckpt({"w": 2})
        assert repr(ckpt) == f"CheckpointCallback('{tmp_path}/run', completed_steps=2, saved=2)"
    shown: Any = repr(ckpt)
    assert "closed" in shown
    assert "enabled=False" in repr(jct.CheckpointCallback(tmp_path, enabled=False))
    manager = jct.StepManager(tmp_path / "run")
    manager.restore()
    assert repr(manager) == f"StepManager('{tmp_path}/run', restored_step=2)"

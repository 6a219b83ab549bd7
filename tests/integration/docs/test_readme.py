"""The README's Python runs as it is written, its size stays small, and every link of every page leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct


class Counter:
    """A data iterator in its simplest form."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> jax.Array:
        self.position += 1
        return jnp.float32(self.position)

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@jax.jit
def train_step(state: Any, batch: jax.Array) -> Any:
    params = jax.tree.map(lambda leaf: leaf * 0.9 + batch, state["params"])
    return {"params": params, "step": state["step"] + 1}, {"loss": params["w"].sum()}


def code_blocks(repo_root: Path, page: str = "README.md") -> list[str]:
    return re.findall(r"```python\n(.*?)```", (repo_root / page).read_text(), re.DOTALL)


def names(**more: Any) -> dict[str, Any]:
    state = {"params": {"w": jnp.ones(8), "b": jnp.zeros(2)}, "step": jnp.int32(0)}
    abstract = jax.eval_shape(lambda: state)
    iterator = Counter()
    defined = {
        "jct": jct, "state": state, "tree": state, "abstract_tree": abstract, "abstract_state": abstract, "step": 100,
        "dataset": Counter(), "iterator": iterator, "num_steps": 4, "train_step": train_step,
    }  # fmt: skip
    return {**defined, **more}


def block_with(repo_root: Path, text: str, page: str = "README.md") -> str:
    found = [block for block in code_blocks(repo_root, page) if text in block]
    assert len(found) == 1, f"{page} has {len(found)} Python blocks with {text!r}"
    return found[0]


def test_the_five_lines_train_and_resume(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = block_with(repo_root, "save_interval_steps=500, keep_latest=3")
    first = names()
    exec(block, first)
    again = names(num_steps=6)
    exec(block, again)
    straight = names(num_steps=6)
    monkeypatch.chdir(tmp_path / "runs")
    exec(block, straight)
    assert jct.StepManager(tmp_path / "runs/a").steps == [4, 6]
    for resumed, expected in zip(jax.tree.leaves(again["state"]), jax.tree.leaves(straight["state"]), strict=True):
        assert np.asarray(resumed).tobytes() == np.asarray(expected).tobytes()
    assert again["data"].position == 6


def test_one_checkpoint_is_saved_loaded_and_verified(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    used = names()
    exec(block_with(repo_root, "jct.save_async"), used)
    assert set(used["tree"]) == {"params"}
    assert used["pending"].wait().path == str(tmp_path / "params-2")


def test_a_sequence_of_steps_is_saved_and_restored(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    used = names()
    exec(block_with(repo_root, "preservation_policy=jct.AnyPreservationPolicy", "docs/how-to/save-and-load.md"), used)
    assert used["manager"].steps == [100]
    assert np.asarray(used["restored"]["state"]["params"]["w"]).tobytes() == np.ones(8, np.float32).tobytes()
    used["manager"].close()


def test_the_hydra_lines_build_a_callback(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    used = names(cfg=SimpleNamespace(checkpoint={"directory": "runs/digits", "save_interval_steps": 100}))
    exec(block_with(repo_root, "from_config(cfg.checkpoint)", "docs/how-to/hydra.md"), used)
    assert (tmp_path / "runs/digits").is_dir()


def test_the_preemption_lines_build_callbacks(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    used = names()
    exec(block_with(repo_root, "grace_period_s=30"), used)
    assert isinstance(used["ckpt"], jct.CheckpointCallback)


def test_readme_and_changelog_stay_short(repo_root: Path) -> None:
    assert len((repo_root / "README.md").read_text().splitlines()) <= 130
    assert len((repo_root / "CHANGELOG.md").read_text().splitlines()) <= 40


def test_every_link_leads_somewhere(repo_root: Path) -> None:
    pages = [repo_root / "README.md", *sorted((repo_root / "docs").rglob("*.md"))]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(repo_root)}: {link}")
    assert broken == []

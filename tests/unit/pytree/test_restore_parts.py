"""Loading parts of a tree: patterns, placeholders, renamed leaves and missing leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.pytree.placing import Placer
from tests.support.same_trees import assert_same, raw

FAST = jct.StoreSettings(durability="none")
S = jax.ShapeDtypeStruct


def state(scale: float) -> dict[str, Any]:
    return {
        "params": {"dense": {"kernel": scale * jnp.arange(12.0).reshape(3, 4), "bias": scale * jnp.ones(4)}},
        "opt": [{"mu": scale * jnp.ones(4)}, {"mu": scale * jnp.ones(3), "count": 5}],
        "step": 7,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    jct.save(tmp_path / "c", state(2.0), settings=FAST)
    return tmp_path / "c"


@pytest.mark.parametrize(
    "only", ["params/**", ["params/dense/kernel", "**/bias"], lambda name: name.startswith("params")]
)
def test_only_chosen_leaves_are_loaded(path: Path, only: Any) -> None:
    target = state(1.0)
    found = jct.load(path, target, only=only)
    assert_same(found["params"], state(2.0)["params"])
    assert found["opt"][0]["mu"] is target["opt"][0]["mu"]
    assert (found["opt"][1]["count"], found["step"]) == (5, 7)
    assert_same(jct.load(path, only=only), {"params": jax.tree.map(np.asarray, state(2.0)["params"])})


def test_pattern_and_placeholder_of_whole_branch_go_together(path: Path) -> None:
    target = {"params": state(1.0)["params"], "opt": jct.PLACEHOLDER, "step": 0}
    found = jct.load(path, target, only=["params/dense/kernel", "opt/*/mu"])
    assert found["opt"] is jct.PLACEHOLDER
    assert_same(found["params"]["dense"]["kernel"], state(2.0)["params"]["dense"]["kernel"])
    assert jct.load(path, jct.PLACEHOLDER) is jct.PLACEHOLDER


def test_leaves_that_are_not_chosen_are_not_compared(path: Path) -> None:
    target = {"params": state(1.0)["params"], "opt": "something else", "new": 3}
    assert_same(jct.load(path, target, only="params/**"), {**target, "params": state(2.0)["params"]})


def test_selected_leaf_missing_in_target_is_refused(path: Path) -> None:
    with pytest.raises(jct.MismatchError, match=r"leaf 'params/dense/bias': saved float32\[4\]"):
        jct.load(path, {"params": {"dense": {"kernel": S((3, 4), jnp.float32)}}}, only="params/**")


@pytest.mark.parametrize("like", [None, state(1.0)], ids=["no target", "target"])
@pytest.mark.parametrize(
    ("only", "named"),
    [("parms/**", r"'parms/\*\*'"), (["params/**", "typo/**"], r"'typo/\*\*'"), ([], r"\[\]")],
    ids=["one", "one of two", "no pattern"],
)
def test_each_pattern_must_select_a_leaf(path: Path, only: Any, named: str, like: Any) -> None:
    with pytest.raises(jct.MismatchError, match=f"only={named} selects none of 6 leaves"):
        jct.load(path, like, only=only)


def test_placeholders_skip_a_leaf_or_a_whole_subtree(path: Path) -> None:
    target = {"params": {"dense": {"kernel": jct.PLACEHOLDER, "bias": S((4,), jnp.float32)}}, "opt": ..., "step": 0}
    found = jct.load(path, target)
    assert raw(found["params"]["dense"]["bias"]) == raw(2 * np.ones(4, np.float32))
    assert found["params"]["dense"]["kernel"] is jct.PLACEHOLDER
    assert found["opt"] is ...
    assert found["step"] == 7


def test_placeholder_does_not_hide_other_leaves(path: Path) -> None:
    with pytest.raises(jct.MismatchError) as caught:
        jct.load(path, {"params": ..., "opt": [..., {"mu": ...}], "step": ...})
    (difference,) = caught.value.differences
    assert difference.startswith("leaf 'opt/1/count': saved Python int")


def test_renamed_leaves_are_found_under_their_new_names(path: Path) -> None:
    target = {"model": {"dense": state(1.0)["params"]["dense"]}, "opt": ..., "count": 0}
    found = jct.load(path, target, rename={"params/**": "model/**", "step": "count"})
    assert_same(found["model"], state(2.0)["params"])
    assert found["count"] == 7
    assert set(jct.load(path, rename={"params/dense/**": "**"}, only=["kernel", "bias"])) == {"kernel", "bias"}


def test_missing_leaves_keep_their_value_where_asked(path: Path) -> None:
    target = {**state(1.0), "ema": {"a": jnp.full(3, 9.0), "b": "kept"}}
    with pytest.raises(jct.MismatchError, match="leaf 'ema/a': not in the checkpoint") as caught:
        jct.load(path, target)
    assert len(caught.value.differences) == 2
    found = jct.load(path, target, missing="keep")
    assert found["ema"]["a"] is target["ema"]["a"]
    assert found["ema"]["b"] == "kept"
    assert_same({name: found[name] for name in state(2.0)}, state(2.0))


def test_an_abstract_leaf_has_no_value_to_keep(path: Path) -> None:
    with pytest.raises(jct.MismatchError, match=r"leaf 'new': .* float32\[3\]"):
        jct.load(path, {**state(1.0), "new": S((3,), jnp.float32)}, missing="keep")


def test_missing_keep_does_not_allow_unwanted_leaves(path: Path) -> None:
    with pytest.raises(jct.MismatchError, match=r"leaf 'step': .*not in the target"):
        jct.load(path, {name: leaf for name, leaf in state(1.0).items() if name != "step"}, missing="keep")


@pytest.mark.timeout(30)
def test_cast_that_fails_on_accelerator_is_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The CPU acts as the accelerator. An out-of-memory error of device_put takes the same path."""
    monkeypatch.setattr(Placer, "leaves_host", lambda self, load: True)
    tree = {f"x{n}": np.full(1 << 20, 1 << 20, np.int32) for n in range(20)}
    jct.save(tmp_path / "c", tree)
    like = {name: jax.ShapeDtypeStruct(leaf.shape, np.int8) for name, leaf in tree.items()}
    chosen = jct.StoreSettings(read_budget_bytes=1 << 20, io_threads=1)
    with pytest.raises(jct.MismatchError, match="does not hold all values"):
        jct.load(tmp_path / "c", like, cast=True, settings=chosen)


@pytest.mark.parametrize("only", ["params", "/params/**", "params/*", "param/**", ["params/**", "params/"]])
def test_pattern_without_match_suggests_one_that_matches(path: Path, only: Any) -> None:
    with pytest.raises(jct.MismatchError, match=r'did you mean "params/\*\*"\?'):
        jct.load(path, only=only)


def test_rename_below_leaf_is_refused_before_reading(path: Path) -> None:
    with pytest.raises(jct.MismatchError, match=r"'params/dense/kernel/x' .* leaf 'params/dense/kernel'"):
        jct.load(path, rename={"params/dense/bias": "params/dense/kernel/x"})


def test_error_for_unrelated_pattern_lists_names(path: Path) -> None:
    with pytest.raises(jct.MismatchError, match=r"none of 6 leaves: 'opt/\*\*', 'params/\*\*'"):
        jct.load(path, only="zzz")
    with pytest.raises(jct.MismatchError, match=r"none of 6 leaves: 'opt"):
        jct.load(path, only=lambda name: False)

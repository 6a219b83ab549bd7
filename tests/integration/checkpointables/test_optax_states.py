"""Optax states come back with their structure, and the optimizer continues with equal results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxckpt_train as jct
from tests.support.same_trees import assert_same
from tests.support.tiers import nightly_after

PARAMS = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}, "head": {"kernel": jnp.ones((3, 1))}}
LABELS = {"dense": "slow", "head": "frozen"}

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    # One of each way to nest states, with leaves of all kinds.
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-1e-2)),
    "multi_transform": lambda: optax.multi_transform({"slow": optax.adam(1e-3), "frozen": optax.set_to_zero()}, LABELS),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1, 0, 9)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)),
    # More of them.
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(1e-2),
    "adamw with schedule": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 100)),
    "bfloat16 momentum": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"dense": True, "head": False}),
    "inject a number": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=3).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}


def steps(optimizer: Any, params: Any, state: Any, count: int) -> tuple[Any, Any]:
    for _ in range(count):
        gradients = jax.tree.map(lambda leaf: 0.1 * leaf + 0.5, params)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", nightly_after(4, OPTIMIZERS))
def test_optimizer_continues_exactly_after_load(name: str, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS[name]()
    params, state = steps(optimizer, PARAMS, optimizer.init(PARAMS), 4)
    jct.save(tmp_path / "c", (params, state))
    target = (PARAMS, optimizer.init(PARAMS))
    found = jct.load(tmp_path / "c", target)
    assert_same(found, (params, state))
    assert_same(steps(optimizer, *found, 3), steps(optimizer, params, state, 3))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_abstract_state_is_a_target_too(name: str, tmp_path: Path) -> None:
    optimizer = OPTIMIZERS[name]()
    _, state = steps(optimizer, PARAMS, optimizer.init(PARAMS), 2)
    jct.save(tmp_path / "c", state)
    assert_same(jct.load(tmp_path / "c", jax.eval_shape(optimizer.init, PARAMS)), state)


def test_leaves_are_named_by_fields_of_state(tmp_path: Path) -> None:
    optimizer = optax.chain(optax.clip(1.0), optax.masked(optax.adam(1e-2), {"dense": True, "head": False}))
    jct.save(tmp_path / "c", optimizer.init(PARAMS))
    leaves = jct.metadata(tmp_path / "c").checkpointables["state"].leaves
    assert leaves["0"].description == "an empty container"
    assert leaves["1/inner_state/0/mu/dense/kernel"].description == "float32[2,3]"
    assert leaves["1/inner_state/0/mu/head"].description == "an empty container"

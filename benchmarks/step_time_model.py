"""The training that is disturbed: a transformer of Flax with Adam of Optax, one jitted step that donates its state."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY = 256
HEAD_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of the model and of a batch. The state is three float32 for each of 12 * layers * width**2 weights."""

    layers: int
    width: int
    batch: int
    window: int


FULL = Size(layers=5, width=896, batch=2, window=16)
QUICK = Size(layers=4, width=512, batch=2, window=16)


class Block(nn.Module):
    """Attention to what came before, then two dense layers."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Values [batch, window, width] to values of the same shape."""
        mask = nn.make_causal_mask(x[..., 0])
        heads = max(1, self.width // HEAD_WIDTH)
        x = x + nn.MultiHeadDotProductAttention(num_heads=heads)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(hidden)


class Model(nn.Module):
    """A language model of bytes."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens [batch, window] to logits [batch, window, vocabulary]."""
        x = nn.Embed(VOCABULARY, self.size.width)(tokens)
        for _ in range(self.size.layers):
            x = Block(self.size.width)(x)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


class Training:
    """A training loop's state and its step."""

    def __init__(self, size: Size) -> None:
        model, optimizer = Model(size), optax.adam(1e-4)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (size.batch, size.window + 1), dtype=np.int32)
        self._inputs, self._targets = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])

        def loss_of(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            logits = model.apply(params, inputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        def update(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
            loss, gradients = jax.value_and_grad(loss_of)(state["params"], inputs, targets)
            changes, moments = optimizer.update(gradients, state["opt_state"], state["params"])
            return {"params": optax.apply_updates(state["params"], changes), "opt_state": moments}, loss

        def initial(key: jax.Array, inputs: jax.Array) -> Any:
            params = model.init(key, inputs)
            return {"params": params, "opt_state": optimizer.init(params)}

        self.state = jax.block_until_ready(jax.jit(initial)(jax.random.key(0), self._inputs))
        self._update = jax.jit(update, donate_argnums=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def step(self) -> tuple[float, float]:
        """One step; when it began and when its loss was there, by `time.perf_counter`."""
        began = time.perf_counter()
        self.state, loss = self._update(self.state, self._inputs, self._targets)
        jax.block_until_ready(loss)
        return began, time.perf_counter()

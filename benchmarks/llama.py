"""The shapes of Llama 3.1 8B, as published, and smaller models of the same build."""

from __future__ import annotations

import dataclasses

from benchmarks.leaf import Leaf


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes that fix every shape; the defaults are those of Llama 3.1 8B."""

    hidden: int = 4096
    ffn: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256

    def scaled(self, *, width: int, layers: int) -> Model:
        """The model with every width (and the vocabulary) divided by `width`, and this many layers.

        The size of a head stays, so there are fewer heads.
        """
        return Model(
            hidden=self.hidden // width,
            ffn=self.ffn // width,
            layers=layers,
            heads=max(1, self.heads // width),
            kv_heads=max(1, self.kv_heads // width),
            vocabulary=self.vocabulary // width,
        )

    @property
    def head(self) -> int:
        """Values of one attention head."""
        return self.hidden // self.heads


def parameter_shapes(model: Model, *, stacked: bool = False) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Path -> shape of every parameter.

    Args:
        model: the sizes.
        stacked: one array for all layers, with a leading axis of layers, as `jax.lax.scan` wants them.
    """
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {("embed", "embedding"): (model.vocabulary, model.hidden)}
    for path, shape in _layer_shapes(model).items():
        if stacked:
            shapes["layers", *path] = (model.layers, *shape)
        else:
            shapes |= {(f"layer_{number:02d}", *path): shape for number in range(model.layers)}
    shapes["final_norm", "scale"] = (model.hidden,)
    shapes["lm_head", "kernel"] = (model.hidden, model.vocabulary)
    return shapes


def training_state(model: Model, *, stacked: bool = False) -> tuple[Leaf, ...]:
    """bfloat16 parameters below `params`; below `opt_state` Adam's count (int32), mu and nu (float32)."""
    shapes = parameter_shapes(model, stacked=stacked)
    parameters = [Leaf(("params", *path), shape, "bfloat16") for path, shape in shapes.items()]
    moments = [Leaf(("opt_state", name, *path), shape) for name in ("mu", "nu") for path, shape in shapes.items()]
    return (*parameters, Leaf(("opt_state", "count"), (), "int32"), *moments)


def _layer_shapes(model: Model) -> dict[tuple[str, ...], tuple[int, ...]]:
    queries, keys = model.heads * model.head, model.kv_heads * model.head
    return {
        ("attention", "q"): (model.hidden, queries),
        ("attention", "k"): (model.hidden, keys),
        ("attention", "v"): (model.hidden, keys),
        ("attention", "o"): (queries, model.hidden),
        ("mlp", "gate"): (model.hidden, model.ffn),
        ("mlp", "up"): (model.hidden, model.ffn),
        ("mlp", "down"): (model.ffn, model.hidden),
        ("norm", "attention"): (model.hidden,),
        ("norm", "mlp"): (model.hidden,),
    }

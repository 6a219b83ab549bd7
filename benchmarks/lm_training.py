"""The training of `examples/train_lm.py` for benchmarks: its model, data and mesh, in a size of their own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from omegaconf import DictConfig, OmegaConf

from benchmarks.machine import ROOT
from examples import train_lm

# On two cores an update takes some 70 ms, and the state with Adam's moments has 230 MB. One device: with two that are
# made of the CPU, an update takes three times as long, and waits most of that time.
FULL: Mapping[str, Any] = {"width": 512, "layers": 6, "heads": 8, "batch_size": 4, "window": 32, "mesh": [1, 1]}
QUICK: Mapping[str, Any] = {**FULL, "width": 32, "layers": 1, "heads": 2, "batch_size": 2, "window": 8}


@dataclasses.dataclass
class LmTraining:
    """A training under way. What a checkpoint library restores into, and saves, are these objects.

    Attributes:
        model, optimizer: of Flax NNX, changed in place.
        data: the iterator of Grain; may be replaced by a restored one.
    """

    model: Any
    optimizer: Any
    data: Any
    _sharding: NamedSharding

    def update(self) -> jax.Array:
        """One update; its loss, which may not be there yet."""
        batch = jax.make_array_from_process_local_data(self._sharding, next(self.data))
        return train_lm.train_step(self.model, self.optimizer, batch)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state((self.model, self.optimizer))))


def configure(size: Mapping[str, Any], cache: Path) -> DictConfig:
    """Configure the training and JAX, before anybody asks for devices.

    Args:
        size: values that replace those in `examples/conf/train_lm.yaml`.
        cache: of what XLA has compiled, for all processes that train: a job that is started again and again has one.
    """
    config = OmegaConf.load(ROOT / "examples" / "conf" / "train_lm.yaml")
    assert isinstance(config, DictConfig)
    config.merge_with({**size, "devices": size["mesh"][0] * size["mesh"][1]})
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    train_lm.begin(config)
    return config


@contextlib.contextmanager
def lm_training(config: DictConfig) -> Iterator[LmTraining]:
    """Build the training that `configure` has made ready for; its mesh is set within."""
    data = iter(train_lm.dataset(train_lm.read_text(config.files), config))
    mesh = jax.make_mesh(tuple(config.mesh), ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    with jax.set_mesh(mesh):
        model, optimizer = train_lm.create(config)
        yield LmTraining(model, optimizer, data, NamedSharding(mesh, PartitionSpec("fsdp")))

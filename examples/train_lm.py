"""A small language model of bytes with Flax NNX, sharded over a mesh of 4x2 devices, that resumes bit for bit.

By default it learns the source text of Python's standard library, on eight CPU devices:

    python examples/train_lm.py
    python examples/train_lm.py steps=20 checkpoint.directory=/data/lm 'files=[README.md]'

The same as a job of four processes with two devices each, each started with its own number. Another number of
processes can resume it, as long as the global batch stays the same:

    python examples/train_lm.py job.processes=4 job.process=0 job.coordinator=127.0.0.1:5123 devices=2 &
    python examples/train_lm.py job.processes=4 job.process=1 job.coordinator=127.0.0.1:5123 devices=2 & ...
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import grain
import hydra
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from omegaconf import DictConfig

import jaxckpt_train as jct


def begin(cfg: DictConfig) -> None:
    """Set the number of CPU devices, and join the other processes of the job if there are any."""
    jax.config.update("jax_num_cpu_devices", cfg.devices)  # before JAX looks for devices; no effect on other platforms
    if cfg.job.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(cfg.job.coordinator, cfg.job.processes, cfg.job.process)


def dense(n_in: int, n_out: int, split: tuple[str, str], rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer whose kernel is sharded over the mesh: one dimension for FSDP, one for tensor parallelism."""
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), split)
    return nnx.Linear(n_in, n_out, use_bias=False, kernel_init=kernel_init, rngs=rngs)


class Block(nnx.Module):
    """Causal attention, then two dense layers."""

    def __init__(self, width: int, heads: int, dropout: float, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.qkv = dense(width, 3 * width, ("fsdp", "tensor"), rngs)
        self.out = dense(width, width, ("tensor", "fsdp"), rngs)
        self.up = dense(width, 4 * width, ("fsdp", "tensor"), rngs)
        self.down = dense(4 * width, width, ("tensor", "fsdp"), rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Values [batch, window, width] to values of the same shape."""
        batch, window, width = x.shape
        qkv = self.qkv(self.norm_1(x)).reshape(batch, window, 3, self.heads, width // self.heads)
        heard = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + self.dropout(self.out(heard.reshape(batch, window, width)))
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm_2(x)))))


class Model(nnx.Module):
    """A GPT of bytes."""

    def __init__(self, cfg: DictConfig, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), ("fsdp", None))
        self.bytes = nnx.Embed(256, cfg.width, embedding_init=init, rngs=rngs)
        self.places = nnx.Embed(cfg.window, cfg.width, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([Block(cfg.width, cfg.heads, cfg.dropout, rngs) for _ in range(cfg.layers)])
        self.norm = nnx.LayerNorm(cfg.width, rngs=rngs)
        self.logits = dense(cfg.width, 256, ("fsdp", "tensor"), rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Logits [batch, window, 256] of the byte that follows each of text [batch, window]."""
        x = self.bytes(text) + self.places(np.arange(text.shape[1]))
        for block in self.blocks:
            x = block(jax.lax.with_sharding_constraint(x, PartitionSpec("fsdp")))
        return self.logits(self.norm(x))


def lay_out(*objects: nnx.Pytree) -> None:
    """Shard all variables over the mesh by their metadata; variables without metadata are on every device."""
    state = nnx.state(objects)
    nnx.update(objects, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))


@nnx.jit(static_argnums=0)
def create(cfg: DictConfig) -> tuple[Model, nnx.Optimizer]:
    """Model and optimizer, each array made on the devices that hold it."""
    model = Model(cfg, nnx.Rngs(cfg.seed))
    optimizer = nnx.Optimizer(model, optax.adamw(cfg.learning_rate), wrt=nnx.Param)
    lay_out(model, optimizer)
    return model, optimizer


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
    """Do one update in place and return the loss. The counters of dropout's Rngs are part of the model."""

    def loss_of(model: Model) -> jax.Array:
        logits = model(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    lay_out(model, optimizer)  # as before the update; otherwise XLA would choose again, and recompile the next update
    return loss


def read_text(files: Sequence[str]) -> np.ndarray:
    """Concatenate the bytes of all files, as int32 [bytes]."""
    paths = [Path(file) for file in files] or sorted(Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(b"\n".join(path.read_bytes() for path in paths), np.uint8).astype(np.int32)


def dataset(text: np.ndarray, cfg: DictConfig) -> grain.IterDataset:
    """Endless int32 [batch / processes, window + 1]: this process's part of batches of pieces of the text, shuffled.

    The position in it counts batches of all processes together: another number of processes can continue from there.
    """
    pieces = grain.MapDataset.range((len(text) - 1) // cfg.window).shuffle(seed=cfg.seed).repeat()
    here = cfg.batch_size // jax.process_count()
    mine = slice(jax.process_index() * here, (jax.process_index() + 1) * here)

    def read(numbers: np.ndarray) -> np.ndarray:
        return np.stack([text[piece * cfg.window : (piece + 1) * cfg.window + 1] for piece in numbers[mine]])

    batches = pieces.batch(cfg.batch_size, drop_remainder=True).map(read)
    return batches.to_iter_dataset(grain.ReadOptions(num_threads=1))


@hydra.main(version_base=None, config_path="conf", config_name="train_lm")
def main(cfg: DictConfig) -> None:
    """Start the training, or resume it."""
    begin(cfg)
    text = read_text(cfg.files)
    data = iter(dataset(text, cfg))
    # A resume with another text is refused, because the position would mean something else.
    cfg.checkpoint.fingerprint = hashlib.sha256(text.tobytes()).hexdigest()[:16]

    mesh = jax.make_mesh(tuple(cfg.mesh), ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    with jax.set_mesh(mesh), jct.CheckpointCallback.from_config(cfg.checkpoint) as ckpt:
        model, optimizer = create(cfg)
        # Restores the objects in place, each array to its current devices: the checkpoint may come from
        # another mesh.
        (model, optimizer), data = ckpt.resume((model, optimizer), data)
        print(f"starting after {ckpt.completed_steps} of {cfg.steps} updates of {len(text):,} bytes of text")
        for step in ckpt.steps(cfg.steps):
            batch = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("fsdp")), next(data))
            loss = train_step(model, optimizer, batch)
            # Printing the loss waits for the device.
            print(f"update {step + 1}: loss {float(loss):.4f} {float(loss).hex()}", flush=True)
            # The objects were changed in place: those that `resume` was given are saved, if it is time for that.
            ckpt(metrics={"loss": loss})


if __name__ == "__main__":
    main()

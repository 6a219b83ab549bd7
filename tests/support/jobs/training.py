"""A small training over all devices of a job, for functions that its processes call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt_train as jct

RECORDS, GLOBAL_BATCH, WIDTH = 96, 8, 16


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def dataset(epochs: int = 4) -> Any:
    """Return the records of this process, in batches that form global batches."""
    n, i = jax.process_count(), jax.process_index()
    records = grain.MapDataset.range(RECORDS).shuffle(seed=3).repeat(epochs)[i::n]
    return records.batch(GLOBAL_BATCH // n).to_iter_dataset(grain.ReadOptions(num_threads=0))


def start() -> dict[str, Any]:
    """Return the initial state: a sharded matrix, replicated arrays, and a key."""
    rows, everywhere = NamedSharding(mesh(), P("x")), NamedSharding(mesh(), P())
    make = jax.jit(
        lambda: {
            "w": jnp.arange(64.0 * WIDTH).reshape(64, WIDTH) / 1000,
            "b": jnp.zeros(WIDTH),
            "key": jax.random.key(7),
            "seen": jnp.zeros(RECORDS, jnp.int32),
        },
        out_shardings={"w": rows, "b": everywhere, "key": everywhere, "seen": everywhere},
    )
    made: dict[str, Any] = make()
    return made


@jax.jit
def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Make an update whose bits depend on the state, the data and the key."""
    key, noise = jax.random.split(state["key"])
    seen = state["seen"].at[batch].add(1)
    scale = jnp.sum(jnp.sort(batch).astype(jnp.float32)) / 1000
    w = state["w"] * 0.99 + scale * jax.random.normal(noise, state["w"].shape)
    return {"w": w, "b": state["b"] + w[0], "key": key, "seen": seen}, jnp.max(jnp.abs(w))


def global_batch(data: Any) -> jax.Array:
    rows = NamedSharding(mesh(), P("x"))
    return jax.make_array_from_process_local_data(rows, np.asarray(next(data), np.int32), (GLOBAL_BATCH,))


def train(directory: str, steps: int, options: dict[str, Any], events: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train to the end or to a shutdown; return the result of this process.

    `events`: what happens in a process after some updates, such as `{"step": 3, "process": 1, "signal": 15}`.
    """
    losses, preempted = [], None
    store = jct.StoreSettings(**options.pop("store", {}))
    try:
        with jct.CheckpointCallback(directory, on_preemption="raise", store=store, **options) as ckpt:
            state, data = ckpt.resume(start(), iter(dataset(10_000)))
            started = ckpt.completed_steps
            for step in ckpt.steps(steps):
                state, loss = train_step(state, global_batch(data))
                losses.append(float(loss).hex())
                if events:
                    happen(events, step + 1)
                ckpt(state, metrics={"loss": loss})
    except jct.Preempted as error:
        preempted = [error.step, error.exit_code]
    seen = np.asarray(state["seen"].addressable_shards[0].data).tolist()
    return {"started": started, "losses": losses, "preempted": preempted, "seen": seen}


def sink_events(directory: str) -> list[list[Any]]:
    """Return the events that sinks receive from a short run in this process."""
    events = list[list[Any]]()
    with jct.StepManager(
        directory, sinks=[lambda event: events.append([event["event"], event.get("step")])]
    ) as manager:
        manager.save(1, {"state": start()})
        manager.wait()
        manager.restore({"state": start()})
    return events


def happen(events: dict[str, Any], step: int) -> None:
    """Trigger the event of this step in this process."""
    import os

    if events["step"] == step and events["process"] == jax.process_index():
        if "signal" in events:
            os.kill(os.getpid(), events["signal"])
        if "file" in events:
            Path(events["file"]).touch()


def history(directory: Path, event: str) -> list[dict[str, Any]]:
    lines = (directory / "history.jsonl").read_text().splitlines()
    return [each for line in lines if (each := json.loads(line))["event"] == event]

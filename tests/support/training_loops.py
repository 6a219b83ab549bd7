"""Training loops that resume exactly, and the same loops with one typical mistake each."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import jaxckpt_train as jct

UPDATES, INTERVAL = 9, 3
EXAMPLES, BATCH = 24, 4
DRAWS = {"host generator", "unseeded host generator", "python's generator", "own generator", "device", "rounding"}


class Batches:
    """Shuffled batches of a few examples, repeated; knows its position."""

    def __init__(self, seed: int | None = 0, mistake: str = "") -> None:
        self.position, self._mistake = 0, mistake
        self._order = np.random.default_rng(seed).permutation(EXAMPLES)
        self._examples = np.random.default_rng(1).normal(size=(EXAMPLES, 3))

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        first = self.position * BATCH % EXAMPLES
        self.position += 1
        rows = self._order[first : first + BATCH]
        x = self._examples[rows]
        if self._mistake == "transform":
            x = x + np.random.normal(size=x.shape)
        return {"x": x, "row": rows}

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        if self._mistake == "set_state":
            return
        self.position = int(state["position"])
        if self._mistake == "order":
            self._order = np.random.default_rng(self.position).permutation(EXAMPLES)


class Ema:
    """A checkpointable whose restore may omit a part of its state."""

    def __init__(self, forgets: bool) -> None:
        self.mean, self.count, self._forgets = np.zeros(3), 0, forgets

    def add(self, w: np.ndarray) -> None:
        self.mean, self.count = 0.9 * self.mean + 0.1 * w, self.count + 1

    def get_state(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]
        if not self._forgets:
            self.count = int(state["count"])


def drawn(mistake: str) -> float:
    """Return the noise that a mistaken source of randomness adds to the gradient."""
    match mistake:
        case "host generator" | "unseeded host generator":
            return float(np.random.normal())
        case "python's generator":
            return random.random()
        case "rounding":  # like another order of sums
            return 1e-9 * int.from_bytes(os.urandom(2), "little") / 65536
        case _:
            return int.from_bytes(os.urandom(2), "little") / 65536


def update(state: dict[str, Any], batch: dict[str, np.ndarray], rate: float, noise: float) -> tuple[Any, float]:
    """One update of a linear regression with momentum, and the loss before it."""
    x, w = batch["x"], state["w"]
    error = x @ w - x.sum(axis=1) + noise
    moment = 0.9 * state["moment"] + 2 * (error[:, None] * x).mean(axis=0)
    return {**state, "w": w - rate * moment, "moment": moment, "step": state["step"] + 1}, float(np.mean(error**2))


def train(directory: Path, mistake: str = "", reports_metrics: bool = True, updates: int = UPDATES) -> None:
    """Train, or resume, with one mistake.

    Args:
        directory: where it saves.
        mistake: its name; "": the loop resumes exactly.
        reports_metrics: whether it passes metrics to its callback.
        updates: of the whole training.
    """
    if mistake in ("host generator", "python's generator", "transform"):
        np.random.seed(0)
        random.seed(0)
    start = np.full(3, drawn("") if mistake == "start" else 0.5)
    state: dict[str, Any] = {"w": start, "moment": np.zeros(3), "step": np.int64(0)}
    data: Any = Batches(None if mistake == "unseeded shuffle" else 0, mistake)
    count, ema = 0, Ema(mistake == "forgetful object")
    with jct.CheckpointCallback(directory / "run", save_interval_steps=INTERVAL) as ckpt:
        match mistake:
            case "data not given":
                state = ckpt.resume(state)
            case "state not taken":
                _, data = ckpt.resume(state, data)
            case "optimizer left out":
                kept, data = ckpt.resume({"w": state["w"]}, data)
                state = {**state, **kept}
            case "forgetful object":
                state, data, ema = ckpt.resume(state, data, ema=ema)
            case _:
                state, data = ckpt.resume(state, data)
        if mistake == "data made anew":
            data = wrapped_anew(data)
        taken = ahead(data, mistake)
        own = np.random.default_rng(0)
        for _ in ckpt.steps(updates):
            noise = float(own.normal()) if mistake == "own generator" else 0.0
            noise += drawn(mistake) if mistake in DRAWS - {"own generator"} else 0.0
            rate = 0.1 / (1 + count) if "schedule" in mistake else 0.05
            rate *= 0.5 if mistake == "late counter" and count == 4 else 1.0
            before = state
            state, loss = update(state, next(taken), rate, noise)
            count += 1
            ema.add(state["w"])
            saved = {"w": state["w"]} if mistake == "optimizer left out" else state
            saved = before if mistake == "state before" else saved
            metrics = {"loss": loss} | ({"learning_rate": rate} if mistake == "schedule that is reported" else {})
            metrics |= {"updates_per_s": time.perf_counter()} if mistake.startswith("clock") else {}
            more = {"ema": ema} if mistake in ("forgetful object", "object not restored") else {}
            ckpt(saved, metrics=metrics if reports_metrics else None, **more)


def wrapped_anew(data: Any) -> Any:
    """Return the resumed iterator, set back to the start of its data."""
    data.position = 0
    return data


def ahead(data: Any, mistake: str) -> Any:
    """Return the data for the loop; a mistake takes batches before their update."""
    if mistake == "prefetch":
        return prefetched(data)
    return on_a_thread(data) if mistake == "thread" else data


def prefetched(data: Any) -> Any:
    """Yield batches, taken one ahead of the loop."""
    coming = next(data)
    while True:
        current, coming = coming, next(data)
        yield current


def on_a_thread(data: Any) -> Any:
    """Yield batches that a thread takes ahead of the loop."""
    batches: queue.Queue[Any] = queue.Queue(1)

    def fill() -> None:
        while True:
            batches.put(next(data))

    threading.Thread(target=fill, daemon=True).start()
    coming = batches.get()
    while True:
        current, coming = coming, batches.get()
        yield current


def train_with_key(directory: Path, kept: bool = True) -> None:
    """A loop with dropout; its key is part of the state, or by mistake is not."""
    import jax

    key = jax.random.key(0)
    state: dict[str, Any] = {"w": np.full(3, 0.5), "moment": np.zeros(3), "step": np.int64(0)}
    state |= {"key": key} if kept else {}
    with jct.CheckpointCallback(directory, save_interval_steps=INTERVAL) as ckpt:
        state, data = ckpt.resume(state, Batches())
        for _ in ckpt.steps(UPDATES):
            key, dropout_key = jax.random.split(state["key"] if kept else key)
            batch = next(data)
            batch = {"x": batch["x"] * np.asarray(jax.random.bernoulli(dropout_key, 0.5, (BATCH, 1)))}
            state, loss = update(state, batch, 0.05, 0.0)
            state |= {"key": key} if kept else {}
            ckpt(state, metrics={"loss": loss})

"""WriterSink: the figures of a run's events next to the losses, through the writer of scalars that a training has."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt_train.sinks.measures import figures
from jaxckpt_train.value_checks import refuse


class WriterSink:
    """Scalars such as `checkpoint/save/blocked_s`, `checkpoint/restore/bytes_per_s`, and `checkpoint/preempted/count`.

    Each event has its fields that are numbers, and how many of its kind there were in this process. They are of the
    event's step, or of the last one that was told where it has none. TensorBoard's writer is flushed after each event,
    as a job that is preempted may not get to that; clu's is not, as while one of its `AsyncWriter` flushes, the loop
    cannot write.

    Weights & Biases drops rows whose step is lower than the last one, and events arrive late. So each kind of event
    has an axis of its own there, such as `checkpoint/save/step`, and its figures join the row that the loop logs next:
    the sink never moves the step of the run. Of several events of one kind within one row the last one is kept.

    Args:
        writer: with `write_scalars(step, scalars)`, as clu's `MetricWriter`, or
            `add_scalar(tag, value, global_step)`, as TensorBoard's `SummaryWriter` of PyTorch and of tensorboardX, or
            `log(data, commit=...)` and `define_metric(name, step_metric=...)`, as a `wandb.Run`. It is called on a
            thread that is not the loop's. Close it when the run has ended.

    Raises:
        SettingsError: the writer has none of these.
    """

    def __init__(self, writer: Any) -> None:
        self._writer, self._step, self._counts, self._flushes = writer, 0, collections.Counter[str](), False
        self._axes = set[str]()  # of W&B, that are defined
        if callable(getattr(writer, "write_scalars", None)):
            self._write: Callable[[int, Mapping[str, float]], object] = writer.write_scalars
        elif callable(getattr(writer, "add_scalar", None)):
            self._write, self._flushes = self._add_each, True
        elif callable(getattr(writer, "log", None)) and callable(getattr(writer, "define_metric", None)):
            self._write = self._log_row
        else:
            known = (
                "write_scalars(step, scalars), as clu's, or add_scalar(tag, value, global_step), as TensorBoard's, or "
                "log(data, commit) and define_metric(name, step_metric), as a wandb.Run"
            )
            refuse("WriterSink.writer", f"an object with {known}", writer)

    def _add_each(self, step: int, scalars: Mapping[str, float]) -> None:
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)

    def _log_row(self, step: int, scalars: Mapping[str, float]) -> None:
        kind = next(iter(scalars)).rpartition("/")[0]
        axis = f"{kind}/step"
        if axis not in self._axes:
            self._writer.define_metric(axis)
            self._writer.define_metric(f"{kind}/*", step_metric=axis)
            self._axes.add(axis)
        self._writer.log({**scalars, axis: step}, commit=False)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Write an event."""
        kind, numbers = str(event["event"]), figures(event)
        self._step = int(numbers.get("step", self._step))
        self._counts[kind] += 1
        shown = {name: value for name, value in numbers.items() if name != "step"}
        shown["count"] = float(self._counts[kind])
        self._write(self._step, {f"checkpoint/{kind}/{name}": value for name, value in shown.items()})
        if self._flushes:
            self._done("flush")

    def close(self) -> None:
        """Close the writer. A run of W&B is left open for what the program logs after the training."""
        self._done("close")

    def _done(self, method: str) -> None:
        call = getattr(self._writer, method, None)
        if callable(call):
            call()

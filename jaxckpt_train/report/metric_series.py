"""Metrics by step, of the line that the run descends from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxckpt_train.report.thinning import Sample

MOST_VALUES = 500_000
"""Of all metrics together, held at once."""
MOST_NAMES = 1000


@dataclasses.dataclass(frozen=True)
class MetricValue:
    """What a metric was at a step; may be nan or infinite."""

    step: int
    value: float


class MetricSeries:
    """Collects the metrics of steps; of very many values it keeps the largest of each group of neighbours."""

    def __init__(self) -> None:
        self._samples: dict[str, Sample[tuple[int, float]]] = {}
        self._held = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add those of a step; of a step that was added before, the new ones count."""
        for name, value in metrics.items():
            sample = self._samples.get(name)
            if sample is None:
                if len(self._samples) == MOST_NAMES:
                    continue
                sample = self._samples[name] = Sample(_size, MOST_VALUES)
            sample.add((step, value))
        self._held += len(metrics)
        if self._held > MOST_VALUES:
            for sample in self._samples.values():
                sample.halve()
            self._held = sum(map(len, self._samples.values()))

    def found(self) -> tuple[dict[str, list[MetricValue]], dict[str, int]]:
        """The values of each metric, lowest step first, and how many there were."""
        found, counts = dict[str, list[MetricValue]](), dict[str, int]()
        for name, sample in sorted(self._samples.items(), key=lambda each: min(each[1].items)[0]):
            by_step = dict(sample.items)
            found[name] = [MetricValue(step, by_step[step]) for step in sorted(by_step)]
            counts[name] = len(by_step) if sample.count == len(sample) else sample.count
        return found, counts


def _size(each: tuple[int, float]) -> float:
    return -1.0 if math.isnan(each[1]) else abs(each[1])

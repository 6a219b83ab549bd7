"""Metrics as files hold them."""

from __future__ import annotations

from collections.abc import Mapping


def metrics_from_json(metrics: object) -> dict[str, float]:
    """Metrics as files hold them: what is no mapping counts as no metrics, and what is no number is left out."""
    found = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return found

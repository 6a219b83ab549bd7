"""Builds the policies that the flat arguments of a callback or a YAML file stand for."""

from __future__ import annotations

from jaxckpt_train.errors import SettingsError
from jaxckpt_train.steps.policy_context import PreservationPolicy, SavePolicy
from jaxckpt_train.steps.preservation_policies import AnyPreservationPolicy, BestN, EveryNSteps, LatestN
from jaxckpt_train.steps.save_policies import (
    AnySavePolicy,
    EverySecondsPolicy,
    FixedIntervalPolicy,
    TemporarySavePolicy,
)
from jaxckpt_train.value_checks import Mode, stated_mode

DEFAULT_INTERVAL_SECS = 600.0


def choose_save_policy(
    interval_steps: int | None,
    interval_secs: float | None,
    policy: SavePolicy | None,
    temporary_interval_secs: float | None = None,
) -> SavePolicy:
    """A policy that saves when any of the given reasons does; with none given, every `DEFAULT_INTERVAL_SECS`."""
    reasons: list[SavePolicy] = []
    if interval_steps is not None:
        reasons.append(FixedIntervalPolicy(interval_steps))
    if interval_secs is not None:
        reasons.append(EverySecondsPolicy(interval_secs))
    if policy is not None:
        reasons.append(policy)
    if temporary_interval_secs is not None:
        reasons.append(TemporarySavePolicy(EverySecondsPolicy(temporary_interval_secs)))
    if not reasons:
        return EverySecondsPolicy(DEFAULT_INTERVAL_SECS)
    return reasons[0] if len(reasons) == 1 else AnySavePolicy(reasons)


def choose_preservation_policy(
    latest: int | None,
    every_steps: int | None,
    best: int | None,
    metric: str | None,
    mode: Mode | None,
    policy: PreservationPolicy | None,
) -> PreservationPolicy | None:
    """A policy that keeps what any of the given reasons keeps; with none given, None: everything is kept.

    Raises:
        SettingsError: `best` without a metric.
    """
    reasons: list[PreservationPolicy] = []
    if latest is not None:
        reasons.append(LatestN(latest))
    if every_steps is not None:
        reasons.append(EveryNSteps(every_steps))
    if best is not None:
        if metric is None:
            raise SettingsError("keep_best: expected best_metric with it, the metric that says which step is better")
        reasons.append(BestN(metric, best, stated_mode("best_mode", mode, metric)))
    if policy is not None:
        reasons.append(policy)
    if not reasons:
        return None
    return reasons[0] if len(reasons) == 1 else AnyPreservationPolicy(reasons)

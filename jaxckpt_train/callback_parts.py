"""Makes what a callback is composed of, from the arguments that it was given."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jaxckpt_train import hydra_job
from jaxckpt_train.config_notices import build_notices
from jaxckpt_train.multihost import current, preemption_service
from jaxckpt_train.sinks.feed import checked_sinks
from jaxckpt_train.steps.best_link import BestLink
from jaxckpt_train.steps.departure import Departure
from jaxckpt_train.steps.manager import StepManager
from jaxckpt_train.steps.policy_arguments import require_policy
from jaxckpt_train.steps.policy_choice import choose_preservation_policy, choose_save_policy
from jaxckpt_train.steps.policy_context import SavePolicy
from jaxckpt_train.steps.preemption import PreemptionWatch

_log = logging.getLogger("jaxckpt_train")
Arguments = Mapping[str, Any]  # of CheckpointCallback by name, checked


def save_policy_of(given: Arguments) -> SavePolicy:
    """When it saves."""
    if given["save_policy"] is not None:
        require_policy("checkpoint.save_policy", given["save_policy"], "should_save")
    names = ("save_interval_steps", "save_interval_secs", "save_policy", "temporary_interval_secs")
    return choose_save_policy(*(given[name] for name in names))


def manager_of(given: Arguments, policy: SavePolicy) -> StepManager:
    """The manager of its run; a directory that another start of the same command would not find is warned about."""
    problem = hydra_job.hydra_directory_problem(given["directory"]) if given["enabled"] else None
    if problem is not None:
        _log.warning("%s", problem)
    if given["keep_policy"] is not None:
        require_policy("checkpoint.keep_policy", given["keep_policy"], "should_preserve")
    checked_sinks("checkpoint.sinks", given["sinks"])
    kept = ("keep_latest", "keep_every_steps", "keep_best", "best_metric", "best_mode", "keep_policy")
    return StepManager(
        hydra_job.run_directory(given["directory"]),
        save_decision_policy=policy,
        preservation_policy=choose_preservation_policy(*(given[name] for name in kept)),
        best_link=BestLink(given["best_metric"], given["best_mode"]) if given["best_link"] else None,
        settings=given["store"],
        **{name: given[name] for name in ("if_busy", "stall_timeout_s", "if_stalled", "sinks")},
    )


def watch_of(given: Arguments, manager: StepManager) -> PreemptionWatch:
    """What watches for requests to leave."""
    grace_s, limit_s = given["grace_period_s"], given["max_run_time_s"]
    return PreemptionWatch(
        current(),
        service=preemption_service() if given["enabled"] else None,
        signals=tuple(given["signals"]),
        notice_file=given["notice_file"],
        max_run_time_s=limit_s,
        sources=build_notices("checkpoint.notices", given["notices"]),
        timeout_s=manager.settings.barrier_timeout_s,
        leave_early_s=lambda: manager.leave_early_s(limit_s) if grace_s is None else float(grace_s),
    )


def departure_of(given: Arguments, watch: PreemptionWatch, manager: StepManager) -> Departure:
    """How it leaves; with a grace period, the manager's own waits keep to it."""
    how, grace_s = given["on_preemption"], given["grace_period_s"]
    departure = Departure(
        watch, grace_s, given["exit_code"], lambda: how == "raise" or (how == "auto" and hydra_job.is_multirun())
    )
    if grace_s is not None:
        manager.leave_when(watch.is_asked, departure.is_time_up)
    return departure

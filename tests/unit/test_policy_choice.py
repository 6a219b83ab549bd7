"""The policies that the flat arguments select."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.config import CallbackOptions, CheckpointConfig
from jaxckpt_train.loop import DEFAULT_INTERVAL_SECS, preservation_policy, save_policy


def saves(**options: Any) -> Any:
    return save_policy(CallbackOptions("a", **options))


def keeps(**options: Any) -> Any:
    return preservation_policy(CallbackOptions("a", **options))


def test_without_arguments_time_decides() -> None:
    assert saves() == jct.EverySecondsPolicy(DEFAULT_INTERVAL_SECS)


def test_one_reason_to_save_is_the_policy_itself() -> None:
    assert saves(save_interval_steps=5) == jct.FixedIntervalPolicy(5)
    assert saves(save_interval_secs=2.5) == jct.EverySecondsPolicy(2.5)
    own = jct.SpecificStepsPolicy([3])
    assert saves(save_policy=own) is own


def test_several_reasons_to_save_are_alternatives() -> None:
    own = jct.SpecificStepsPolicy([3])
    wanted = jct.AnySavePolicy([jct.FixedIntervalPolicy(5), jct.EverySecondsPolicy(2.5), own])
    assert saves(save_interval_steps=5, save_interval_secs=2.5, save_policy=own) == wanted


def test_without_arguments_everything_is_kept() -> None:
    assert keeps() is None


def test_one_reason_to_keep_is_the_policy_itself() -> None:
    assert keeps(keep_latest=2) == jct.LatestN(2)
    assert keeps(keep_every_steps=100) == jct.EveryNSteps(100)
    assert keeps(keep_best=3, best_metric="acc", best_mode="max") == jct.BestN("acc", 3, "max")
    own = jct.CustomSteps([1])
    assert keeps(keep_policy=own) is own


def test_several_reasons_to_keep_are_alternatives() -> None:
    own = jct.CustomSteps([1])
    found = keeps(keep_latest=2, keep_every_steps=100, keep_best=3, best_metric="loss", keep_policy=own)
    parts = [jct.LatestN(2), jct.EveryNSteps(100), jct.BestN("loss", 3, "min"), own]
    assert found == jct.AnyPreservationPolicy(parts)


def test_best_without_a_metric_is_refused() -> None:
    with pytest.raises(jct.SettingsError, match=r"keep_best: expected checkpoint\.best_metric"):
        keeps(keep_best=1)


HIGHER = ["accuracy", "val_acc", "eval/top5-Accuracy", "macro.f1", "episode_reward"]
OTHER_SPELLINGS = ["valAccuracy", "BinaryAccuracy", "acc1", "F1Score", "macroF1", "mAP", "rougeL", "bleu4", "mean_io_u"]
OTHER_NAMES = ["ndcg@10", "R2", "win_rate", "exact_match", "ep_rew_mean", "log_likelihood", "roc_auc", "top1"]


@pytest.mark.parametrize("metric", [*HIGHER, *OTHER_SPELLINGS, *OTHER_NAMES])
def test_metric_that_is_better_if_higher_needs_mode(metric: str, tmp_path: Path) -> None:
    for kept in ({"keep_best": 2}, {"best_link": True}):
        with pytest.raises(jct.SettingsError, match=rf"checkpoint\.best_mode: .*{metric}"):
            jct.CheckpointCallback(tmp_path, best_metric=metric, **kept)  # type: ignore[arg-type]
    with pytest.raises(jct.SettingsError, match=r"BestLink\.mode"):
        jct.BestLink(metric)
    assert jct.BestLink(metric, "max").mode == "max"
    assert keeps(keep_best=1, best_metric=metric, best_mode="min") == jct.BestN(metric, 1, "min")


LOWER = ["loss", "val_loss", "dice_loss", "diceLoss", "accuracy_error", "perplexity", "top1_error", "reward_std"]


@pytest.mark.parametrize("metric", [*LOWER, "score_mse", "neg_log_likelihood", "wer", "scores", "grad_norm", "fid"])
def test_other_metrics_are_better_if_lower(metric: str) -> None:
    assert keeps(keep_best=1, best_metric=metric) == jct.BestN(metric, 1, "min")
    assert jct.BestLink(metric).mode == "min"
    assert CheckpointConfig(keep_best=1, best_metric=metric).best_mode is None


def test_a_wrong_interval_is_refused_by_its_policy() -> None:
    with pytest.raises(jct.SettingsError, match=r"FixedIntervalPolicy.interval: .*at least 1"):
        jct.FixedIntervalPolicy(0)

"""Sinks in a configuration: nodes with `_target_`, built when the callback is, and closed with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.metrics.test_writers import scalars_in

APP = """
import hydra
import jax.numpy as jnp
import jaxckpt_train as jct

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    with jct.CheckpointCallback.from_config(cfg.checkpoint) as ckpt:
        state = ckpt.resume({"w": jnp.zeros(3)})
        for step in ckpt.steps(3):
            ckpt(state)

main()
"""


def test_a_hydra_app_has_sinks_from_its_yaml(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "train.py").write_text(APP)
    (tmp_path / "conf" / "train.yaml").write_text(
        """
defaults:
  - checkpoint: default
  - _self_
checkpoint:
  directory: run
  save_interval_steps: 1
  sinks:
    - _target_: jaxckpt_train.PrometheusSink
      path: a.prom
      labels: {run: a}
    - {_target_: jaxckpt_train.WriterSink, writer: {_target_: tensorboardX.SummaryWriter, logdir: logs}}
    - {_target_: jaxckpt_train.OpenTelemetrySink}
"""
    )
    run_python(tmp_path / "train.py", cwd=tmp_path, check=True)
    families = {family.name: family for family in text_string_to_metric_families((tmp_path / "a.prom").read_text())}
    (last,) = families["jaxckpt_last_saved_step"].samples
    assert (last.labels, last.value) == ({"run": "a"}, 3)
    assert scalars_in(tmp_path / "logs")["checkpoint/save/count", 3] == 3

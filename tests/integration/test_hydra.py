"""The presets and the typed configuration in real Hydra apps, each in its own process."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPO_ROOT
from tests.support.tiers import nightly_after

PRESETS = sorted(file.stem for file in (REPO_ROOT / "configs" / "checkpoint").glob("*.yaml"))

APP = """
import os
import hydra
from jaxckpt_train import config

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    arguments = config.callback_arguments(cfg.checkpoint)
    HIDDEN = ("store", "save_policy", "keep_policy", "fast_tier")
    directory = arguments["directory"]
    print({
        **{name: value for name, value in arguments.items() if name not in HIDDEN},
        "fast_tier": arguments["fast_tier"] and vars(arguments["fast_tier"]),
        "notices": [type(source).__name__ for source in arguments["notices"]],
        "policies": [repr(arguments["save_policy"]), repr(arguments["keep_policy"])],
        "durability": arguments["store"].durability,
        "object_store": vars(arguments["store"].object_store),
        "resolved": str(config.run_directory(directory)),
        "problem": config.hydra_directory_problem(directory),
        "multirun": config.is_multirun(),
        "cwd": os.getcwd(),
    })

main()
"""


class App:
    """A user's Hydra app `train.py` in a directory of its own."""

    def __init__(self, run_python: Any, folder: Path, plugin: Path) -> None:
        self._run, self._plugin = run_python, plugin
        self.home = folder / "home"
        self.cwd = folder / "elsewhere"
        (self.home / "conf").mkdir(parents=True)
        self.cwd.mkdir()
        (self.home / "train.py").write_text(APP)
        (self.home / "conf" / "train.yaml").write_text("defaults:\n  - checkpoint: default\n  - _self_\nlr: 0.1\n")

    def __call__(self, *overrides: str) -> Any:
        """Run it in a directory that contains neither the app nor this project."""
        return self._run(self.home / "train.py", *overrides, cwd=self.cwd, path=[self._plugin])

    def arguments(self, *overrides: str) -> dict[str, Any]:
        """Return what one job printed."""
        (job,) = self.jobs(*overrides)
        return job

    def jobs(self, *overrides: str) -> list[dict[str, Any]]:
        """Return what each job printed."""
        done = self(*overrides)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def error(self, *overrides: str) -> str:
        """Return the error output of a call that fails."""
        done = self(*overrides)
        assert done.returncode == 1, done.stdout
        return str(done.stderr)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """The plugin of this checkout in the folder of an install; an editable install may have an older copy."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "hydra_plugins").mkdir()
    shutil.copy(
        repo_root / "jaxckpt_train" / "integrations" / "hydra_search_path.py",
        folder / "hydra_plugins" / "jaxckpt_train_plugin.py",
    )
    return folder


@pytest.fixture
def app(run_python: Any, tmp_path: Path, plugin: Path) -> App:
    """An app whose configuration is `checkpoint: default` alone."""
    return App(run_python, tmp_path, plugin)


def test_presets_are_the_documented_ones() -> None:
    local = {"aws", "cheap", "critical", "default", "gce", "kubernetes", "off", "preemptible", "slurm", "tiered"}
    assert set(PRESETS) == local | URLS.keys()


URLS = {"s3": "s3://bucket/run", "gcs": "gs://bucket/run", "azure": "az://container/run"}
NOTICES = {"aws": "AwsNotice", "gce": "GceNotice", "kubernetes": "KubernetesNotice", "slurm": "SlurmNotice"}


def test_every_preset_composes_and_is_valid(app: App) -> None:
    local = [preset for preset in PRESETS if preset not in URLS]
    jobs = app.jobs("--multirun", f"checkpoint={','.join(local)}")
    for preset, found in zip(local, jobs, strict=True):
        assert found["directory"] == "checkpoints/train", preset
        assert found["enabled"] is (preset != "off")
        assert found["durability"] == ("none" if preset == "cheap" else "full"), preset
        assert found["problem"] is None, preset
        assert (found["fast_tier"] is not None) is (preset == "tiered")
        assert found["notices"] == ([NOTICES[preset]] if preset in NOTICES else [])


@pytest.mark.parametrize("preset", nightly_after(1, sorted(URLS, reverse=True)))
def test_presets_of_object_stores_take_a_url(app: App, preset: str) -> None:
    assert "checkpoint.directory: expected a path, or a URL" in app.error(f"checkpoint={preset}")
    given = [
        f"checkpoint.directory={URLS[preset]}",
        "checkpoint.object_store.endpoint=http://127.0.0.1:1",
        "checkpoint.store.io_threads=4",
        "+checkpoint.object_store.options.virtual_hosted_style_request=true",
    ]
    found = app.arguments(f"checkpoint={preset}", *given)
    assert found["resolved"] == found["directory"] == URLS[preset]
    assert found["object_store"]["endpoint"] == "http://127.0.0.1:1"
    assert found["object_store"]["options"] == {"virtual_hosted_style_request": ...}  # not shown: it may be a secret
    assert found["problem"] is None


def test_jobs_of_a_multirun_on_an_object_store_have_prefixes_of_their_own(app: App) -> None:
    jobs = app.jobs("--multirun", "lr=0.1,0.2", "checkpoint.directory=s3://bucket/sweep/")
    assert [job["resolved"] for job in jobs] == ["s3://bucket/sweep/lr=0.1", "s3://bucket/sweep/lr=0.2"]


def test_overrides_on_the_command_line_win(app: App) -> None:
    found = app.arguments(
        "checkpoint=preemptible",
        "checkpoint.save_interval_steps=500",
        "checkpoint.directory=/data/run",
        "checkpoint.progress=false",
        "checkpoint.store.durability=file",
        "checkpoint.signals=[SIGTERM]",
        "checkpoint.notices=[slurm,{_target_: jaxckpt_train.GceNotice, poll_s: 0.5}]",
    )
    assert found["save_interval_steps"] == 500
    assert found["policies"][0] == (
        "YoungDalyPolicy(mtbf_secs=None, min_interval_secs=30, max_interval_secs=300)"  # of the preset
    )
    assert found["resolved"] == "/data/run"
    assert found["progress"] is False
    assert found["durability"] == "file"
    assert found["signals"] == ("SIGTERM",)
    assert found["notices"] == ["SlurmNotice", "GceNotice"]


def test_the_app_s_own_preset_goes_first(app: App) -> None:
    (app.home / "conf" / "checkpoint").mkdir()
    mine = app.home / "conf" / "checkpoint" / "default.yaml"
    mine.write_text("defaults:\n  - base_checkpoint\n  - _self_\nkeep_latest: 7\n")
    found = app.arguments()
    assert (found["keep_latest"], found["directory"]) == (7, "checkpoints")


@pytest.mark.parametrize(
    ("override", "message"),
    nightly_after(
        5,
        [
            ("checkpoint.save_interval_step=5", "Key 'save_interval_step' not in 'CheckpointConfig'"),
            ("checkpoint.enabled=perhaps", "Value 'perhaps' is not a valid bool"),
            ("checkpoint=cheapest", "Could not find 'checkpoint/cheapest'"),
            ("checkpoint.store.digest=md5", "checkpoint.store.digest: expected one of 'xxh3-128'"),
            ("checkpoint.notices=[gcp]", "checkpoint.notices[0]: expected one of 'gce'"),
            ("checkpoint.store.digests=sha256", "Key 'digests' not in 'StoreConfig'"),
            ("checkpoint.save_interval_steps=often", "Value 'often' of type 'str'"),
            ("checkpoint.if_busy=hurry", "checkpoint.if_busy: expected one of 'wait'"),
            ("checkpoint.directory=???", "checkpoint.directory: cannot be resolved"),
            ("checkpoint.keep_best=3", "checkpoint.keep_best: expected checkpoint.best_metric"),
            ("checkpoint.best_metric=loss", "checkpoint.best_metric: has no effect without checkpoint.keep_best"),
            ("checkpoint.object_store.part_byte=1", "Key 'part_byte' not in 'ObjectStoreConfig'"),
            ("checkpoint.object_store.part_bytes=1", "checkpoint.object_store.part_bytes: expected a whole number"),
        ],
    ),
)
def test_a_mistake_is_refused_by_name(app: App, override: str, message: str) -> None:
    assert message in app.error(override)


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_relative_directory_starts_where_command_was_given(app: App, chdir: str) -> None:
    where = (f"hydra.job.chdir={chdir}", "hydra.run.dir=out/${now:%f}", "checkpoint.fast_tier.directory=ssd")
    first, second = (app.arguments(*where) for _ in range(2))
    assert first["fast_tier"]["directory"] == second["fast_tier"]["directory"] == str(app.cwd / "ssd")
    assert first["resolved"] == second["resolved"] == str(app.cwd / "checkpoints" / "train")
    if chdir == "true":
        assert first["cwd"] != second["cwd"]


def test_directory_in_run_folder_is_warned_of(app: App) -> None:
    inside = "checkpoint.directory=${hydra:runtime.output_dir}/ckpt"
    assert "will not find these checkpoints" in app.arguments(inside)["problem"]
    assert app.arguments(inside, "hydra.run.dir=runs/a")["problem"] is None


def test_jobs_of_a_multirun_never_share_a_directory(app: App) -> None:
    jobs = app.jobs("--multirun", "lr=0.1,0.2", "checkpoint.directory=/data/sweep")
    assert [job["resolved"] for job in jobs] == ["/data/sweep/lr=0.1", "/data/sweep/lr=0.2"]
    assert [job["multirun"] for job in jobs] == [True, True]
    odd = app.jobs("--multirun", "+data=/a/b,/a_b", f"+note={'long' * 100}")
    names = [Path(job["resolved"]).name for job in odd]
    assert len(set(names)) == 2
    assert all(len(name) < 120 for name in names)
    excluded = "hydra.job.config.override_dirname.exclude_keys=[lr]"  # from a text of Hydra's, not from the job
    jobs = app.jobs("--multirun", "lr=0.1,0.2", "checkpoint.directory=/data/sweep", excluded)
    assert [job["resolved"] for job in jobs] == ["/data/sweep/lr=0.1", "/data/sweep/lr=0.2"]


def test_policies_may_be_nodes_with_a_target(app: App) -> None:
    (app.home / "conf" / "train.yaml").write_text(
        """
defaults:
  - checkpoint: default
  - _self_
checkpoint:
  save_policy:
    _target_: jaxckpt_train.AnySavePolicy
    policies:
      - {_target_: jaxckpt_train.SpecificStepsPolicy, steps: [1, 10]}
      - {_target_: jaxckpt_train.FixedIntervalPolicy, interval: 100}
  keep_policy: {_target_: jaxckpt_train.LatestN, n: 3}
"""
    )
    save, keep = app.arguments()["policies"]
    assert save == ("AnySavePolicy(policies=(SpecificStepsPolicy(steps=[1, 10]), FixedIntervalPolicy(interval=100)))")
    assert keep == "LatestN(n=3)"


def test_neither_hydra_nor_jax_is_imported_by_configuration(run_python: Any) -> None:
    program = """
import sys
from jaxckpt_train.config import callback_arguments
from jaxckpt_train.config import hydra_directory_problem, resolve_directory
callback_arguments({"directory": "a"}), hydra_directory_problem("a"), resolve_directory("a")
print([name for name in ("hydra", "omegaconf", "jax", "numpy") if name in sys.modules])
"""
    assert run_python(program, check=True, fresh=True).stdout == "[]\n"

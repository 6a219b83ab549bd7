"""The presets and the typed configuration in real Hydra apps, each in a process of its own."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxckpt_train.config import CheckpointConfig, StoreConfig, callback_arguments, is_multirun, resolve_directory
from jaxckpt_train.errors import SettingsError
from jaxckpt_train.settings import StoreSettings
from tests.support.paths import REPO_ROOT

PRESETS = sorted(file.stem for file in (REPO_ROOT / "configs" / "checkpoint").glob("*.yaml"))

APP = """
import os
import hydra
from jaxckpt_train import config

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg):
    arguments = config.callback_arguments(cfg.checkpoint)
    directory = arguments["directory"]
    print({
        **{name: value for name, value in arguments.items() if name not in ("store", "save_policy", "keep_policy")},
        "notices": [type(source).__name__ for source in arguments["notices"]],
        "policies": [repr(arguments["save_policy"]), repr(arguments["keep_policy"])],
        "durability": arguments["store"].durability,
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
        """Run it in a directory where neither it nor this project lies."""
        return self._run(self.home / "train.py", *overrides, cwd=self.cwd, path=[self._plugin])

    def arguments(self, *overrides: str) -> dict[str, Any]:
        """What one job printed."""
        (job,) = self.jobs(*overrides)
        return job

    def jobs(self, *overrides: str) -> list[dict[str, Any]]:
        """What each job printed."""
        done = self(*overrides)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def error(self, *overrides: str) -> str:
        """What it said when it refused."""
        done = self(*overrides)
        assert done.returncode == 1, done.stdout
        return str(done.stderr)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """The plugin of this checkout where an install puts it; an editable install may hold an older copy."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "hydra_plugins").mkdir()
    shutil.copy(
        repo_root / "jaxckpt_train" / "integrations" / "hydra_search_path.py",
        folder / "hydra_plugins" / "jaxckpt_train_plugin.py",
    )
    return folder


@pytest.fixture
def app(run_python: Any, tmp_path: Path, plugin: Path) -> App:
    """An app whose config names nothing but `checkpoint: default`."""
    return App(run_python, tmp_path, plugin)


def test_there_are_the_presets_that_are_documented() -> None:
    assert PRESETS == ["aws", "cheap", "critical", "default", "gce", "kubernetes", "off", "preemptible", "slurm"]


NOTICES = {"aws": "AwsNotice", "gce": "GceNotice", "kubernetes": "KubernetesNotice", "slurm": "SlurmNotice"}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_and_is_valid(app: App, preset: str) -> None:
    found = app.arguments(f"checkpoint={preset}")
    assert found["directory"] == "checkpoints/train"
    assert found["enabled"] is (preset != "off")
    assert found["durability"] == ("none" if preset == "cheap" else "full")
    assert found["problem"] is None
    assert found["notices"] == ([NOTICES[preset]] if preset in NOTICES else [])


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
    ("override", "said"),
    [
        ("checkpoint.save_interval_step=5", "Key 'save_interval_step' not in 'CheckpointConfig'"),
        ("checkpoint.store.digests=sha256", "Key 'digests' not in 'StoreConfig'"),
        ("checkpoint.save_interval_steps=often", "Value 'often' of type 'str' could not be converted to Integer"),
        ("checkpoint.enabled=perhaps", "Value 'perhaps' is not a valid bool"),
        ("checkpoint=cheapest", "Could not find 'checkpoint/cheapest'"),
        ("checkpoint.if_busy=hurry", "checkpoint.if_busy: expected one of 'wait', 'skip', found 'hurry'"),
        ("checkpoint.store.digest=md5", "checkpoint.store.digest: expected one of 'xxh3-128'"),
        ("checkpoint.directory=???", "checkpoint.directory: cannot be resolved"),
        ("checkpoint.keep_best=3", "checkpoint.keep_best: expected checkpoint.best_metric"),
        ("checkpoint.best_metric=loss", "checkpoint.best_metric: has no effect without checkpoint.keep_best"),
        ("checkpoint.notices=[gcp]", "checkpoint.notices[0]: expected one of 'gce', 'aws', 'slurm', 'kubernetes'"),
    ],
)
def test_a_mistake_is_refused_by_name(app: App, override: str, said: str) -> None:
    assert said in app.error(override)


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_relative_directory_starts_where_command_was_given(app: App, chdir: str) -> None:
    first, second = (app.arguments(f"hydra.job.chdir={chdir}", "hydra.run.dir=out/${now:%f}") for _ in range(2))
    assert first["resolved"] == second["resolved"] == str(app.cwd / "checkpoints" / "train")
    if chdir == "true":
        assert first["cwd"] != second["cwd"]


def test_directory_in_run_folder_is_warned_of(app: App) -> None:
    inside = "checkpoint.directory=${hydra:runtime.output_dir}/ckpt"
    assert "the same command will not find these checkpoints" in app.arguments(inside)["problem"]
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


def test_policies_are_nodes_with_a_target(app: App) -> None:
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


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"_target_": "jaxckpt_train.FixedIntervalPolice", "interval": 1}, 'did you mean "FixedIntervalPolicy"'),
        ({"_target_": "jaxckpt_train.FixedIntervalPolicy", "intervals": 1}, 'did you mean "interval"'),
        ({"_target_": "jaxckpt_train.FixedIntervalPolicy"}, "missing a required argument: 'interval'"),
        ({"_target_": "jaxckpt_train.FixedIntervalPolicy", "interval": 0}, "at least 1"),
        ({"_target_": "jaxckpt_train.LatestN", "n": 1}, "should_save"),
        ({"_target_": "jaxckpt_train.load", "path": "a"}, "expected a policy, found 'jaxckpt_train.load'"),
        ({"_target_": "no.such.Policy"}, "cannot build no.such.Policy"),
        ({"interval": 1}, "_target_"),
        ("often", "_target_"),
    ],
)
def test_a_policy_that_cannot_be_built_is_refused(node: Any, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        callback_arguments({"save_policy": node})
    assert said in str(caught.value)


def test_policy_of_somebody_else_is_built_by_hydra() -> None:
    node = {"_target_": f"{OwnPolicy.__module__}.{OwnPolicy.__qualname__}", "every": 3}
    assert callback_arguments({"save_policy": {"_target_": "jaxckpt_train.AnySavePolicy", "policies": [node]}})
    assert callback_arguments({"save_policy": OwnPolicy(3)})["save_policy"] == OwnPolicy(3)


@dataclasses.dataclass
class OwnPolicy:
    """A policy that a user wrote."""

    every: int

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return bool(step.step % self.every == 0)


def test_the_configuration_has_the_arguments_of_the_callback() -> None:
    from jaxckpt_train import CheckpointCallback

    parameters = inspect.signature(CheckpointCallback).parameters
    assert set(callback_arguments()) == set(parameters)
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    for name, value in callback_arguments().items():
        if name in defaults and name != "store":
            assert defaults[name] == value, name


def test_store_has_fields_and_defaults_of_its_settings() -> None:
    assert StoreConfig().settings() == StoreSettings()
    assert [field.name for field in dataclasses.fields(StoreConfig)] == [
        field.name for field in dataclasses.fields(StoreSettings)
    ]


def test_plain_mappings_objects_and_nothing_are_taken_too() -> None:
    assert callback_arguments() == callback_arguments({}) == callback_arguments(CheckpointConfig())
    given = callback_arguments({"directory": "a", "grace_period_s": 5, "store": {"io_threads": 4}})
    assert (given["directory"], given["grace_period_s"], given["store"].io_threads) == ("a", 5.0, 4)
    assert callback_arguments({"store": StoreSettings(digest="sha256")})["store"].digest == "sha256"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"save_intervall_steps": 5}, 'unknown key "save_intervall_steps", did you mean "save_interval_steps"'),
        ({"something": 5}, "valid keys: directory, save_interval_steps"),
        ({"store": {"digets": "sha256"}}, 'checkpoint.store: unknown key "digets", did you mean "digest"'),
        ({"save_interval_steps": 0}, "checkpoint.save_interval_steps: expected a whole number of at least 1, found 0"),
        ({"save_interval_steps": True}, "found True"),
        ({"save_interval_steps": "500"}, "found '500'"),
        ({"save_interval_secs": float("nan")}, "seconds above 0"),
        ({"exit_code": 256}, "from 0 to 255"),
        ({"signals": ["SIGKILL"]}, "found 'SIGKILL'"),
        ({"signals": "SIGTERM"}, "a list of signal names"),
        ({"progress": 1}, "found 1"),
        ({"enabled": "yes"}, "true or false"),
        ({"directory": ""}, "expected a path"),
        ({"max_run_time_s": 30, "grace_period_s": 60}, "more than checkpoint.grace_period_s"),
        ({"store": 3}, "checkpoint.store: expected a mapping"),
        (["directory"], "checkpoint: expected a mapping"),
    ],
)
def test_a_plain_mapping_is_checked_as_well(config: Any, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        callback_arguments(config)
    assert said in str(caught.value)


def test_field_that_was_set_later_is_checked_too() -> None:
    config = CheckpointConfig()
    config.if_busy = "hurry"
    with pytest.raises(SettingsError, match="hurry"):
        callback_arguments(config)


def test_without_hydra_a_relative_directory_starts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_directory("a/b") == tmp_path / "a" / "b"
    assert resolve_directory("~/a") == Path.home() / "a"
    assert resolve_directory(Path("/a")) == Path("/a")
    assert not is_multirun()
    with pytest.raises(SettingsError, match="gs://bucket/run"):
        resolve_directory("gs://bucket/run")
    with pytest.raises(SettingsError, match=r"^checkpoint.directory '~nobody-of-this-name/run': expected a user with"):
        resolve_directory("~nobody-of-this-name/run")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert resolve_directory("/a/b") == Path("/a/b")


def test_neither_hydra_nor_jax_is_imported_by_configuration(run_python: Any) -> None:
    program = """
import sys
from jaxckpt_train.config import callback_arguments
from jaxckpt_train.config import hydra_directory_problem, resolve_directory
callback_arguments({"directory": "a"}), hydra_directory_problem("a"), resolve_directory("a")
print([name for name in ("hydra", "omegaconf", "jax", "numpy") if name in sys.modules])
"""
    assert run_python(program, check=True, fresh=True).stdout == "[]\n"

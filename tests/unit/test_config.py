"""The typed configuration: the arguments that it becomes, its defaults, and what it refuses by name."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, Literal

import omegaconf
import pytest

import jaxckpt_train as jct
from jaxckpt_train.config import (
    CheckpointConfig,
    callback_arguments,
    config_schema,
    hydra_directory_problem,
    is_multirun,
    resolve_directory,
    run_directory,
)


def test_custom_policy_is_built_by_hydra() -> None:
    node = {"_target_": f"{OwnPolicy.__module__}.{OwnPolicy.__qualname__}", "every": 3}
    assert callback_arguments({"save_policy": {"_target_": "jaxckpt_train.AnySavePolicy", "policies": [node]}})
    assert callback_arguments({"save_policy": OwnPolicy(3)})["save_policy"] == OwnPolicy(3)


@dataclasses.dataclass
class OwnPolicy:
    """A policy that a user wrote."""

    every: int

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return bool(step.step % self.every == 0)


def test_configuration_has_the_arguments_of_the_callback() -> None:
    parameters = inspect.signature(jct.CheckpointCallback).parameters
    assert set(callback_arguments()) == set(parameters)
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    for name, value in callback_arguments().items():
        if name in defaults:
            assert defaults[name] == value, name
    assert [parameters[name].kind.name for name in ("directory", "store")] == ["POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"]
    assert parameters["directory"].default is inspect.Parameter.empty
    assert parameters["if_busy"].annotation == Literal["wait", "skip"]


def test_schema_for_omegaconf_has_fields_and_defaults() -> None:
    schema = omegaconf.OmegaConf.structured(config_schema())
    store = jct.StoreSettings(**omegaconf.OmegaConf.to_container(schema.store))  # type: ignore[arg-type]
    assert store == jct.StoreSettings()
    assert callback_arguments(schema) == {**callback_arguments(), "store": store, "object_store": store.object_store}
    schema.save_interval_steps = "7"
    assert schema.save_interval_steps == 7
    with pytest.raises(omegaconf.errors.ValidationError):
        schema.keep_latest = "often"


def test_mappings_objects_and_nothing_are_accepted() -> None:
    assert callback_arguments() == callback_arguments({}) == callback_arguments(CheckpointConfig())
    given = callback_arguments({"directory": "a", "grace_period_s": 5, "store": {"io_threads": 4}})
    assert (given["directory"], given["grace_period_s"], given["store"].io_threads) == ("a", 5.0, 4)
    assert callback_arguments({"store": jct.StoreSettings(digest="sha256")})["store"].digest == "sha256"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"save_intervall_steps": 5}, 'unknown key "save_intervall_steps", did you mean "save_interval_steps"'),
        ({"something": 5}, "valid keys: directory, save_interval_steps"),
        ({"store": {"digets": "sha256"}}, 'checkpoint.store: unknown key "digets", did you mean "digest"'),
        ({"save_interval_steps": 0}, "checkpoint.save_interval_steps: expected a whole number"),
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
        ({"store": 3}, "checkpoint.store: expected a StoreSettings, or a mapping"),
        ({"object_store": 3}, "checkpoint.object_store: expected an ObjectStoreSettings, or a mapping"),
        ({"object_store": {"part_byte": 3}}, 'checkpoint.object_store: unknown key "part_byte", did you mean'),
        ({"object_store": {"part_bytes": 3}}, "checkpoint.object_store.part_bytes: expected a whole number"),
        ({"store": {"object_store": {"part_bytes": 3}}}, "checkpoint.store.object_store.part_bytes: expected a whole"),
        ({"object_store": {"endpoint": "minio:9000"}}, "a URL with http:// or https://, found 'minio:9000'"),
        ({"object_store": {"options": {"region": ["a"]}}}, "object_store.options.region: expected text, found list"),
        (["directory"], "checkpoint: expected a mapping"),
    ],
)
def test_plain_mapping_is_checked(config: Any, message: str) -> None:
    with pytest.raises(jct.SettingsError) as caught:
        callback_arguments(config)
    assert message in str(caught.value)


def test_checked_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CheckpointConfig().if_busy = "hurry"  # type: ignore[misc, assignment]


def test_relative_directory_without_hydra_starts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_directory("a/b") == f"{tmp_path}/a/b"
    assert resolve_directory("~/a") == f"{Path.home()}/a"
    assert resolve_directory(Path("/a")) == "/a"
    assert not is_multirun()
    with pytest.raises(jct.SettingsError, match=r"^checkpoint.directory '~nobody-of-this-name/run': "):
        resolve_directory("~nobody-of-this-name/run")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert resolve_directory("/a/b") == "/a/b"


@pytest.mark.parametrize("directory", ["s3://bucket/run", "gs://bucket/run", "az://container/a/b"])
def test_url_is_a_directory(directory: str) -> None:
    assert resolve_directory(directory) == run_directory(f"{directory}/") == directory
    assert run_directory(Path(directory)) == directory
    assert hydra_directory_problem(directory) is None


@pytest.mark.parametrize(
    "directory", ["http://host/run", "s3://", "s3://bucket/../run", "s3://b/a\nb", "s3a://user:word@bucket/run"]
)
def test_other_url_is_refused(directory: str) -> None:
    with pytest.raises(jct.SettingsError, match=r"^checkpoint\.directory: expected a .*URL") as caught:
        resolve_directory(directory)
    assert "word" not in str(caught.value)


def test_object_store_is_part_of_store() -> None:
    ours = jct.ObjectStoreSettings(part_bytes=1 << 24)
    for config in (
        {"object_store": {"part_bytes": 1 << 24}},
        {"object_store": ours, "store": {"io_threads": 4}},
        {"store": {"object_store": {"part_bytes": 1 << 24}}},
        {"store": jct.StoreSettings(object_store=ours), "object_store": ours},
        {"store": {"object_store": ours}, "object_store": {}},
    ):
        assert callback_arguments(config)["store"].object_store == ours
    assert callback_arguments({"object_store": ours, "store": {"io_threads": 4}})["store"].io_threads == 4
    with pytest.raises(jct.SettingsError, match=r"^checkpoint\.object_store: .* found both"):
        callback_arguments({"store": {"object_store": ours}, "object_store": {"part_bytes": 1 << 25}})


def test_yaml_of_object_store_is_checked_by_the_schema() -> None:
    schema = omegaconf.OmegaConf.structured(config_schema())
    schema.object_store.region = "eu-central-1"
    schema.object_store.options = {"virtual_hosted_style_request": True}
    found = callback_arguments(schema)["store"].object_store
    assert (found.region, found.options) == ("eu-central-1", {"virtual_hosted_style_request": "True"})

"""Sinks in a configuration: nodes with `_target_`, built when the callback is, and closed with it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import omegaconf
import pytest

import jaxckpt_train as jct
from jaxckpt_train.config import callback_arguments, config_schema
from tests.support.runs import state_of


class OwnSink:
    """A sink that a user wrote."""

    def __init__(self, label: str) -> None:
        self.label, self.events = label, list[Mapping[str, Any]]()

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)


def train(config: Any) -> None:
    with jct.CheckpointCallback.from_config(config) as ckpt:
        ckpt.resume(state_of(0))
        for step in ckpt.steps(2):
            ckpt(state_of(step + 1))


def test_page_of_configuration_is_closed_with_its_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    node = {"_target_": "jaxckpt_train.PrometheusSink", "port": port, "address": "127.0.0.1"}
    for name in ("a", "b"):  # like the jobs of a multirun, which run in sequence in one process
        train({"directory": str(tmp_path / name), "save_interval_steps": 1, "sinks": [node]})
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_nodes_and_objects_keep_their_order(tmp_path: Path) -> None:
    given = OwnSink("given")
    node = {"_target_": f"{OwnSink.__module__}.{OwnSink.__qualname__}", "label": "built"}
    built, same = callback_arguments({"sinks": [node, given]})["sinks"]
    assert (built.sink.label, same) == ("built", given)
    train({"directory": str(tmp_path), "save_interval_steps": 1, "sinks": [given]})
    assert [event["step"] for event in given.events if event["event"] == "save"] == [1, 2]


def test_typed_configuration_accepts_sink_nodes() -> None:
    config = omegaconf.OmegaConf.structured(config_schema())
    node = {"_target_": "jaxckpt_train.PrometheusSink", "port": 0}
    merged = omegaconf.OmegaConf.merge(config, {"sinks": [node]})
    (sink,) = callback_arguments(merged)["sinks"]
    assert isinstance(sink.sink, jct.PrometheusSink)
    assert callback_arguments(config)["sinks"] == ()


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ("often", "checkpoint.sinks: expected a list of sinks"),
        ({"_target_": "jaxckpt_train.PrometheusSink", "port": 0}, "checkpoint.sinks: expected a list of sinks"),
        ([3], "checkpoint.sinks[0]: expected a node with _target_"),
        ([{"port": 0}], "checkpoint.sinks[0]: expected a node with _target_"),
        (
            [print, {"_target_": "jaxckpt_train.PrometheusSinc"}],
            'no sink "PrometheusSinc", did you mean "PrometheusSink"',
        ),
        ([{"_target_": "jaxckpt_train.PrometheusSink", "prot": 1}], 'unknown key "prot", did you mean "port"'),
        ([{"_target_": "jaxckpt_train.PrometheusSink"}], "expected a path, a port or a registry"),
        ([{"_target_": "jaxckpt_train.LatestN", "n": 1}], "expected a sink, found 'jaxckpt_train.LatestN'"),
        ([{"_target_": "jaxckpt_train.CheckpointCallback", "directory": "a"}], "expected a sink, found"),
        ([{"_target_": "jaxckpt_train.WriterSink"}], "missing a required argument: 'writer'"),
        ([{"_target_": "no.such.Sink"}], "cannot build no.such.Sink"),
        ([{"_target_": "pathlib.PurePath"}], "expected a node with _target_"),
    ],
)
def test_unbuildable_sink_error_names_its_place(sinks: Any, message: str) -> None:
    with pytest.raises(jct.SettingsError) as caught:
        callback_arguments({"sinks": sinks})
    assert message in str(caught.value)


def test_a_policy_is_no_place_for_a_sink() -> None:
    with pytest.raises(jct.SettingsError, match=r"expected a policy, found 'jaxckpt_train.PrometheusSink'"):
        callback_arguments({"save_policy": {"_target_": "jaxckpt_train.PrometheusSink", "port": 0}})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"_target_": "jaxckpt_train.FixedIntervalPolicy", "interval": -1},
            r"save_policy: FixedIntervalPolicy.interval",
        ),
        (
            {
                "_target_": "jaxckpt_train.AnySavePolicy",
                "policies": [
                    {"_target_": "jaxckpt_train.InitialSavePolicy"},
                    {"_target_": "jaxckpt_train.FixedIntervalPolicy", "interval": -1},
                ],
            },
            r"save_policy.policies\[1\]: FixedIntervalPolicy.interval: .*found -1",
        ),
        (
            {"_target_": "jaxckpt_train.AnySavePolicy", "policies": {"a": 1}},
            r"save_policy: AnySavePolicy.policies: .*found {'a': 1}",
        ),
        ({"_target_": "jaxckpt_train.Unknown"}, 'save_policy: jaxckpt_train has no policy "Unknown"$'),
        (
            {"_target_": "jaxckpt_train.FixedIntervalPolcy"},
            'no policy "FixedIntervalPolcy", did you mean "FixedIntervalPolicy"',
        ),
        ({"_target_": "jaxckpt_train.FixedIntervalPolicy", "intervals": 1}, 'did you mean "interval"'),
        ({"_target_": "jaxckpt_train.FixedIntervalPolicy"}, "missing a required argument: 'interval'"),
        ({"_target_": "jaxckpt_train.LatestN", "n": 1}, "should_save"),
        ({"_target_": "jaxckpt_train.load", "path": "a"}, "expected a policy, found 'jaxckpt_train.load'"),
        ({"_target_": "no.such.Policy"}, "cannot build no.such.Policy"),
        ({"interval": 1}, "_target_"),
        ("often", "_target_"),
    ],
)
def test_unbuildable_policy_error_names_its_place(node: Any, message: str) -> None:
    with pytest.raises(jct.SettingsError, match=message):
        callback_arguments({"save_policy": node})

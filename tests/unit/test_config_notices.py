"""Notice sources given by name, by `_target_` and as objects: what is built, and the place of what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import jaxckpt_train as jct
from jaxckpt_train.config import NAMES, CallbackOptions, callback_arguments


@dataclasses.dataclass
class Own:
    """A minimal source that a user wrote."""

    queue: str = "a"

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def notice(self) -> str | None:
        return None


def built(*notices: Any) -> Any:
    return CallbackOptions("a", notices=notices).built().notices


def test_each_name_means_one_source() -> None:
    assert [type(source) for source in built(*NAMES)] == [
        jct.GceNotice,
        jct.AwsNotice,
        jct.SlurmNotice,
        jct.KubernetesNotice,
    ]


def test_a_node_gives_arguments() -> None:
    (source,) = built({"_target_": "jaxckpt_train.SlurmNotice", "requeue": False})
    assert isinstance(source, jct.SlurmNotice)
    assert source._requeue is False


def test_objects_pass_and_nodes_are_instantiated() -> None:
    own = Own()
    node = {"_target_": f"{Own.__module__}.{Own.__qualname__}", "queue": "b"}
    assert built(own, node) == (own, Own("b"))
    assert built(own)[0] is own


@pytest.mark.parametrize(
    ("notices", "message"),
    [
        ("gce", "checkpoint.notices: expected a list .*, found 'gce'"),
        ({"_target_": "jaxckpt_train.GceNotice"}, "checkpoint.notices: expected a list"),
        (3, "checkpoint.notices: expected a list"),
        (["slrum"], r"checkpoint.notices\[0\]: .*found 'slrum', did you mean \"slurm\""),
        (["gce", {"poll_s": 1}], r"checkpoint.notices\[1\]: expected one of 'gce'.* found \{'poll_s': 1\}"),
        ([Own], r"checkpoint.notices\[0\]: expected .* with start, stop and notice, found <class"),
        ([None], r"checkpoint.notices\[0\]"),
        ([object()], r"checkpoint.notices\[0\]"),
    ],
)
def test_invalid_source_is_refused_by_place(tmp_path: Path, notices: Any, message: str) -> None:
    with pytest.raises(jct.SettingsError, match=message):
        jct.CheckpointCallback(tmp_path, notices=notices)
    with pytest.raises(jct.SettingsError, match=message):
        callback_arguments({"notices": notices})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "jaxckpt_train.GceNotic"}, 'has no notice source "GceNotic", did you mean "GceNotice"'),
        ({"_target_": "jaxckpt_train.GceNotice", "pol_s": 1}, 'did you mean "poll_s"'),
        ({"_target_": "jaxckpt_train.GceNotice", "poll_s": 0}, "GceNotice: poll_s: expected a finite number"),
        ({"_target_": "jaxckpt_train.LatestN", "n": 1}, "expected a notice source, found 'jaxckpt_train.LatestN'"),
        ({"_target_": "builtins.dict"}, "expected one of 'gce'"),
        ({"_target_": "no.such.Source"}, "cannot build no.such.Source"),
        ({"_target_": 3}, "_target_: expected text"),
    ],
)
def test_a_node_that_cannot_be_built_is_refused(tmp_path: Path, node: Any, message: str) -> None:
    for build in (
        lambda: jct.CheckpointCallback(tmp_path, notices=[node]),
        lambda: callback_arguments({"notices": [node]}),
    ):
        with pytest.raises(jct.SettingsError, match=message) as caught:
            build()
        assert "notices[0]" in str(caught.value) or "GceNotice" in str(caught.value)


def test_callback_has_sources_that_its_configuration_names(tmp_path: Path) -> None:
    own = Own()
    ckpt = jct.CheckpointCallback.from_config({"directory": str(tmp_path), "notices": ["slurm", own]})
    slurm, other = ckpt._shutdown._sources._sources
    assert isinstance(slurm, jct.SlurmNotice)
    assert other is own

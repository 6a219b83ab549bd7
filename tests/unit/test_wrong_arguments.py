"""Wrong arguments: each is refused by name before anything is read or written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt_train as jct
from tests.support.fake_backends import HoldingBackend
from tests.support.file_content import content
from tests.support.same_trees import assert_same

STATE = {"params": {"w": np.arange(5000.0), "b": np.ones(3)}, "step": 7}
READERS: tuple[Callable[[Any], Any], ...] = (jct.load, jct.load_checkpointables, jct.metadata, jct.verify)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    jct.save(tmp_path / "c", STATE)
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"durability": "always"}, "durability: .*'full', 'file', 'none', found 'always'"),
        ({"durability": None}, "durability: expected one of"),
        ({"digest": "md5"}, "digest: .*'xxh3-128', 'sha256', 'blake3', found 'md5'"),
        ({"direct_io": "yes"}, "direct_io: .*'auto', True, False, found 'yes'"),
        ({"direct_io": 1}, "direct_io: expected one of"),
        ({"segment_bytes": 1000}, "segment_bytes: .* from 1048576 to 1125899906842624, found 1000"),
        ({"staging_bytes": 2**63}, f"staging_bytes: expected .* to 1125899906842624, found {2**63}"),
        ({"read_budget_bytes": 2**63}, f"read_budget_bytes: expected .* to 1125899906842624, found {2**63}"),
        ({"segment_bytes": 2**63}, f"segment_bytes: expected .* to 1125899906842624, found {2**63}"),
        ({"scrub_bytes_per_s": 2**63}, f"scrub_bytes_per_s: expected .* to 1125899906842624, found {2**63}"),
        ({"staging_bytes": 0}, "staging_bytes: .* from 1048576 to 1125899906842624, found 0"),
        ({"read_budget_bytes": 1e9}, "read_budget_bytes: expected a whole number .*, found 1000000000.0"),
        ({"io_threads": 0}, "io_threads: .* from 1 to 64, found 0"),
        ({"io_threads": 65}, "io_threads: .* from 1 to 64, found 65"),
        ({"io_threads": True}, "io_threads: .* from 1 to 64, found True"),
        ({"io_threads": "many"}, "io_threads: .* from 1 to 64, found 'many'"),
        ({"verify_on_load": "no"}, "verify_on_load: expected true or false, found 'no'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(jct.SettingsError, match=rf"StoreSettings.{reason}"):
        jct.StoreSettings(**settings)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"missing": "ignore"}, "missing: .*found 'ignore'"),
        ({"only": 3}, "only: expected a pattern such as"),
        ({"rename": "old/**"}, "rename: expected a mapping such as"),
        ({"shardings": "x"}, "shardings: leaf .*: expected a jax.sharding.Sharding"),
    ],
)
def test_wrong_arguments_of_load_are_refused(options: dict[str, Any], reason: str, checkpoint: Path) -> None:
    with pytest.raises(jct.SettingsError, match=reason):
        jct.load(checkpoint, **options)


NO_PATHS = (
    None,
    3,
    "",
    b"bytes",
    "a\0b",
    "\ud800",
    "http://host/run",
    Path("http://host/run"),
    "gs://",
    "s3:///a",
    "file:///run",
)


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("wrong", NO_PATHS, ids=ascii)
def test_readers_refuse_what_is_no_path(read: Callable[[Any], Any], wrong: object) -> None:
    with pytest.raises(jct.SettingsError, match=r"^path: expected a path.*, found"):
        read(wrong)


@pytest.mark.parametrize("wrong", NO_PATHS, ids=ascii)
def test_writers_refuse_what_is_no_path(wrong: Any) -> None:
    with pytest.raises(jct.SettingsError, match=r"^path: expected a path.*, found"):
        jct.save(wrong, STATE)
    with pytest.raises(jct.SettingsError, match=r"^path: expected a path.*, found"):
        jct.StepManager(wrong)
    with pytest.raises(jct.SettingsError, match=r"^checkpoint.directory: expected a path.*, found"):
        jct.CheckpointCallback(wrong)


def test_an_array_is_no_mapping_of_names(checkpoint: Path, tmp_path: Path) -> None:
    wrong: Any = jnp.ones(3)
    with jct.StepManager(tmp_path / "run") as steps:
        with pytest.raises(jct.SettingsError, match=r"^checkpointables: .*found Array"):
            steps.save(1, wrong)
        steps.save(1, {"state": STATE})
        with pytest.raises(jct.SettingsError, match=r"^targets: .*found Array"):
            steps.restore(wrong)
        assert_same(steps.restore({"state": STATE})["state"], STATE)
    with pytest.raises(jct.SettingsError, match=r"^targets: expected a mapping of names"):
        jct.load_checkpointables(checkpoint, wrong)


def test_a_text_does_not_overwrite(checkpoint: Path, tmp_path: Path) -> None:
    wrong: Any = "no"
    before = content(checkpoint)
    with pytest.raises(jct.SettingsError, match=r"^overwrite: .*found 'no'"):
        jct.save(checkpoint, {"w": 1}, overwrite=wrong)
    assert content(checkpoint) == before
    with jct.StepManager(tmp_path / "run") as steps:
        steps.save(1, {"state": STATE})
        steps.wait()
        before = content(tmp_path / "run")
        with pytest.raises(jct.SettingsError, match=r"^StepManager.save: overwrite: expected true or false"):
            steps.save(1, {"state": {"w": 1}}, overwrite=wrong)
        assert content(tmp_path / "run") == before


def test_wrong_kinds_are_not_guessed(checkpoint: Path, tmp_path: Path) -> None:
    wrong: Any = "yes"
    with pytest.raises(jct.SettingsError, match=r"^cast: .*found 'yes'"):
        jct.load(checkpoint, cast=wrong)
    with jct.StepManager(tmp_path / "run") as steps:
        saved = steps.save(1, {"state": STATE})
        steps.wait()
        with pytest.raises(jct.SettingsError, match=r"^pin: pinned: .*found 'yes'"):
            steps.pin(1, wrong)
        assert saved.pending is not None
        for wait in (saved.pending.wait, steps.wait):
            with pytest.raises(jct.SettingsError, match=r"^timeout_s: expected seconds, or None"):
                wait(wrong)
        with pytest.raises(jct.SettingsError, match=r"^StepManager.save: timeout_s: expected seconds"):
            steps.save(2, {"state": STATE}, timeout_s=math.nan)
        with pytest.raises(jct.SettingsError, match=r"^close: timeout_s: expected seconds"):
            steps.close(math.nan)
        assert steps.steps == [1]


def test_timeout_may_be_negative_or_infinite(tmp_path: Path) -> None:
    """`deadline - now` is negative a moment after the deadline."""
    backend = HoldingBackend("rename", "step-0000000001")
    steps = jct.StepManager(tmp_path, backend=backend)
    saved = steps.save(1, {"state": STATE})
    assert saved.pending is not None
    with pytest.raises(jct.CheckpointTimeoutError):
        saved.pending.wait(-0.001)
    with pytest.raises(jct.CheckpointTimeoutError):
        steps.save(2, {"state": STATE}, force=True, timeout_s=-math.inf)
    backend.go.set()
    saved.pending.wait(math.inf)
    steps.close(-1)
    with jct.StepManager(tmp_path) as other:
        other.own()
        assert other.steps == [1]


def test_whole_numbers_of_jax_are_whole(tmp_path: Path) -> None:
    with jct.CheckpointCallback(tmp_path, save_interval_steps=jnp.int32(5)) as ckpt:
        ckpt.resume(STATE)
        assert [step for step in ckpt.steps(jnp.int32(2)) if ckpt(STATE) is not None] == [0, 1]


@pytest.mark.parametrize("count", [2.0, "3", -1, True, None])
def test_a_number_of_steps_is_whole(count: Any, tmp_path: Path) -> None:
    with jct.CheckpointCallback(tmp_path / "run") as ckpt:
        with pytest.raises(jct.SettingsError, match=r"^steps: num_steps: .*at least 0, found"):
            next(iter(ckpt.steps(count)))
        assert list(ckpt.steps(0)) == []


def test_infinite_timeout_is_no_limit(tmp_path: Path) -> None:
    assert jct.save_async(tmp_path / "c", STATE).wait(math.inf).bytes > 0
    with jct.StepManager(tmp_path / "run") as steps:
        steps.save(1, {"state": STATE}, timeout_s=np.inf)
        steps.wait(math.inf)


@pytest.mark.parametrize("use", [*READERS, lambda path: jct.save(path, STATE)])
def test_path_without_root_is_refused(
    use: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(jct.SettingsError, match=r"path '~nobody123/run': .*home directory"):
        use("~nobody123/run")
    (tmp_path / "here").rmdir()
    with pytest.raises(jct.SettingsError, match=r"path 'c': .*working directory"):
        use("c")
    assert list(tmp_path.iterdir()) == []

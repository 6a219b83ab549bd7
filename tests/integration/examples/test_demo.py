"""demo.py: succeeds when both trainings are equal, and finds each difference."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import jaxckpt_train as jct
from examples import demo
from tests.support.objects.stand_in import StandIn

Alter = Callable[[dict[str, Any]], None]


def training(directory: Path, alter: Alter = lambda state: None, loss: str = "0x1p+0") -> demo.Training:
    """Write the files of a training of two updates, with a change in its state."""
    params = {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.zeros(4)}
    state = {"params": params, "opt_state": [{"mu": params}, None], "key": jax.random.key(3), "step": jnp.int32(2)}
    alter(state)
    made = demo.Training(directory, steps=2)
    with jct.StepManager(made.checkpoints) as manager:
        manager.save(2, {"state": state, "data": jct.JsonValue({"next_index": 2})})
    (directory / "losses.txt").write_text(f"1 0x1.8p+0\n2 {loss}\n")
    return made


def flip_the_last_byte_of_a_kernel(state: dict[str, Any]) -> None:
    data = bytearray(state["params"]["kernel"].tobytes())
    data[-4] ^= 1
    state["params"] = {**state["params"], "kernel": jnp.frombuffer(bytes(data), jnp.float32).reshape(3, 4)}


def another_key(state: dict[str, Any]) -> None:
    state["key"] = jax.random.key(4)


def wider_dtype(state: dict[str, Any]) -> None:
    state["step"] = jnp.uint32(2)


def no_moments(state: dict[str, Any]) -> None:
    state["opt_state"] = [None, None]


def compared(first: demo.Training, second: demo.Training) -> list[demo.Comparison]:
    return demo.compare(demo.what_is_left(first), demo.what_is_left(second))


def test_demo_of_equal_trainings_succeeds(run_example: Any, tmp_path: Path) -> None:
    arguments = ("--steps", "600", "--preemptions", "1", "--directory", str(tmp_path / "demo"))
    output = run_example("demo.py", *arguments, cwd=tmp_path)
    assert output.count("exit code 75") == 1
    assert "Everything is equal" in output
    assert "NOT" not in output
    preempted, alone = (demo.Training(tmp_path / "demo" / name, 600) for name in ("preempted", "left-alone"))
    assert all(one.equal for one in compared(preempted, alone))
    assert [one.leaves for one in compared(preempted, alone)] == [4, 9, 1, 1, 1, 600]


def test_demo_on_an_object_store_succeeds(run_example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StandIn() as server, server.named():
        url = server.url("demo")
        output = run_example("demo.py", "--steps", "300", "--preemptions", "1", "--directory", url, cwd=tmp_path)
        assert "Everything is equal" in output
        assert server.endpoint in output
        trainings = [demo.Training(tmp_path / name, 300, f"{url}/{name}") for name in ("preempted", "left-alone")]
        first, second = (demo.what_is_left(training) for training in trainings)
        first.pop("losses"), second.pop("losses")
        assert [(one.leaves, one.equal) for one in demo.compare(first, second)] == [
            (4, True), (9, True), (1, True), (1, True), (1, True)
        ]  # fmt: skip


def test_identical_trainings_are_equal(tmp_path: Path) -> None:
    assert all(one.equal for one in compared(training(tmp_path / "a"), training(tmp_path / "b")))


@pytest.mark.parametrize(
    ("alter", "part", "leaf"),
    [
        (flip_the_last_byte_of_a_kernel, "parameters", "kernel float32[3, 4]"),
        (another_key, "PRNG key", " uint32[2]"),
        (wider_dtype, "step", " int32[]"),
        (no_moments, "optimizer state", "0/mu/bias float32[4]"),
    ],
)
def test_one_difference_in_the_state_is_found(tmp_path: Path, alter: Alter, part: str, leaf: str) -> None:
    found = compared(training(tmp_path / "a"), training(tmp_path / "b", alter))
    different = [one for one in found if not one.equal]
    assert [one.part for one in different] == [part]
    assert leaf in different[0].different
    assert different[0].digests[0] != different[0].digests[1]
    shown = io.StringIO()
    demo.show(Console(file=shown, width=150), found)
    assert "NOT EQUAL" in shown.getvalue()


def test_one_bit_of_a_loss_is_found(tmp_path: Path) -> None:
    found = compared(training(tmp_path / "a"), training(tmp_path / "b", loss="0x1.0000000000001p+0"))
    assert [(one.part, one.different) for one in found if not one.equal] == [("losses", ("line 2",))]


def test_another_position_in_the_data_is_found(tmp_path: Path) -> None:
    first, second = (demo.what_is_left(training(tmp_path / name)) for name in "ab")
    assert first["data position"].keys() == {"data/p00000.json"}
    second["data position"] = {"data/p00000.json": b'{"next_index":3}'}
    assert [one.part for one in demo.compare(first, second) if not one.equal] == ["data position"]


def test_nothing_is_not_equal_to_nothing() -> None:
    (found,) = demo.compare({"parameters": {}}, {"parameters": {}})
    assert not found.equal


def test_an_update_that_was_done_twice_is_found(tmp_path: Path) -> None:
    made = training(tmp_path)
    made.log.write_text("starting after 0 of 2 updates\nstarting after 1 of 2 updates\n")
    demo.check_pieces(made, [0, 1])
    (tmp_path / "losses.txt").write_text("1 0x1p+0\n1 0x1p+0\n2 0x1p+0\n")
    with pytest.raises(SystemExit, match="done twice"):
        demo.check_pieces(made, [0, 1])


def test_a_run_that_started_anew_is_found(tmp_path: Path) -> None:
    made = training(tmp_path)
    made.log.write_text("starting after 0 of 2 updates\nstarting after 0 of 2 updates\n")
    with pytest.raises(SystemExit, match=r"started after \[0, 0\]"):
        demo.check_pieces(made, [0, 1])

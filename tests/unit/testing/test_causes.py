"""One mistake in a loop gives the expected first difference and the most likely cause. All runs in this process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train as jct
from jaxckpt_train.testing import ResumeNotExactError
from tests.support.in_one_process import MakeRun, prove_here
from tests.support.training_loops import Batches, train, train_with_key


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    state = np.random.get_state()
    yield
    np.random.set_state(state)


def failure(make_run: MakeRun, directory: Path, *kill_at: int) -> ResumeNotExactError:
    with pytest.raises(ResumeNotExactError) as caught:
        prove_here(make_run, directory / "proof", *kill_at)
    return caught.value


COUNTER, KEY, GENERATOR = "a counter outside of the state", "a PRNG key outside of the state", "a random generator"
REPEATABLE = "the run is not repeatable"
DRAWN = "the host's random generator: np.random is drawn from"

# The first difference of a run that is interrupted in update 5 and resumes at 3, and the most likely cause.
EXPECTED = {
    "unseeded shuffle": ("update 1: its batch differs", f"{REPEATABLE}: the data is shuffled without a seed"),
    "host generator": ("update 4: loss differs", f"{DRAWN}, and its state is not saved"),
    "unseeded host generator": ("update 1: loss differs", f"{DRAWN} without a seed"),
    "python's generator": ("update 4: loss differs", "the host's random generator: random is drawn from"),
    "own generator": ("update 4: loss differs", KEY),
    "device": ("update 1: loss differs", f"{REPEATABLE}: something random has no seed"),
    "rounding": ("update 1: loss differs", f"{REPEATABLE}: operations of the device"),
    "start": ("at the start: state/w float64[3] differs", f"{REPEATABLE}: its initial state"),
    "transform": ("update 4: its batch differs: in batch/x, 1 of 2 arrays", DRAWN),
    "set_state": ("update 4: its batch differs", "the data restarted at the resume"),
    "data made anew": ("update 4: its batch differs", "the data restarted at the resume"),
    "order": ("update 4: its batch differs", "the data iterator is not restored completely"),
    "prefetch": ("update 4: number of batches: 1 (uninterrupted) vs 2", "the saved position in the data"),
    "thread": ("update 4: loss differs", "batches are taken by another thread"),
    "forgetful object": (
        "the state restored from step 3 differs from the state after update 3: ema/count differs: 3 (uninterrupted)",
        "the restored state differs from the saved state",
    ),
    "object not restored": ("update 4: ema/count differs: 4 (uninterrupted) vs 1", "saved but never restored: ema"),
    "data not given": ("update 4: loss differs", "the data is not passed to ckpt.resume"),
    "state not taken": ("update 4: loss differs", "the loop continues with the state that it passed to ckpt.resume"),
    "state before": ("update 4: loss differs", "ckpt(...) gets the state from before the update"),
    "optimizer left out": ("update 4: state/w float64[3] differs", "the optimizer state is not saved"),
    "schedule": ("update 4: state/w float64[3] differs", COUNTER),
    "schedule that is reported": (
        "update 4: learning_rate differs: 0.025 (uninterrupted) vs 0.1 (resumed at 3)",
        COUNTER,
    ),
    "late counter": ("update 5: state/w float64[3] differs", COUNTER),
}
CAUSE_IS_ONE_OF_SEVERAL = {"schedule", "schedule that is reported"}  # without metrics
LOSS_IS_FIRST = {mistake for mistake, (first, _) in EXPECTED.items() if "loss differs" in first}


@pytest.mark.parametrize("mistake", EXPECTED)
def test_mistake_is_found_with_its_cause(mistake: str, tmp_path: Path) -> None:
    first, cause = EXPECTED[mistake]
    error = failure(functools.partial(train, mistake=mistake), tmp_path, 5)
    assert str(error).startswith(first)
    assert error.causes[0].startswith(cause)


@pytest.mark.parametrize("mistake", EXPECTED)
def test_mistake_is_found_without_metrics(mistake: str, tmp_path: Path) -> None:
    first, cause = EXPECTED[mistake]
    error = failure(functools.partial(train, mistake=mistake, reports_metrics=False), tmp_path, 5)
    if mistake in LOSS_IS_FIRST or mistake == "schedule that is reported":
        first = first.partition(":")[0] + ": state/"
    assert str(error).startswith(first)
    likely = error.causes if mistake in CAUSE_IS_ONE_OF_SEVERAL else error.causes[:1]
    assert any(each.startswith(cause) for each in likely)


def test_correct_loop_is_proven(tmp_path: Path) -> None:
    proof = prove_here(train, tmp_path / "proof", 5)
    assert (proof.updates, proof.interrupted_in, proof.resumed_at) == (9, (5,), (3,))
    assert (proof.compared_updates, proof.compared_batches) == (6, 6)
    assert not (tmp_path / "proof").exists()


def test_only_unsaved_key_is_found(tmp_path: Path) -> None:
    prove_here(train_with_key, tmp_path / "kept", 5)
    error = failure(functools.partial(train_with_key, kept=False), tmp_path, 5)
    assert str(error).startswith("update 4: loss differs")
    assert error.causes[0].startswith(KEY)
    assert "seen: no PRNG key is saved" in str(error)


CLOCK = "a metric that depends on the clock"


def test_clock_metric_is_named_and_can_be_ignored(tmp_path: Path) -> None:
    """The loop is correct; only that metric differs between two runs."""
    clocked = functools.partial(train, mistake="clock")
    error = failure(clocked, tmp_path, 5)
    assert str(error).startswith("update 1: updates_per_s differs")
    assert error.causes[0].startswith(CLOCK)
    text = " ".join(str(error).split())
    assert "ignore_metrics=['updates_per_s']" in text
    proof = prove_here(clocked, tmp_path / "left out", 5, ignored=("updates_per_s",))
    assert (proof.compared_updates, proof.ignored_metrics) == (6, ("updates_per_s",))


def test_mistake_behind_clock_metric_is_found(tmp_path: Path) -> None:
    both = functools.partial(train, mistake="clock and schedule")
    error = failure(both, tmp_path, 5)
    assert error.causes[0].startswith(CLOCK)
    with pytest.raises(ResumeNotExactError, match=r"update 4: state/w") as caught:
        prove_here(both, tmp_path / "left out", 5, ignored=("updates_per_s",))
    assert caught.value.causes[0].startswith(COUNTER)


def with_two_keys(directory: Path) -> None:
    """A loop that saves one key, and also draws from a generator."""
    import jax

    rng = np.random.default_rng(0)
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state = ckpt.resume({"w": 0.0, "key": jax.random.key(0)})
        for _ in ckpt.steps(4):
            state = {"w": float(rng.normal()), "key": state["key"]}
            ckpt(state, metrics={"loss": state["w"]})


def test_saved_key_makes_another_generator_likelier(tmp_path: Path) -> None:
    error = failure(with_two_keys, tmp_path, 3)
    assert error.causes[0].startswith("the data is not passed")  # it has no data, but the proof cannot know that
    assert [cause[: len(GENERATOR)] for cause in error.causes].index(GENERATOR) == 1


def resets_count(directory: Path, restarts: bool = True) -> None:
    """A loop that passes its step, and starts at 1 after a resume too."""
    state, data = {"w": np.zeros(1)}, Batches()
    with jct.CheckpointCallback(directory, save_interval_steps=2) as ckpt:
        state, data = ckpt.resume(state, data)
        for step in range(6) if restarts else range(ckpt.completed_steps, ckpt.completed_steps + 6):
            state = {"w": state["w"] + next(data)["x"].sum()}
            ckpt(state, step=step + 1)


def test_reset_count_of_updates_is_found(tmp_path: Path) -> None:
    error = failure(resets_count, tmp_path, 3)
    assert str(error).startswith("after the resume at 2: expected update 3, found 1")
    assert error.causes[0].startswith("the loop resets its count of updates")


def test_a_training_of_another_length_is_found(tmp_path: Path) -> None:
    error = failure(functools.partial(resets_count, restarts=False), tmp_path, 3)
    assert str(error).startswith("the run ended after update 6 (uninterrupted) vs 8 (resumed at 2)")
    assert error.causes[0].startswith("the length of the training")


def test_a_training_that_ends_too_early_is_found(tmp_path: Path) -> None:
    error = failure(lambda directory: train(directory, updates=9 - 2 * (directory / "run").exists()), tmp_path, 5)
    assert str(error).startswith("the run ended after update 9 (uninterrupted) vs 7 (resumed at 3)")


class Rare:
    """A run that differs only the first time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, directory: Path) -> None:
        self.calls += 1
        train(directory, "device" if self.calls == 1 else "")


def test_earlier_difference_does_not_blame_the_resume(tmp_path: Path) -> None:
    error = failure(Rare(), tmp_path, 5)
    assert str(error).startswith("update 1: loss differs")
    assert error.causes[0].startswith(REPEATABLE)
    assert "differs before its interruption" in str(error)


def test_run_is_repeated_only_after_a_difference(tmp_path: Path) -> None:
    calls: list[Path] = []

    def counted(mistake: str, directory: Path) -> None:
        calls.append(directory)
        train(directory, mistake)

    prove_here(functools.partial(counted, ""), tmp_path / "proof", 5)
    assert [directory.parent.name for directory in calls] == ["interrupted", "interrupted", "uninterrupted"]
    error = failure(functools.partial(counted, "schedule"), tmp_path, 5)
    assert [directory.parent.name for directory in calls[3:]] == [
        *["interrupted"] * 2,
        "uninterrupted",
        "uninterrupted-again",
    ]
    assert "repeated and gave the same result" in str(error)


def counts(directory: Path) -> None:
    """A loop whose state has a count that comes from a variable outside of the state."""
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state = ckpt.resume({"w": np.zeros(2), "epochs": 0})
        for number, _ in enumerate(ckpt.steps(4)):
            state = {**state, "epochs": number // 2}
            ckpt(state)


def test_whole_numbers_alone_point_to_a_counter(tmp_path: Path) -> None:
    error = failure(counts, tmp_path, 2)
    assert str(error).startswith("update 3: state/epochs differs: 1 (uninterrupted) vs 0")
    assert error.causes[0].startswith(COUNTER)


def steps_in_another_form(directory: Path) -> None:
    """A loop whose step is a Python int at first, as in Linen's TrainState, and an array after an update."""
    with jct.CheckpointCallback(directory, save_interval_steps=1) as ckpt:
        state = ckpt.resume({"step": 0, "rate": 0.5})
        for _ in ckpt.steps(4):
            state = {"step": np.asarray(state["step"] + 1, np.int32), "rate": np.asarray(state["rate"], np.float32)}
            ckpt(state)


def test_number_in_another_form_is_equal(tmp_path: Path) -> None:
    assert prove_here(steps_in_another_form, tmp_path / "proof", 2).resumed_at == (1,)

"""benchmarks.cost_model: fitted lines, growth, and the detection of costs that are not linear."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import jaxckpt_train
from benchmarks import cost_child, cost_model, cost_phases
from benchmarks.cost_fit import fit_line, growth_exponent
from benchmarks.cost_summary import Cost, costs
from benchmarks.spread import Spread

SIZES = [10, 100, 1_000, 10_000, 100_000]


@pytest.mark.parametrize("relative", [False, True])
def test_line_is_fitted_exactly(relative: bool) -> None:
    line = fit_line(SIZES, [0.003 + 2e-5 * size for size in SIZES], relative=relative)
    assert line.intercept == pytest.approx(0.003)
    assert line.slope == pytest.approx(2e-5)
    assert line.slope_error == pytest.approx(0, abs=1e-12)


def test_relative_fit_ignores_noise_of_largest_size() -> None:
    seconds = [0.003 + 2e-5 * size for size in SIZES]
    seconds[-1] *= 1.2
    assert fit_line(SIZES, seconds, relative=True).intercept == pytest.approx(0.003, rel=0.1)
    assert abs(fit_line(SIZES, seconds).intercept - 0.003) > 0.003


def test_slope_error_matches_the_textbook() -> None:
    line = fit_line([0, 1, 2, 3], [0, 1, 1, 2])
    assert line.slope == pytest.approx(0.6)
    assert line.slope_error == pytest.approx(math.sqrt(0.2 / 2 / 5))


def test_a_line_needs_two_points() -> None:
    with pytest.raises(ValueError, match="two different x"):
        fit_line([3, 3], [1, 2])
    with pytest.raises(ValueError, match="two different x"):
        growth_exponent([3], [1])


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_growth_uses_the_two_largest_sizes(power: float) -> None:
    values = [7.0, *(size**power for size in SIZES[1:])]
    assert growth_exponent(SIZES, values) == pytest.approx(power)


def test_superlinear_growth_is_detected() -> None:
    assert Cost.of(SIZES, [1e-5 * size for size in SIZES], 0.02).linear
    assert Cost.of(SIZES, [1e-5 * size * math.log(size) ** 2 for size in SIZES], 0.02).linear is False
    assert Cost.of(SIZES, [1e-10 * size**2 for size in SIZES], 0.02).linear is False
    assert Cost.of([10, 100], [1e-6, 1e-4], 0.02).linear is None


def test_costs_are_of_the_medians() -> None:
    answers = {
        size: {"seconds": {"save": [size * 1.0, size * 2.0, size * 50.0]}, "bytes": {"data": 16 * size, "peak": 0}}
        for size in (10, 20)
    }
    found = costs(answers)
    assert found["seconds"]["save"].values == [20.0, 40.0]
    assert found["bytes"]["data"].each == pytest.approx(16)
    assert "peak" not in found["bytes"]
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_phases_save_what_the_public_call_loads(tmp_path: Path) -> None:
    tree = {"a": np.arange(24.0).reshape(6, 4), "b": np.ones(6)}
    seconds = cost_phases.save_in_phases(tmp_path / "cut", tree, chunks=3)
    assert set(seconds) == {"snapshot", "plan", "write", "commit"}
    assert min(seconds.values()) >= 0
    loaded = jaxckpt_train.load(tmp_path / "cut")
    np.testing.assert_array_equal(loaded["a"], tree["a"])
    assert set(cost_phases.load_in_phases(tmp_path / "cut")) == {"open", "tree", "plan", "read"}


def test_a_manifest_of_many_chunks_is_valid() -> None:
    made = cost_phases.make_manifest(2_500)
    assert cost_phases.decode(cost_phases.encode(made)) == made
    assert sum(len(array.chunks) for array in made.parts[0].arrays) == 2_500


@pytest.mark.parametrize(
    ("measure", "size"),
    [(cost_child.leaves, 20), (cost_child.one_array, 1 << 20), (cost_child.shards, 8), (cost_child.manifest, 100)],
)
def test_every_axis_gives_seconds_and_bytes(measure: object, size: int, tmp_path: Path) -> None:
    answer = measure(size, str(tmp_path / "work"), 2)
    assert all(len(values) == 2 and min(values) >= 0 for values in answer["seconds"].values())
    assert answer["bytes"]["manifest"] > 0
    assert list(tmp_path.iterdir()) == []


def test_axis_with_one_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cost_model.main(["--axes", "leaves", "--largest", "50"])
    assert "fewer than two sizes of leaves" in capsys.readouterr().err

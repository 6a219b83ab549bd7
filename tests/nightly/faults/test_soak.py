"""A short soak on a faulty disk: nothing grows and nothing is lost. `make soak` runs the whole campaign."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nightly.faults.fuse_disk import why_not
from tests.nightly.faults.soak import TRAINING, growth, soak

pytestmark = pytest.mark.timeout(120)
STEP = "state, step = update(state), step + 1\n"


@pytest.fixture(autouse=True)
def _fuse() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"cannot mount a file system in user space: {reason}")


def test_short_soak_has_no_problems(tmp_path: Path) -> None:
    found = soak(8, 0, 0.05, tmp_path)
    assert found.problems == []
    assert found.rows[-1]["committed"] > 10
    assert found.rows[-1]["failed"] > 0


LEAKS = {
    "files grew": "os.dup(1)",
    "resident grew": "hoard.append(b'x' * (1 << 20))",
    "threads grew": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
}


def test_each_leak_of_a_training_is_detected(tmp_path: Path) -> None:
    assert STEP in TRAINING
    leaks = "".join(f"                step % 3 or {leak}\n" for leak in LEAKS.values())
    leaking = TRAINING.replace(STEP, f"{STEP}{leaks}").replace("def tell", "hoard = []\ndef tell")
    problems = soak(14, 0, 0.05, tmp_path, leaking).problems
    assert all(any(problem.startswith(kind) for problem in problems) for kind in LEAKS), problems


def test_leftovers_during_the_run_are_detected(tmp_path: Path) -> None:
    """The next owner removes them, so only the count during the run reveals them."""
    flaw = "import pytest; from tests.nightly.faults import flaws"
    flaw += "; flaws.FLAWS['removes no directory'](pytest.MonkeyPatch())"
    problems = soak(6, 0, 0.05, tmp_path, f"{flaw}\n{TRAINING}").problems
    assert any("deletions at once" in problem for problem in problems)
    assert not any("left over" in problem for problem in problems)


def test_growth_of_resources_is_detected() -> None:
    rows = [{"resident": n << 22, "threads": 3, "files": 9 + n} for n in range(60)]
    assert [problem.split()[0] for problem in growth(rows, 3600)] == ["resident", "files"]

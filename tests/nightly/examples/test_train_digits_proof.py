"""train_digits.py, with Linen, dropout, Optax, Grain and Hydra, is proven to resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxckpt_train.testing import ResumeProof, assert_resume_exact


@pytest.mark.nightly
def test_digits_training_resumes_exactly(
    repo_root: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(plugin)
    script = str(repo_root / "examples" / "train_digits.py")
    small = ["steps=6", "hidden=8", "batch_size=4", "checkpoint.save_interval_steps=2"]
    places = ["checkpoint.directory={directory}/run", "losses={directory}/losses", "hydra.run.dir={directory}/hydra"]
    proof = assert_resume_exact([script, *small, *places], kill_at=5, directory=tmp_path / "proof")
    assert proof == ResumeProof(6, (5,), (4,), 2, 2)

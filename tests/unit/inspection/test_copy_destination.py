"""No command writes into a checkpoint, because its output would be deleted with the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxckpt_train as jct
from tests.support.commands import printed, refused
from tests.support.runs import files_below, made_run, step_path, truncate_the_manifest

WRITES = {
    "cp": ["cp", "{run}", "{out}", "--step", "3"],
    "mv": ["mv", "{run}", "{out}", "--step", "2"],
    "import": ["import", "{run}", "{out}"],
    "export safetensors": ["export", "{run}", "{out}", "--to", "safetensors"],
    "export orbax": ["export", "{run}", "{out}", "--to", "orbax"],
    "report": ["report", "{run}", "-o", "{out}"],
}
every_write = pytest.mark.parametrize("arguments", WRITES.values(), ids=WRITES)


def given(arguments: list[str], run: Path, out: Path) -> list[str]:
    return [each.format(run=run, out=out) for each in arguments]


@every_write
def test_nothing_is_put_into_a_checkpoint(tmp_path: Path, arguments: list[str]) -> None:
    run = made_run(tmp_path / "run", 1, 2, 3)
    (tmp_path / "link").symlink_to(step_path(run, 1))
    truncate_the_manifest(step_path(made_run(tmp_path / "damaged", 5), 5))
    before = files_below(tmp_path)
    within = step_path(run, 1)
    for place, checkpoint in {
        within / "out": within,
        within / "state" / "out": within,
        tmp_path / "link" / "out": within,
        step_path(tmp_path / "damaged", 5) / "out": step_path(tmp_path / "damaged", 5),
    }.items():
        message = refused(*given(arguments, run, place), code=2)
        assert message.startswith(f"{place}: ")
        assert f"inside {checkpoint}, " in message
    assert files_below(tmp_path) == before


@every_write
def test_destination_next_to_steps_is_accepted(tmp_path: Path, arguments: list[str]) -> None:
    run = made_run(tmp_path / "run", 1, 2, 3)
    (tmp_path / "COMMIT").write_text("0d5fa8c")  # other programs use this name, too
    printed(*given(arguments, run, tmp_path / "out"))
    assert (tmp_path / "out").exists()
    assert jct.verify(step_path(run, 3)).ok

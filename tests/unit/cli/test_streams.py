"""Control characters in names and files reach no output."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import jaxckpt_train as jct
from tests.support.commands import printed, run
from tests.support.runs import save_steps

RAW = "evil\x1b[31m\nname"


def test_control_characters_are_never_printed_raw(tmp_path: Path) -> None:
    directory = tmp_path / RAW
    with jct.StepManager(directory) as manager:
        save_steps(manager, 1, metrics={"loss\x1b[31m\n": 1.0})
        save_steps(manager, 2)
    jct.save(tmp_path / f"c{RAW}", {"a": np.zeros(2)})
    shown = r"evil\x1b[31m\nname"
    assert printed("ls", directory).splitlines()[0].split()[3] == r"loss\x1b[31m\n"
    texts = [
        printed("show", directory),
        printed("verify", directory),
        printed("cp", directory, tmp_path / f"copy{RAW}"),
        printed("mv", tmp_path / f"copy{RAW}", tmp_path / f"moved{RAW}"),
        printed("import", tmp_path / f"c{RAW}", tmp_path / f"imported{RAW}", "--op", "rename a b"),
        printed("doctor", tmp_path / f"none{RAW}", "--size-mib", 0),
        run("verify", tmp_path / f"none{RAW}").stderr,
        run("scrub", tmp_path / f"none{RAW}").stderr,
        run("pin", tmp_path / f"none{RAW}", 1).stderr,
    ]
    for text in texts:
        assert shown in text
        assert all(line.isprintable() for line in text.splitlines()), text
    assert all(text.count("\n") == 1 for text in texts[-3:])

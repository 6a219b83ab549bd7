"""The table of campaigns shows problems, skips, and campaigns that fell over."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO_ROOT
from tests.nightly.faults.everything import CAMPAIGNS, Campaign, Result, chosen_keys, run, run_in_parts, table, version
from tests.nightly.faults.needs import SKIPPED

WITHOUT_TARGET = {
    "native-call-controls",
    "owners",
    "hostile-atheris",
    "unchanged-deletions",
    "unchanged-damage",
}  # run by another target, or by none


@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=lambda each: each.key)
def test_every_campaign_has_a_main(campaign: Campaign) -> None:
    assert callable(importlib.import_module(campaign.module).main)


def test_every_campaign_has_a_make_target() -> None:
    """The campaigns are the modules that the Makefile runs."""
    makefile = (REPO_ROOT / "Makefile").read_text(encoding="utf-8")
    modules = set(re.findall(r"-m (tests\.nightly\.(?:faults|crash|kill|unchanged)\.\w+)", makefile))
    modules -= {"tests.nightly.faults.everything"}
    assert modules == {campaign.module for campaign in CAMPAIGNS}
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {campaign.key for campaign in CAMPAIGNS} - WITHOUT_TARGET <= targets
    for campaign in CAMPAIGNS:
        if campaign.trials and not campaign.some:
            options = "".join(f"{each} " for each in campaign.more)
            assert f"{campaign.module} {options}{campaign.option} {campaign.trials}" in makefile or (
                f"-m {campaign.module}\n" in makefile
            )


@pytest.mark.parametrize(
    ("lines", "code", "verdict", "right"),
    [
        (("30 cuts, 0 problems, 4 found a newer step",), 0, "0 problems", True),
        (("ext4: 30 cuts, 2 problems", "  seed 3"), 1, "2 problems", False),
        (("SKIP: needs root, to mount",), 0, "SKIP: needs root, to mount", True),
        (("SKIP: needs root, to mount",), SKIPPED, "SKIP: needs root, to mount", True),
        (("ext4: 0 problems", "xfs: SKIP: needs mkfs.xfs"), 0, "0 problems; xfs: SKIP: needs mkfs.xfs", True),
        (("nothing of the kind",), SKIPPED, "fell over (77)", False),
        ((), 0, "said nothing", False),
        (("on its way",), -9, "fell over (-9)", False),
    ],
)
def test_verdict_summarizes_the_output(lines: tuple[str, ...], code: int, verdict: str, right: bool) -> None:
    result = Result(CAMPAIGNS[0], lines, code, 1.0, datetime.date(2026, 1, 2), "abc, dirty")
    assert (result.verdict, result.is_right) == (verdict, right)
    assert f"| {verdict} | 7 | 2026-01-02 | 1 s | abc, dirty |" in table([result], 1.0, 7)


def test_campaign_is_run_with_its_share_of_trials(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(Campaign("owners", "owners", "tests.nightly.faults.owners", "--sequences", 400), 0.01, seed=3)
    assert result.verdict == "0 problems"
    assert result.commit == version()
    assert "4 sequences" in capsys.readouterr().out


def test_interrupted_campaign_continues_with_its_next_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign("owners", "owners", "tests.nightly.faults.owners", "--sequences", 12)
    run_in_parts(campaign, 1.0, 3, 3, tmp_path)
    assert capsys.readouterr().out.count("4 sequences") == 3
    (tmp_path / "owners-1-3-4.json").unlink()
    result = run_in_parts(campaign, 1.0, 3, 3, tmp_path)
    assert capsys.readouterr().out.count("4 sequences") == 1
    assert (result.verdict, result.is_right) == ("0 problems", True)
    assert "| owners | 12 | 0 problems | 3 to 5 |" in table([result], 1.0, 3)


@pytest.mark.parametrize(("share", "every", "most"), [(1.0, "1", None), (0.01, "100", "1"), (0.1, "10", "7")])
def test_share_applies_to_campaigns_without_trials(share: float, every: str, most: str | None) -> None:
    commands = {campaign.key: campaign.command(share, 0) for campaign in CAMPAIGNS}
    assert commands["native-calls"][-2:] == ["--every", every]
    assert commands["boundaries"][3:] == ([] if most is None else ["--most", most])


def test_an_unknown_campaign_is_refused() -> None:
    assert chosen_keys("soak, limits") == ["soak", "limits"]
    with pytest.raises(argparse.ArgumentTypeError, match="no campaign lost"):
        chosen_keys("soak,lost")


@pytest.mark.timeout(240)
def test_campaigns_run_after_one_that_is_skipped(tmp_path: Path) -> None:
    """Without a compiler one campaign is skipped, and the others run."""
    script = (
        "import os, sys; os.environ['PATH'] = '/nowhere'; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", script, "-m", "tests.nightly.faults.everything", "--share", "0.002", "--seed", "5"]
    file = tmp_path / "build" / "table.md"
    command += ["--only", "native-calls,owners,many-processes", "--markdown", str(file)]
    variables = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": str(REPO_ROOT)}
    done = subprocess.run(command, cwd=REPO_ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = file.read_text(encoding="utf-8").splitlines()[2:]
    assert [row.split(" | ")[1:4] for row in rows] == [
        ["each 500th", "SKIP: needs a C compiler (cc)", "none"],
        ["10", "0 problems", "5"],
        ["1", "0 problems", "5"],
    ]

"""A video run that is killed at random instants resumes each time, and ends as if it had never been killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.commands import ROOT, surroundings


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_at_drawn_instants_lose_nothing(tmp_path: Path) -> None:
    seed, kills, steps = 7, 6, 30
    command = [sys.executable, "-m", "tests.integrations.video_killed", "builtin:tiny-wan", str(tmp_path)]
    command += ["--seed", str(seed), "--kills", str(kills), "--steps", str(steps)]
    result = subprocess.run(
        command, cwd=ROOT, env=surroundings(), capture_output=True, text=True, timeout=850, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout.splitlines()[-1])
    print(f"seed {seed}:", [run["kill"] for run in said["runs"]])
    whole, runs = said["whole"], said["runs"]
    assert list(whole) == [str(step) for step in range(1, steps + 1)]
    assert [run["killed"] for run in runs] == [True] * kills + [False]
    assert any(run["half"] for run in runs)  # some were killed while a checkpoint was written or removed
    for run in runs:
        assert run["losses"] == {step: whole[step] for step in run["losses"]}
        assert list(run["losses"])[:1] in ([], [str(run["from"] + 1)])
    assert {step for run in runs for step in run["losses"]} == set(whole)
    for name in ("transformer", "transformer_ema"):
        file = Path(name, "diffusion_pytorch_model.safetensors")
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()

"""The README of the suite on fine-tuning."""

from __future__ import annotations

from pathlib import Path

from benchmarks.suites.sft import report
from ebbtide.cli.merge import merge
from ebbtide.report import load_run
from tests.unit.report.runs import write_run


def test_of_several_modes_those_of_ebbtide_have_a_row_of_saved_tensors(tmp_path: Path) -> None:
    ours = ["ebbtide", "ebbtide-minimal"]
    modes = ["plain", "checkpointing", *ours, "plain-again"]
    round_ = {mode: load_run(write_run(tmp_path / mode, mode, engine=mode in ours)).summary for mode in modes}
    merged = merge({1: round_}, modes, {})
    text = report(merged, [round_], max_steps=3, max_length=384)
    heads = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| ")]
    assert heads == ["mode", "---", *modes, "mode", "---", *ours, "mode", "---", *ours]

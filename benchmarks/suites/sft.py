"""Fine-tuning a real model: memory, step time and losses of ordinary training, checkpointing, and ebbtide.

SmolLM2-135M-Instruct, sequences of 384 tokens made from the standard library's docstrings, float32; every mode runs in
fresh processes, in turn; memory is watched from outside, and nothing is set in the environment. The command is that of
``make demo`` with more rounds, and with a second row of ordinary training under fixed thresholds of glibc's allocator.
Losses are compared bitwise; a mode whose losses differ fails the suite.

    python -m benchmarks.suites.sft [--rounds 5] [--max-steps 7] [--max-length 384] [--out DIR]
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results_folder import parser_of, result_folder, write_result
from ebbtide.base.runs import SUMMARY_FILE
from ebbtide.cli.compare import MODES, compare
from ebbtide.cli.merge import spread, spread_of
from ebbtide.report import load_run, timeline_svg
from ebbtide.report.table import Table, bytes_table, headline

MODEL = ["--model", "builtin:smollm2", "--dataset", "builtin:pydoc#400", "--packing", "true"]


def markdown(table: Table) -> list[str]:
    """Return a table's rows in Markdown."""
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (table.columns, rule, *table.rows)]


def against(rounds: list[dict[str, Any]], base: str, names: list[str]) -> list[str]:
    """Return rows of step times divided by those of ``base`` in the same round."""
    rows: list[str] = []
    for name in names:
        values = spread([r[name]["step_seconds_median"] / r[base]["step_seconds_median"] for r in rounds])
        rows.append(f"| {name} | ×{values['median']:.2f} | {values['low']:.2f} to {values['high']:.2f} |")
    return rows


def report(modes: list[dict[str, Any]], rounds: list[dict[str, Any]], *, max_steps: int, max_length: int) -> str:
    """Return the README of a results folder.

    Args:
        modes: The merged summaries.
        rounds: In each, the summary of every mode.
        max_steps: Steps of each run.
        max_length: Tokens of each step.
    """
    named = {mode["mode"]: mode for mode in modes}
    ours = {name: mode for name, mode in named.items() if name.startswith("ebbtide")}
    return "\n".join(
        [
            f"# SmolLM2-135M-Instruct, full fine-tuning, {max_length} tokens a step, float32",
            "",
            f"{len(rounds)} rounds of fresh processes in turn, {max_steps} steps each, of which the first "
            f"{modes[0]['warm_up_steps']} warm up and do not count. Peaks were watched from outside the",
            "processes. `activation memory` is what a forward added to the resident size, in the last step, with a",
            "trimmed heap; `step / plain` is the median of the ratios within a round, with the "
            f"{spread_of(len(rounds))}. Made by `python -m benchmarks.suites.sft`; every round is in `run.json`.",
            "",
            *markdown(headline(named)),
            "",
            "Step time over checkpointing's, within a round:",
            "",
            "| mode | median | spread |",
            "| --- | ---: | ---: |",
            *against(rounds, "checkpointing", [*ours]),
            "",
            "Saved tensors, as the engine counts them:",
            "",
            *markdown(bytes_table(ours)),
            "",
            "![Memory over one step](timeline.svg)",
            "",
        ]
    )


def main() -> None:
    """Compare, and write ``run.json``, ``README.md``, ``timeline.svg`` and ``report.html``."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-steps", type=int, default=7)
    parser.add_argument("--max-length", type=int, default=384)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ebbtide-sft-") as scratch:
        out = Path(scratch) / "compare"
        result = compare(
            [*MODEL, "--max_length", str(given.max_length), "--max_steps", str(given.max_steps)],
            modes=tuple(MODES),
            rounds=given.rounds,
            out=out,
        )
        if result.exit_code or not all(mode["loss_equal"] for mode in result.modes):
            raise SystemExit("a mode failed or its losses differ from plain training's: no figures on a red gate")
        folder = given.out or result_folder("sft")
        names = [mode["mode"] for mode in result.modes]
        rounds = [
            {mode: json.loads((out / f"round-{turn}" / mode / SUMMARY_FILE).read_text()) for mode in names}
            for turn in range(1, given.rounds + 1)
        ]
        write_result(
            folder,
            {"suite": "sft", "environment": result.environment, "modes": result.modes, "rounds": rounds},
            report(result.modes, rounds, max_steps=given.max_steps, max_length=given.max_length),
        )
        shown = [m for m in names if m not in ("ebbtide-minimal", "plain-again", "plain-malloc")]
        runs = [load_run(out / f"round-{given.rounds}" / mode) for mode in shown]
        (folder / "timeline.svg").write_text(timeline_svg(runs))
        shutil.copy(out / "report.html", folder / "report.html")
        print(f"written to {folder}")


if __name__ == "__main__":
    main()

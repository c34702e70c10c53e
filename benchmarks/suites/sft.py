"""Fine-tuning a real model: memory, step time and losses of plain training, checkpointing, and ebbtide.

SmolLM2-135M-Instruct, sequences of 1024 tokens made from the standard library's docstrings, float32; every mode in
fresh processes, in turn; memory watched from outside. The same command as ``make demo``, with more rounds and with the
policy ``Minimal`` as a fourth mode. Losses are compared bit by bit; a mode whose losses differ fails the suite.

    python -m benchmarks.suites.sft [--rounds 5] [--max-steps 4] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results_folder import result_folder, write_result
from ebbtide.base.runs import SUMMARY_FILE
from ebbtide.cli.compare import MODES, compare
from ebbtide.cli.merge import spread, spread_of
from ebbtide.report import load_run, timeline_svg
from ebbtide.report.table import Table, bytes_table, headline

MODEL = ["--model", "builtin:smollm2", "--dataset", "builtin:pydoc", "--max_length", "1024", "--packing", "true"]


def markdown(table: Table) -> list[str]:
    """Return a table's lines in Markdown."""
    rule = ["---"] + ["---:"] * (len(table.columns) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (table.columns, rule, *table.rows)]


def against(rounds: list[dict[str, Any]], base: str, names: list[str]) -> list[str]:
    """Return rows of step times over ``base``'s of the same round."""
    rows: list[str] = []
    for name in names:
        values = spread([r[name]["step_seconds_median"] / r[base]["step_seconds_median"] for r in rounds])
        rows.append(f"| {name} | ×{values['median']:.2f} | {values['low']:.2f} to {values['high']:.2f} |")
    return rows


def main() -> None:
    """Compare, and write ``run.json``, ``README.md``, ``timeline.svg`` and ``report.html``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-steps", type=int, default=4)
    parser.add_argument("--out", type=Path, help="results folder; default: a new one in benchmarks/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ebbtide-sft-") as scratch:
        out = Path(scratch) / "compare"
        result = compare(
            [*MODEL, "--max_steps", str(given.max_steps)], modes=tuple(MODES), rounds=given.rounds, out=out
        )
        if result.exit_code or not all(mode["loss_equal"] for mode in result.modes):
            raise SystemExit("a mode failed or its losses differ from plain training's: no figures on a red gate")
        folder = given.out or result_folder("sft")
        names = [mode["mode"] for mode in result.modes]
        rounds = [
            {mode: json.loads((out / f"round-{turn}" / mode / SUMMARY_FILE).read_text()) for mode in names}
            for turn in range(1, given.rounds + 1)
        ]
        text = [
            "# SmolLM2-135M-Instruct, full fine-tuning, 1024 tokens a step, float32",
            "",
            f"{given.rounds} rounds of fresh processes in turn, {given.max_steps} steps each, the first not "
            "counted. Memory was watched from outside the processes. `activation memory` is what a forward added to",
            "the resident size; `step / plain` is the median of the ratios within a round, with the "
            f"{spread_of(given.rounds)}. Made by `python -m benchmarks.suites.sft`; every round is in `run.json`.",
            "",
            *markdown(headline(result.modes, names)),
            "",
            "Step time over checkpointing's, within a round:",
            "",
            "| mode | median | spread |",
            "| --- | ---: | ---: |",
            *against(rounds, "checkpointing", [n for n in names if n.startswith("ebbtide")]),
            "",
            "What became of the saved tensors, by the engine's own count:",
            "",
            *markdown(bytes_table(result.modes, names)),
            "",
            "![Memory over one step](timeline.svg)",
            "",
        ]
        write_result(
            folder,
            {"suite": "sft", "environment": result.environment, "modes": result.modes, "rounds": rounds},
            "\n".join(text),
        )
        shown = [m for m in names if m != "ebbtide-minimal"]
        runs = [load_run(out / f"round-{given.rounds}" / mode) for mode in shown]
        (folder / "timeline.svg").write_text(timeline_svg(runs))
        shutil.copy(out / "report.html", folder / "report.html")
        print(f"written to {folder}")


if __name__ == "__main__":
    main()

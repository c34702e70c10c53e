"""Shared by suites: flags, names of results folders, facts noted with the numbers, quartiles, alternating rates."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def summary(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"q1": low, "median": middle, "q3": high}


def summaries(values: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return median and quartiles of each of several lists."""
    return {name: summary(some) for name, some in values.items()}


def spread(quartiles: dict[str, float], digits: int = 3, *, unit: float = 1.0) -> str:
    """Return what ``summary`` returned as text, in a unit: ``1.02 (1.00 to 1.05)``."""
    middle, low, high = (f"{quartiles[key] / unit:.{digits}f}" for key in ("median", "q1", "q3"))
    return f"{middle} ({low} to {high})"


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser for the suite with this docstring; it has ``--out``."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results folder; default: a new one in benchmarks/results")
    return parser


def with_tables(text: str, begin: str, end: str, rows: str) -> str:
    """Return a page with what is between two of its lines replaced."""
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{rows}\n\n{end}{rest.split(end)[1]}"


def interleaved(
    pairs: int, raw: Callable[[], tuple[float, float]], tier: Callable[[], tuple[float, float]]
) -> dict[str, list[float]]:
    """Return the rates out and in of a tier, of its reference, and their ratio, measured in turn.

    The order changes from pair to pair, so that other load on the machine affects both; the first pair warms up.

    Args:
        pairs: Number of pairs that count.
        raw: Return the rates, out and in, of the bare device or file.
        tier: Return those of the tier.
    """
    found: dict[str, list[float]] = {name: [] for name in ("raw_out", "raw_in", "tier_out", "tier_in")}
    for pair in range(pairs + 1):
        order = [("raw", raw), ("tier", tier)]
        for name, run in order if pair % 2 else reversed(order):
            out, into = run()
            if pair:
                found[f"{name}_out"].append(out)
                found[f"{name}_in"].append(into)
    for direction in ("out", "in"):
        both = zip(found[f"tier_{direction}"], found[f"raw_{direction}"], strict=True)
        found[f"ratio_{direction}"] = [tier / raw for tier, raw in both]
    return found


def compared_rates(
    rates: dict[str, dict[str, float]], direction: str, digits: int, *, unit: float, ratio_digits: int = 3
) -> str:
    """Return three cells of a table: the quartiles of the rates of a reference and of a tier, and of their ratio."""
    raw, tier = (spread(rates[f"{name}_{direction}"], digits, unit=unit) for name in ("raw", "tier"))
    return f"{raw} | {tier} | {spread(rates[f'ratio_{direction}'], ratio_digits)}"


def hardware(directory: Path) -> str:
    """Return a slug of cores, processor family and disk driver, such as ``2core-epyc-virtio``."""
    model = next(
        (x.partition(":")[2] for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")),
        platform.machine(),
    )
    words = re.sub(r"\((r|tm)\)|@.*|\b(amd|intel|cpu|processor|core|arm)\b|\d+-core", " ", model.lower())
    family = (re.findall(r"[a-z][a-z0-9-]+", words) or [platform.machine()])[0]
    number = os.stat(directory).st_dev
    device = Path(os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")).name
    driver = next(
        (v for k, v in {"vd": "virtio", "nvme": "nvme", "sd": "sd", "dm": "dm"}.items() if device.startswith(k)), "disk"
    )
    return f"{os.cpu_count()}core-{family}-{driver}"


def result_folder(theme: str, directory: Path | None = None) -> Path:
    """Return ``benchmarks/results/<theme>_<hardware>_<yyyymm>`` for measurements on ``directory``'s disk."""
    return RESULTS / f"{theme}_{hardware(directory or RESULTS)}_{datetime.date.today():%Y%m}"


def is_simulated() -> bool:
    """Whether torch's accelerator is the one of ``tests/simdev``, which exists in host memory only."""
    return str(torch.accelerator.current_accelerator()) == "simdev"


def write_result(folder: Path, result: dict[str, Any], text: str) -> None:
    """Write ``run.json`` (the result, with date, versions and commit) and ``README.md``.

    Both say so if the device was simulated: such figures say nothing about a card.
    """
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=RESULTS, capture_output=True, text=True, check=False
    ).stdout.strip()
    about = {
        "date": datetime.date.today().isoformat(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": found or None,
        "command": " ".join(sys.orig_argv[1:]),
        "simulated": is_simulated(),
    }
    if is_simulated():
        title, rest = text.split("\n", 1)
        text = (
            f"{title}\n\n**Simulated**: the device is that of `tests/simdev`; no figure here tells of a card.\n{rest}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(rows({**about, **result}))
    (folder / "README.md").write_text(text)


def rows(document: dict[str, Any]) -> str:
    """Return a document as JSON with a line for each row: a small value, or an element of a long list or object."""
    return _lines(document, "", 120) + "\n"


def _lines(value: Any, indent: str, width: int) -> str:
    """Return JSON; values longer than ``width`` are broken, their parts less readily: a row stays on its line."""
    text = json.dumps(value)
    inner = indent + " "
    if len(text) <= width or not isinstance(value, (dict, list)):
        return text
    if isinstance(value, dict):
        parts = [f"{json.dumps(str(key))}: {_lines(part, inner, 8 * width)}" for key, part in value.items()]
        return "{\n" + inner + (",\n" + inner).join(parts) + "\n" + indent + "}"
    return "[\n" + inner + (",\n" + inner).join(json.dumps(part) for part in value) + "\n" + indent + "]"

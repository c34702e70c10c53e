"""The longest sequence that fits on one device, in each mode of saving activation memory.

The length is doubled until a step runs out of memory, and then bisected until the interval is an eighth of the length
that fits; each try is a process of its own. On a machine without a device, where memory has no such limit, a try fits
if its peak stays below ``--budget-mib``.

    python -m benchmarks.suites.longest [--small] [--minutes 8] [--model Qwen3-8B] [--modes plain,TRL] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.case import Case, Row
from benchmarks.cases import Book, arguments, table
from benchmarks.peers import all_modes

FINENESS = 8
"""The search ends when the shortest length that does not fit is this part above the longest that does."""


def longest(fits: Callable[[int], bool], begin: int, most: int) -> int:
    """Return the longest length that fits, to one part in ``FINENESS``; 0 if ``begin`` does not.

    Args:
        fits: Try a length.
        begin: The first length.
        most: No longer one is tried.
    """
    good, bad = 0, most + 1
    length = begin
    while length <= most and length < bad:
        if fits(length):
            good = length
            length = min(2 * length, most) if length < most else most + 1
        else:
            bad = length
    while good and bad <= most and bad - good > good // FINENESS:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def report(rows: list[Row], found: dict[str, str]) -> str:
    """Return the README of a results folder."""
    lines = ["# The longest sequence that fits", "", "| mode | tokens |", "| --- | ---: |"]
    lines += [f"| {mode} | {text} |" for mode, text in found.items()]
    lines += [
        "",
        "Every try, as in the suite `pareto`. Made by `python -m benchmarks.suites.longest`.",
        "",
        *table(rows),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Search, and write the results after every try."""
    given = arguments(__doc__, model="", modes="", tuning="full", most_tokens=1 << 21, budget_mib=256)
    model = given.model or ("tiny" if given.small else "Qwen3-8B")
    chosen = [mode for mode in all_modes() if not given.modes or mode in given.modes.split(",")]
    found: dict[str, str] = {}
    about = {"model": model, "tuning": given.tuning, "small": given.small, "longest": found}
    book = Book("longest", given.out, given.minutes, lambda rows: report(rows, found), about)
    budget = None if torch.accelerator.is_available() else given.budget_mib << 20
    for mode in chosen:
        reasons: list[str] = []

        def fits(tokens: int, mode: str = mode, reasons: list[str] = reasons) -> bool:
            row = book.run(Case(mode=mode, model=model, tokens=tokens, tuning=given.tuning, steps=1, gate_tokens=128))
            reasons.append(row.status)
            print(f"{mode}: {tokens} tokens: {row.status}, {row.peak_bytes / 1e6:.0f} MB", flush=True)
            return row.status == "ok" and (budget is None or row.peak_bytes <= budget)

        most = min(given.most_tokens, 4096) if given.small else given.most_tokens
        tokens = longest(fits, 128 if given.small else 8192, most)
        ended = next((r for r in reasons if not r.startswith(("ok", "out of memory", "its process died"))), "")
        found[mode] = (f"{tokens}" if tokens else "none") + (f" ({ended})" if ended else "")
    if book.rows:
        book.add(book.rows.pop())  # with the results of the last mode
    book.close()


if __name__ == "__main__":
    main()

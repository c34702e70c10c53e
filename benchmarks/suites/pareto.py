"""Peak memory and step time of every mode of saving activation memory, compared with ordinary training.

Each case is a process of its own: see ``benchmarks/case.py`` for what is measured, and for the gate before it. Rows
without a number stay: out of memory, not installed, gradients that differ, not reached. The last group of cases
repeats the table that other projects publish, 8 and 16 sequences of 256, 512 and 1024 tokens, next to the figures
they claim.

    python -m benchmarks.suites.pareto [--small] [--minutes 8] [--models Qwen3-8B] [--modes plain,TRL] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.case import Case, Row
from benchmarks.cases import Book, arguments, table
from benchmarks.peers import all_modes

CLAIMS = (
    "Claimed elsewhere for such batches: 40 to 50 % less memory at 92 to 95 % of the speed without checkpointing, 60 "
    "to 70 % less at 85 to 90 % with it; peaks of 8 sequences 304, 496, 800 MB against 336, 448, 660 MB, of 16 "
    "sequences 624, 929, 1505 MB against 576, 788, 1172 MB."
)
LENGTHS = {"Qwen3-8B": (8192, 4096, 32768), "Qwen3-1.7B": (8192, 32768, 131072), "Wan-1.3B": (32760,)}
SHORT = tuple((batch, tokens) for batch in (8, 16) for tokens in (256, 512, 1024))


def cases(*, small: bool, models: list[str], modes: list[str]) -> Iterator[Case]:
    """Yield the cases, the most important first.

    Args:
        small: A tiny model on few tokens.
        models: Names of shapes; empty: all of ``LENGTHS``.
        modes: Names of modes; empty: all.
    """
    chosen = [mode for mode in all_modes() if not modes or mode in modes]
    if small:
        for tuning in ("full", "lora"):
            yield from (Case(mode=mode, model="tiny", tokens=256, tuning=tuning, steps=3) for mode in chosen)
        for batch, tokens in SHORT[:2]:
            yield from (Case(mode=mode, model="tiny", tokens=tokens // 4, batch=batch, steps=3) for mode in chosen)
        return
    for model in models or LENGTHS:
        for tokens in LENGTHS.get(model, (8192,)):
            for tuning in ("full", "lora") if model.startswith("Qwen") else ("full",):
                yield from (Case(mode=mode, model=model, tokens=tokens, tuning=tuning) for mode in chosen)
    for batch, tokens in SHORT:
        yield from (Case(mode=mode, model="Qwen3-0.6B", tokens=tokens, batch=batch) for mode in chosen)


def report(rows: list[Row]) -> str:
    """Return the README of a results folder."""
    settings = {row.case.mode: all_modes()[row.case.mode].setting for row in rows}
    return "\n".join(
        [
            "# Methods to save activation memory: peak and step time",
            "",
            "Forward and backward of one step, no head and no optimizer. Peak: above weights, gradients and inputs.",
            "Out and in: bytes that were copied (on a CPU: written and read) in one step, counted from outside. Before",
            "each row its gradients were compared bitwise with those of plain training: no number where they",
            "differ. Times are medians (quartiles) of one process; a row is a measurement and no claim. Made by",
            "`python -m benchmarks.suites.pareto`; every step is in `run.json`.",
            "",
            *table(rows),
            "",
            CLAIMS,
            "",
            "Settings: " + "; ".join(f"{mode}: {setting}" for mode, setting in settings.items() if setting) + ".",
            "",
        ]
    )


def main() -> None:
    """Measure and write after every case."""
    given = arguments(__doc__, models="", modes="")
    book = Book("pareto", given.out, given.minutes, report, {"small": given.small})
    split = {name: [x for x in getattr(given, name).split(",") if x] for name in ("models", "modes")}
    book.run_all(cases(small=given.small, **split))
    book.close()


if __name__ == "__main__":
    main()

"""The action on every saved tensor of fifty model families, in three precisions, under every policy.

Models from configurations with random weights, small but with activations that outweigh the weights (128 tokens, width
64, pictures of 24 x 24); every saved tensor counts, however small. Shares are of the naive bytes, which
``benchmarks.shares`` counts, and say nothing about time. A case whose loss, outputs or gradients differ from ordinary
training in one bit fails the suite. ``docs/reference/families.md`` is written from the newest results folder.

    python -m benchmarks.suites.families [--only llama vit ...] [--page] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.results_folder import RESULTS, result_folder, write_result
from benchmarks.shares import Differs, shares
from tests.helpers.models import FAMILIES, PRECISIONS, build
from tests.helpers.sizes import WIDE

PAGE = Path(__file__).parents[2] / "docs/reference/families.md"
MUCH = 70
"""Percent left under Auto above which the page says why."""

LEAST = 0.5
"""Percent below which an operator is not shown."""

SHOWN = "bf16"
"""The precision of the reference page, and of the reasons of single families."""

USUAL = "matrix product"
"""The reason that is not repeated for single families."""

WHY = {
    USUAL: "it takes a matrix product or a convolution: Minimal recomputes it",
    "no rule": "no rule covers the node that made it",
    "operand missing": "something that it was made from is not saved and has no rule",
    "no autograd node": "the graph does not show how it was made: masks of dropout, workspaces, constants",
    "part of a tensor": "it is a part of a tensor, or was written in place",
    "block input": "it is an input of the block",
    "cast up": "saved in float32, offloaded as the bfloat16 that it was cast from",
    "recompute differed": "the first recompute was not equal, so the site is offloaded",
    "never offloaded": "it stays under every policy, such as a part of a storage whose siblings may change in place",
}


def measure(only: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the shares of each family in each precision."""
    import transformers

    transformers.logging.set_verbosity_error()
    for name in only:
        for precision, given in PRECISIONS.items():
            yield {"family": name, "precision": precision, **shares(build(name, size=WIDE, **given))}


def percent(case: dict[str, Any], policy: str, what: str) -> float:
    """Return the share of the naive bytes that a policy keeps, moves, recomputes or checkpoints."""
    return 100.0 * case["policies"][policy][what] / case["naive_bytes"]


def left(case: dict[str, Any], policy: str = "auto") -> float:
    """Return the percentage that a policy keeps or moves."""
    return percent(case, policy, "kept") + percent(case, policy, "moved")


def row(case: dict[str, Any]) -> str:
    """Return a case's line of the table."""
    shares = [percent(case, "auto", "moved"), *(percent(case, "minimal", k) for k in ("moved", "checkpointed"))]
    return "| " + " | ".join([case["family"], *(f"{share:.0f}" for share in shares)]) + " |"


def reasons(case: dict[str, Any]) -> str:
    """Return the largest groups of what Auto does not recompute; most are offloaded for a matrix product."""
    large = [g for g in case["moved"] if 100 * g["bytes"] >= case["naive_bytes"]][:3]
    return ", ".join(
        f"{g['node']} {100 * g['bytes'] / case['naive_bytes']:.0f}" + ("" if g["why"] == USUAL else f" ({g['why']})")
        for g in large
    )


def summary(cases: list[dict[str, Any]]) -> list[str]:
    """Return the shares over all cases."""
    kept, moved, recomputed = (
        sum(percent(c, "auto", what) for c in cases) / len(cases) for what in ("kept", "moved", "recomputed")
    )
    return [
        f"Of the bytes that blocks save, in {len(cases)} cases of equal weight, Auto keeps {kept:.0f} %, offloads "
        f"{moved:.0f} % and recomputes {recomputed:.0f} %.",
        "Both policies are here those of a first step: Auto plans later, Minimal compares its methods later.",
        "",
        "Figures are percent of the distinct storages that autograd saves inside the blocks of ordinary training,",
        "without weights. Storages with the same value are stored once, so shares may sum to less than 100. Every case",
        "is bitwise equal to ordinary training. On the CPU of these runs, attention with dropout, or with values of",
        "another width than keys (deepseek_v3), saves its softmax, and with dropout a float mask; the fused kernels of",
        "a GPU save neither.",
        "",
    ]


def shares_table(cases: list[dict[str, Any]]) -> list[str]:
    """Return the table of the page: every share of each family, in one precision."""
    shown = [case for case in cases if case["precision"] == SHOWN]
    return [
        f"In {SHOWN}. Kept: {_kept(shown)}. The rest is recomputed, by Minimal in part in checkpointed blocks.",
        "",
        "| family | Auto offloads | Minimal offloads | Minimal checkpoints |",
        "| --- |" + " ---: |" * 3,
        *(row(case) for case in shown),
        "",
    ]


def _kept(cases: list[dict[str, Any]]) -> str:
    """Return the families of which a policy keeps one percent or more; there are few."""
    shares = [(c["family"], policy, percent(c, policy, "kept")) for c in cases for policy in ("auto", "minimal")]
    found = [f"{policy.title()} {share:.0f} % of {family}" for family, policy, share in shares if share >= 0.5]
    return ", ".join([*found, "otherwise nothing"] if found else ["nothing"])


def precisions_table(cases: list[dict[str, Any]]) -> list[str]:
    """Return the table of the results folder: the share of each family that stays or moves, in every precision."""
    found: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        found.setdefault(case["family"], []).append(case)
    return [
        "Kept or offloaded in " + ", ".join(PRECISIONS) + "; the rest is recomputed:",
        "",
        "| family | Auto | Minimal |",
        "| --- | ---: | ---: |",
        *(f"| {family} | {_joined(rows, 'auto')} | {_joined(rows, 'minimal')} |" for family, rows in found.items()),
        "",
    ]


def _joined(cases: list[dict[str, Any]], policy: str) -> str:
    return ", ".join(f"{left(case, policy):.0f}" for case in cases)


def why_moved(cases: list[dict[str, Any]]) -> list[str]:
    """Return the reasons for which Auto moves bytes, with their shares."""
    whys: Counter[str] = Counter()
    for (_, why), part in _operators(cases).items():
        whys[why] += part
    return [
        "## Why Auto offloads bytes",
        "",
        "| reason | % | meaning |",
        "| --- | ---: | --- |",
        *(f"| {why} | {part:.1f} | {WHY[why]} |" for why, part in whys.most_common()),
        "",
    ]


def details(cases: list[dict[str, Any]]) -> list[str]:
    """Return the lines that only the results folder has: operators, and the families of which most is left."""
    large = [c for c in cases if c["precision"] == SHOWN and left(c) > MUCH]
    return [
        f"## Operators with at least {LEAST} %",
        "",
        "| operator | reason | % |",
        "| --- | --- | ---: |",
        *(f"| {node} | {why} | {part:.1f} |" for (node, why), part in _operators(cases).most_common() if part >= LEAST),
        "",
        f"## Families of which Auto offloads or keeps more than {MUCH} %, in {SHOWN}",
        "",
        f"The reason, if it is not named: {USUAL}.",
        "",
        "| family | offloaded or kept % | largest groups, in % |",
        "| --- | ---: | --- |",
        *(f"| {c['family']} | {left(c):.0f} | {reasons(c)} |" for c in large),
        "",
    ]


def _operators(cases: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Return operator and reason → percent of the bytes; every case has the same weight, whatever its size."""
    found: Counter[tuple[str, str]] = Counter()
    for case in cases:
        for group in case["moved"]:
            found[group["node"], group["why"]] += 100.0 * group["bytes"] / case["naive_bytes"] / len(cases)
    return found


def readme(cases: list[dict[str, Any]]) -> str:
    """Return the README of a results folder."""
    head = ["# Shares of saved tensors by family and policy", "", "Made by `python -m benchmarks.suites.families`.", ""]
    return "\n".join([*head, *summary(cases), *precisions_table(cases), *details(cases)])


def page(folder: Path) -> str:
    """Return the reference page made from a results folder."""
    cases = cases_of(folder)
    names = len({case["family"] for case in cases})
    return "\n".join(
        [
            f"# Saved tensors of {names} model families",
            "",
            "For anyone who wants to know how much ebbtide saves on a model: the saved bytes of each family by action,",
            "in small models with random weights.",
            f"[The results](../../benchmarks/results/{folder.name}/README.md) have every precision and operator.",
            "",
            *summary(cases),
            *shares_table(cases),
            *why_moved(cases),
        ]
    )


def cases_of(folder: Path) -> list[dict[str, Any]]:
    """Return the cases in a results folder."""
    return json.loads((folder / "run.json").read_text())["cases"]


def newest() -> Path:
    """Return the newest results folder of this suite."""
    return max(RESULTS.glob("families_*"), key=lambda folder: folder.name.rpartition("_")[2])


def main() -> None:
    """Measure and write the results folder and the page; or only the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY")
    parser.add_argument("--page", action="store_true", help="write the texts of the newest results, measure nothing")
    parser.add_argument(
        "--out", type=Path, help="results folder; default: a new one in benchmarks/results, and the page"
    )
    given = parser.parse_args()
    if given.page:
        (newest() / "README.md").write_text(readme(cases_of(newest())))
        PAGE.write_text(page(newest()))
        return
    torch.set_num_threads(1)  # sums do not depend on the machine's cores
    folder = given.out or result_folder("families")
    cases: list[dict[str, Any]] = []
    try:
        for case in measure(tuple(given.only)):
            cases.append(case)
            print(case["precision"], row(case), flush=True)
            write_result(folder, {"suite": "families", "cases": cases}, readme(cases))
    except Differs as error:
        raise SystemExit(f"{error}\nno figures on a red gate: the cases before it are in {folder}") from error
    if given.out is None and tuple(given.only) == FAMILIES:
        PAGE.write_text(page(folder))
    print(f"written to {folder}")


if __name__ == "__main__":
    main()

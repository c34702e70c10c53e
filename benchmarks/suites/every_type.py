"""Every model type of transformers, as far as it can be trained here: bitwise equal to ordinary training?

The default configuration of each type is shrunk by rules (``benchmarks.small_configs``), its batches are made by the
names of the arguments of its forward (``benchmarks.small_batches``), and a model with random weights is trained: AdamW,
six steps, lengths and rows that change, dropout as in the configuration. Ordinary training twice, then each of
``benchmarks.trained.WAYS``, and ``minimal`` under bfloat16 autocast: losses, all gradients of each step and the final
weights are compared, every bit. A type that differs fails the suite.

Each type has a process of its own and a time limit. Results are written after every type, and a run resumes: types that
its folder has are not repeated; those that were not trained are tried once more with ``--retry``.

    python -m benchmarks.suites.every_type [--letters a-l m-z] [--only llama vit ...] [--retry] [--minutes 90] [--out D]
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pkgutil
import re
import resource
import signal
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.results_folder import parser_of, result_folder, write_result
from benchmarks.small_batches import LENGTHS
from benchmarks.small_models import GROUPS, Untrained, brief, found_training, kinds
from benchmarks.trained import WAYS, differing, offloaded, train

TYPE_SECONDS = 90
"""Time of the processor for one type."""

WALL_SECONDS = 900
"""Time of the clock for one type: a type that waits for ever is stopped."""

HALVES = "a-l", "m-z"
"""First letters of the types of a result, which may have 400 lines."""

ABOUT = (
    "For each type, the default configuration was shrunk by rules, and a model with random weights was trained in"
    " float32: AdamW, {steps} steps, lengths and rows that change, dropout as in the configuration. Ordinary "
    "training ran twice and was equal to itself (under autocast it ran once); then came `minimal`, `recipes` (in every "
    "step, what has a recipe is recomputed and the rest is offloaded), `offload`, `auto`, `minimal` with "
    "`verify=True`, and `minimal` under bfloat16 autocast, each with `min_bytes=0` and `window=1`. Of a type that does "
    "not train as a whole, such as one that only generates, the first part that does was trained (see *class*). "
    "*Equal*: the losses and all gradients of every step and the weights after the last, every bit. Made by "
    "`python -m benchmarks.suites.every_type`; `run.json` has all figures of each type."
)
COLUMNS = (
    "Saved: share of the bytes of ordinary training that did not stay on the device, in blocks, in the last step."
    " In models this small `auto` keeps most: it saves what costs little. Checkpointed: most blocks in one step "
    "of `minimal`. Replayed: share of the saved tensors of `offload` that were recognised from an earlier step. "
    "Input: the tensors that the model read."
)

LITTLE = 50
"""Percent saved by ``minimal`` below which a type is named."""

RECIPE_STEPS = 4
"""Steps in which the way ``recipes`` recomputes; a type with fewer is named."""


def trained(name: str, config_class: type) -> dict[str, Any]:
    """Train a type in every way; return its row."""
    try:
        make, data, about = found_training(name, config_class)
        want = train(make(), data)
        again = differing(want, train(make(), data))
        if again:
            raise Untrained("differs", f"{again[0]} and {len(again) - 1} more")
    except Untrained as error:
        return {"type": name, "untrained": error.args[0], "reason": error.args[1]}
    row: dict[str, Any] = {"type": name, **about, "finite": want["all losses are finite"] == "True", "ways": {}}
    for way in WAYS:
        row["ways"][way] = compared(want, make, data, way)
    row["ways"]["autocast"] = under_autocast(make, data)
    return row


def compared(
    want: dict[str, Any], make: Callable[[], nn.Module], data: list[dict[str, Any]], way: str, **more: Any
) -> dict[str, Any]:
    """Train in one way; return its figures and what differs from ordinary training."""
    try:
        got, figures = offloaded(make, data, way, **more)
    except Exception:
        return {"differs": ["error"], "error": traceback.format_exc()[-1500:]}
    found = differing(want, got)
    if figures["live_tickets"]:
        found.append("tickets alive after the last step")
    return {"differs": found[:4], **{name: value for name, value in figures.items() if name != "live_tickets"}}


def under_autocast(make: Callable[[], nn.Module], data: list[dict[str, Any]]) -> dict[str, Any]:
    """Train under bfloat16 autocast, plainly and with ``minimal``; return as ``compared`` does, or why not."""
    try:
        want = train(make(), data, autocast=True)
    except Exception as error:
        return {"differs": [], "untrained": brief(error)}
    row = compared(want, make, data, "minimal", autocast=True)
    if row["differs"] and (again := differing(want, train(make(), data, autocast=True))):
        return {"differs": [], "untrained": f"ordinary training differs: {again[0]}"}
    return row


def in_own_process(name: str, config_class: type) -> dict[str, Any]:
    """Return the row of a type, made in a child that ends after ``TYPE_SECONDS``."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(WALL_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (TYPE_SECONDS, TYPE_SECONDS))
        try:
            with open(os.devnull, "w") as none, contextlib.redirect_stderr(none), contextlib.redirect_stdout(none):
                row = trained(name, config_class)
        except BaseException as error:
            row = {"type": name, "untrained": "plain", "reason": brief(error)}
        with os.fdopen(writer, "w") as pipe:
            json.dump(row, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return {"type": name, "untrained": "time", "reason": f"ended with signal {os.waitstatus_to_exitcode(status)}"}
    return json.loads(text)


def is_equal(row: dict[str, Any]) -> bool:
    """Whether a type was trained, and nothing differed in any way."""
    return "ways" in row and not any(way["differs"] for way in row["ways"].values())


def main() -> None:
    """Train, and write the results after every type."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--letters", nargs="+", default=HALVES, metavar="A-Z", help="first letters of types; a result for each range"
    )
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="of these types; default: all")
    parser.add_argument("--retry", action="store_true", help="try types once more that an earlier run did not train")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin no further type after this time")
    given = parser.parse_args()
    if bad := [letters for letters in given.letters if not re.fullmatch("[a-z]-[a-z]", letters)]:
        parser.error(f"--letters: found {', '.join(bad)}, expected ranges of letters, as a-l")
    if given.out is not None and len(given.letters) > 1:
        parser.error("--out is the folder of one result: choose one range, as with --letters a-l")
    prepare()
    chosen = {name: config for name, config in kinds().items() if not given.only or name in given.only}
    end, wrong = time.monotonic() + 60 * given.minutes, list[str]()
    for letters in given.letters:
        folder = given.out or result_folder(f"every-type-{letters}")
        wrong += train_all(chosen, letters, folder, retry=given.retry, end=end)
    if wrong:
        raise SystemExit(f"differ from ordinary training: {', '.join(wrong)}")


def train_all(chosen: dict[str, type], letters: str, folder: Path, *, retry: bool, end: float) -> list[str]:
    """Train those of the chosen types that begin with these letters, until ``end``; return those that differ."""
    rows, count = rows_of(folder), len([name for name in kinds() if letters[0] <= name[0] <= letters[2]])
    for name, config_class in chosen.items():
        if not letters[0] <= name[0] <= letters[2] or time.monotonic() > end:
            continue
        if name in rows and ("ways" in rows[name] or not retry):
            continue
        began = time.monotonic()
        rows[name] = in_own_process(name, config_class) | {"seconds": round(time.monotonic() - began, 1)}
        print(line(rows[name]), flush=True)
        write(folder, rows, letters, count)
    write(folder, rows, letters, count)
    print(f"written to {folder}")
    return [name for name, row in rows.items() if "ways" in row and not is_equal(row)]


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return type → row of a results folder; nothing if it has none yet."""
    file = folder / "run.json"
    return {row["type"]: row for row in json.loads(file.read_text())["types"]} if file.exists() else {}


def write(folder: Path, rows: dict[str, dict[str, Any]], letters: str, known: int) -> None:
    """Write the results, in the order of the names."""
    ordered = [rows[name] for name in sorted(rows)]
    result = {"suite": "every_type", "transformers": version("transformers"), "types": ordered}
    write_result(folder, result, report(ordered, letters, known - len(ordered)))


def report(rows: list[dict[str, Any]], letters: str, untried: int) -> str:
    """Return the README of a results folder.

    Args:
        rows: A row for each type that was tried.
        letters: The first letters of the types that there are, as in ``a-l``.
        untried: Types for which there was no time.
    """
    done = [row for row in rows if "ways" in row]
    equal = [row for row in done if is_equal(row)]
    left = Counter(row["untrained"] for row in rows if "ways" not in row)
    return "\n".join(
        [
            f"# Model types of transformers, trained small: {letters.replace('-', ' to ')}",
            "",
            *textwrap.wrap(ABOUT.format(steps=len(LENGTHS)), 112),
            "",
            f"Of {len(rows) + untried} types with these first letters (a class of configuration once, parts of other",
            f"types left out), {len(done)} were trained; **{len(equal)} of these are equal**.",
            *autocast_note(done),
            "",
            *shares_of(done),
            "",
            "## Types",
            "",
            *textwrap.wrap(COLUMNS, 112),
            "",
            "| type | class | input | parameters | outcome | minimal saved | auto saved | checkpointed | replayed |",
            "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: |",
            *map(table_row, done),
            "",
            "## Not trained",
            "",
            "| reason | types |",
            "| --- | ---: |",
            *(f"| {text} | {left[key]} |" for key, text in GROUPS.items() if left[key]),
            *([f"| no time was left | {untried} |"] if untried else []),
            "",
            *(line for key in GROUPS if left[key] for line in untrained(key, rows)),
        ]
    )


def autocast_note(done: list[dict[str, Any]]) -> list[str]:
    """Return how many types were trained under autocast as well."""
    failed = [row["type"] for row in done if "untrained" in row["ways"]["autocast"]]
    text = f"Under autocast ordinary training fails, or differs from run to run, for {len(failed)} of these."
    return [text] if failed else []


def shares_of(done: list[dict[str, Any]]) -> list[str]:
    """Return how much was saved over all types, and the types of which little was."""
    saved = {row["type"]: row["ways"]["minimal"].get("saved_percent") for row in done}
    known = sorted(share for share in saved.values() if share is not None)
    little = [name for name, share in saved.items() if share is None or share < LITTLE]
    demoted = [row["type"] for row in done if any(way.get("demoted") for way in row["ways"].values())]
    recomputed = {row["type"]: row["ways"].get("recipes", {}).get("recipe_steps") for row in done}
    few = [name for name, steps in recomputed.items() if steps is not None and steps < RECIPE_STEPS]
    if not known:
        return []
    text = (
        f"`minimal` saved {known[0]:.0f} to {known[-1]:.0f} % of the bytes in blocks, at least "
        f"{known[len(known) // 2]:.0f} % in half of the types; less than {LITTLE} %: {', '.join(little) or 'none'}. "
        "Types in which the first recompute of a site differed, so that the site was offloaded instead: "
        f"{', '.join(demoted) or 'none'}. Types in which `recipes` recomputed in fewer than {RECIPE_STEPS} steps: "
        f"{', '.join(few) or 'none'}."
    )
    return textwrap.wrap(text, 112)


def table_row(row: dict[str, Any]) -> str:
    """Return a trained type's row of the table."""
    ways = row["ways"]
    differ = [way for way, found in ways.items() if found["differs"]]
    outcome = f"**differs**: {', '.join(differ)}" if differ else "equal" if row["finite"] else "equal, not finite"
    if "untrained" in ways["autocast"]:
        outcome += "; autocast not trained"
    offload, minimal = ways["offload"], ways["minimal"]
    replayed = 100 * offload.get("replayed", 0) / max(1, offload.get("saved_tensors") or 1)
    cells = [
        row["type"],
        row["class"],
        ", ".join(f"`{name}`" for name in row["inputs"]),
        f"{row['parameters'] / 1e6:.2f} M",
        outcome,
        percent(minimal.get("saved_percent")),
        percent(ways["auto"].get("saved_percent")),
        str(minimal.get("checkpointed_blocks", "")),
        f"{replayed:.0f} %",
    ]
    return "| " + " | ".join(cells) + " |"


def percent(share: float | None) -> str:
    """Return a share for the table; empty if there is none."""
    return "" if share is None else f"{share:.0f} %"


def untrained(key: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the types of one group, with their reasons."""
    found = [row for row in rows if row.get("untrained") == key]
    return [
        f"### {GROUPS[key].capitalize()}",
        "",
        *(f"- {row['type']}: {' '.join(row['reason'].replace('|', '/').split())[:100]}" for row in found),
        "",
    ]


def line(row: dict[str, Any]) -> str:
    """Return what is printed of a type."""
    if "ways" not in row:
        return f"{row['type']}: {row['untrained']}: {row['reason']} ({row['seconds']} s)"
    found = [f"{way} {result['differs'][0]}" for way, result in row["ways"].items() if result["differs"]]
    shares = ", ".join(f"{result.get('saved_percent') or 0:.0f}" for result in row["ways"].values())
    return f"{row['type']}: {', '.join(found) or 'equal'}; saved {shares} % ({row['seconds']} s)"


def prepare() -> None:
    """Silence what models say while many are tried, use one thread, and import once what every child needs."""
    import transformers

    for package in ("base", "planner", "schedule", "store", "engine", "profiling", "wrap"):
        folder = importlib.import_module(f"ebbtide.{package}").__path__
        for module in pkgutil.walk_packages(folder, f"ebbtide.{package}."):
            importlib.import_module(module.name)
    importlib.import_module("transformers.models.llama.modeling_llama")
    importlib.import_module("torch.profiler")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()

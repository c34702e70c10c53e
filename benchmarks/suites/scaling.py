"""What offloading needs of a node: host memory and links, from bytes that the engine counts and published rates.

The bytes that each policy moves are counted on a CPU, by running blocks of the model's proportions at an eighth of its
width: bytes per token are proportional to the width. The rest is arithmetic on rates that are named with their source,
and simulation of ranks that share links and wait for each other (``benchmarks.cluster``). Nothing here was timed.

    python -m benchmarks.suites.scaling [--out DIR] [--page]
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch

import ebbtide
from benchmarks.cluster import Nodes, simulate_ranks
from benchmarks.results_folder import parser_of, result_folder, with_tables, write_result
from ebbtide.base.actions import Action, Site
from ebbtide.planner.profile import BlockProfile, Profile, Rates, Unit

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "scaling.md"
COMPUTED = "[Larger models, more devices](../../../docs/concepts/scaling.md): memory and link use computed from these."
BEGIN, END = "<!-- tables: written by benchmarks/suites/scaling.py -->", "<!-- end of tables -->"
SHRUNK, TOKENS, LAYERS = 8, 256, 2
POLICIES = ("offload", "auto", "minimal")
LENGTHS = (8192, 32768, 131072)
DEVICES = (8, 64, 1024)
SHOWN = (DEVICES[0], DEVICES[-1])
"""Sizes of jobs, and those on the page; its table of nodes is the first model at the second length under ``auto``."""
UNITS = 4
"""Storages that a block of a simulated job offloads, all alike."""

REACHED = 0.6
"""Part of the peak rates that the kernels of a simulated job reach."""

DISTURBANCES = ("none", "block times vary by 5 %", "one device 10 % slower", "one host at a quarter of its memory rate")
DIGEST_BYTES = len(hashlib.sha256().hexdigest())
"""What a rank reads of each other rank that was told the same."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder with gated feed-forward blocks and grouped queries.

    Attributes:
        name: As people call it.
        hidden: Width.
        inner: Width of the feed-forward part.
        heads: Query heads of 128.
        kv_heads: Key and value heads.
        layers: Blocks.
    """

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int

    def shrunk(self) -> Any:
        """Return a network of these proportions, at an eighth of the width, with few blocks and words."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            hidden_size=self.hidden // SHRUNK, intermediate_size=self.inner // SHRUNK, head_dim=128 // SHRUNK,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, num_hidden_layers=LAYERS,
            vocab_size=128, max_position_embeddings=TOKENS, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).to(torch.bfloat16)

    def forward_seconds(self, tokens: int, machine: Machine) -> float:
        """Return the time of one block's forward on one sequence, at the machine's peak rates."""
        rows = self.hidden * (2 * self.heads + 2 * self.kv_heads) * 128 + 3 * self.hidden * self.inner
        linear = 2.0 * tokens * rows
        attention = 2.0 * tokens * tokens * self.heads * 128  # causal: half of the pairs, two products
        return linear / machine.flop_per_second + attention / machine.attention_flop_per_second


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node.

    Attributes:
        name: As people call it.
        ranks: Devices.
        host_bytes: Memory of the host.
        flop_per_second: Matrix products in bfloat16, of one device.
        attention_flop_per_second: Causal attention forward, of one device.
        out_bytes_per_second: Copies from a device to the host, all devices at once.
        host_bytes_per_second: The host's memory, all channels.
    """

    name: str
    ranks: int
    host_bytes: float
    flop_per_second: float
    attention_flop_per_second: float
    out_bytes_per_second: float
    host_bytes_per_second: float

    @property
    def link_bytes_per_second(self) -> float:
        """Rate of one device when all devices of the node copy at once: its link, or its share of the host's memory."""
        return min(self.out_bytes_per_second, self.host_bytes_per_second / self.ranks)


MODELS = (
    Model(name="Qwen3-8B", hidden=4096, inner=12288, heads=32, kv_heads=8, layers=36),
    Model(name="Qwen3-32B", hidden=5120, inner=25600, heads=64, kv_heads=8, layers=64),
)
MACHINES = (
    Machine(
        name="8 x H200", ranks=8, host_bytes=2 * 2**40, flop_per_second=790e12, attention_flop_per_second=616e12,
        out_bytes_per_second=52.8e9, host_bytes_per_second=921e9,
    ),
    Machine(
        name="GH200", ranks=1, host_bytes=480 * 2**30, flop_per_second=828e12, attention_flop_per_second=616e12,
        out_bytes_per_second=300e9, host_bytes_per_second=500e9,
    ),
)  # fmt: skip


def counted(model: Model) -> dict[str, float]:
    """Return the bytes that each policy moves in its first step, per token and block, as the engine counts them.

    Later steps depend on what this machine measures: ``minimal`` checkpoints every other block to compare the times.
    """
    network = model.shrunk()
    ids = torch.randint(0, 128, (1, TOKENS))
    found: dict[str, float] = {}
    for policy in POLICIES:
        with ebbtide.enable_activation_offloading(network, policy=policy, min_bytes=0) as handle:
            network(input_ids=ids, labels=ids).loss.backward()
            found[policy] = handle.stats().offloaded_bytes / TOKENS / LAYERS * SHRUNK
    return found


def counts(moved: dict[str, dict[str, float]]) -> list[str]:
    """Return the table of counted bytes.

    Args:
        moved: Model name → policy → bytes per token and block.
    """
    lines = ["Bytes moved per token and block in the first step, counted:", ""]
    lines += ["| model | " + " | ".join(f"`{p}`" for p in POLICIES) + " |", "| --- |" + " ---: |" * len(POLICIES)]
    return lines + [
        f"| {name} | " + " | ".join(f"{by[p] / 1e3:.1f} kB" for p in POLICIES) + " |" for name, by in moved.items()
    ]


def tables(moved: dict[str, dict[str, float]]) -> str:
    """Return the tables of the page; ``moved`` as for ``counts``."""
    lines = ["Host memory of one rank; a node's is that times its ranks:", ""]
    lines += ["| model | tokens a rank | " + " | ".join(f"`{p}`" for p in POLICIES) + " |", "| --- |" + " ---: |" * 4]
    for model in MODELS:
        for tokens in LENGTHS:
            sizes = [f"{moved[model.name][p] * tokens * model.layers / 2**30:.0f} GiB" for p in POLICIES]
            lines.append(f"| {model.name} | {tokens // 1024}k | " + " | ".join(sizes) + " |")
    shares = {each: _hidden(*each, moved[each[1].name]) for each in product(MACHINES, MODELS, LENGTHS)}
    shown = [n for n in range(len(POLICIES)) if any(found[n] < 1 for found in shares.values())]
    rest = " and ".join(f"`{p}`" for n, p in enumerate(POLICIES) if n not in shown)
    head = ["machine", "model", "tokens a rank", *(f"`{POLICIES[n]}`" for n in shown)]
    lines += [
        "",
        "Share of the copy-outs that fits behind forward at peak rates; all do"
        f"{f' under {rest}, and' * bool(rest)} where no row is:",
        "",
    ]
    lines += ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(shown) + 1)]
    for (machine, model, tokens), found in shares.items():
        cells = [machine.name, model.name, f"{tokens // 1024}k", *(f"{100 * found[n]:.0f} %" for n in shown)]
        lines += ["| " + " | ".join(cells) + " |"] if min(found) < 1 else []
    return "\n".join([*lines, "", *_jobs(moved[MODELS[0].name]["auto"] * LENGTHS[1] * MODELS[0].layers)])


def _jobs(rank_bytes: float) -> list[str]:
    """Return the table of nodes, and what a job on them takes, whose ranks each move ``rank_bytes``."""
    what = f"{MODELS[0].name} on {LENGTHS[1] // 1024}k tokens a rank under `auto`"
    lines = [f"A node that trains {what}, all its devices copying at once:", ""]
    lines += ["| machine | host memory | link per rank | share of the host's memory rate |", "| --- |" + " ---: |" * 3]
    for machine in MACHINES:
        link = machine.link_bytes_per_second
        cells = [
            machine.name, f"{rank_bytes * machine.ranks / 2**30:.0f} GiB", f"{link / 1e9:.0f} GB/s",
            f"{100 * link * machine.ranks / machine.host_bytes_per_second:.0f} %",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    job = f"A job on {SHOWN[-1]} devices takes {rank_bytes * SHOWN[-1] / 2**40:.1f} TiB"
    read = f"{SHOWN[-1] * DIGEST_BYTES / 1024:.1f} KiB"
    return [*lines, "", f"{job} on all nodes together, and when offloading is enabled a rank reads {read}."]


def _hidden(machine: Machine, model: Model, tokens: int, bytes_per_token: dict[str, float]) -> list[float]:
    """Return the share of each policy's copies that the forward hides."""
    seconds = model.forward_seconds(tokens, machine)
    blocks = [bytes_per_token[policy] * tokens for policy in POLICIES]
    return [min(1.0, seconds / (block / machine.link_bytes_per_second)) for block in blocks]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A simulated job: its machine and policy, the links of its devices, and any disturbance."""

    machine: str
    link: str
    policy: str
    disturbance: str


def jobs() -> Iterator[Job]:
    """Yield the rows of the table of simulated jobs."""
    for machine in MACHINES:
        for link in ("its own", "one for two") if machine.ranks > 1 else ("its own",):
            for policy in POLICIES if machine.ranks > 1 else POLICIES[:2]:
                for disturbance in DISTURBANCES if policy == "auto" else DISTURBANCES[:1]:
                    yield Job(machine=machine.name, link=link, policy=policy, disturbance=disturbance)


def slowdown(job: Job, devices: int, bytes_per_token: float) -> float:
    """Return by how much offloading slows a step of the first model at the second length, simulated.

    Args:
        job: The job.
        devices: Its ranks.
        bytes_per_token: Bytes that the policy moves, per token and block.

    Returns:
        The slowest rank's step ÷ the same step, equally disturbed, in which everything is kept; minus one.
    """
    machine = next(each for each in MACHINES if each.name == job.machine)
    model, tokens = MODELS[0], LENGTHS[1]
    rate = machine.out_bytes_per_second
    hosts = [machine.host_bytes_per_second] * (devices // machine.ranks)
    hosts[0] /= 4 if job.disturbance == DISTURBANCES[3] else 1
    pairs = 2 if job.link == "one for two" else 1
    nodes = Nodes(
        ranks=machine.ranks, host_bytes_per_second=tuple(hosts), devices_a_switch=pairs, switch_bytes_per_second=rate
    )
    units = tuple(
        Unit(site=Site("Block", "", "", number), nbytes=round(bytes_per_token * tokens / UNITS))
        for number in range(UNITS)
    )
    seconds = model.forward_seconds(tokens, machine) / REACHED
    block = BlockProfile(name="", kind="Block", forward_seconds=seconds, backward_seconds=2 * seconds, units=units)
    draw = random.Random(0)
    profiles = [
        Profile(
            blocks=tuple(_disturbed(block, job, rank, draw) for _ in range(model.layers)),
            rates=Rates(out_bytes_per_second=rate, in_bytes_per_second=rate),
        )
        for rank in range(devices)
    ]
    kept, offloaded = (
        max(simulate_ranks(profiles, [[action] * UNITS] * model.layers, nodes))
        for action in (Action.KEEP, Action.OFFLOAD)
    )
    return offloaded / kept - 1


def _disturbed(block: BlockProfile, job: Job, rank: int, draw: random.Random) -> BlockProfile:
    """Return a block with its times on a rank."""
    factor = 1.0
    if job.disturbance == DISTURBANCES[1]:
        factor = max(0.8, draw.gauss(1.0, 0.05))
    elif job.disturbance == DISTURBANCES[2] and rank == 1:
        factor = 1.1
    return replace(
        block, forward_seconds=block.forward_seconds * factor, backward_seconds=block.backward_seconds * factor
    )


def simulated(moved: dict[str, dict[str, float]]) -> list[dict[str, str | float]]:
    """Simulate every job at every size; return rows of a job and its slowdowns by number of devices."""
    rows: list[dict[str, str | float]] = []
    for job in jobs():
        by_size = {f"{n}": slowdown(job, n, moved[MODELS[0].name][job.policy]) for n in DEVICES}
        rows.append({**asdict(job), **by_size})
        print(rows[-1], flush=True)
    return rows


def together(rows: list[dict[str, str | float]]) -> str:
    """Return the table of simulated jobs; a machine on which no job takes longer is a sentence."""
    head = ["machine", "link", "policy", "disturbance", *(f"{n} devices" for n in SHOWN)]
    lines = [
        "[Simulated](#the-simulation): how much longer a step takes than one that keeps everything, equally disturbed:",
        "",
    ]
    lines += ["| " + " | ".join(head) + " |", "| --- | --- | --- | --- |" + " ---: |" * len(SHOWN)]
    sentences: list[str] = []
    for machine, group in groupby(rows, lambda row: str(row["machine"])):
        its = list(group)
        found = [[f"{100 * abs(round(float(row[f'{n}']), 4)):.1f} %" for n in SHOWN] for row in its]
        if {cell for cells in found for cell in cells} == {"0.0 %"}:
            policies = " and ".join(f"`{name}`" for name in dict.fromkeys(row["policy"] for row in its))
            sentences.append(f"On {machine}, {policies} took 0.0 % longer, disturbed or not.")
            continue
        for row, cells in zip(its, found, strict=True):
            about = [machine, str(row["link"]), f"`{row['policy']}`", str(row["disturbance"])]
            lines.append("| " + " | ".join([*about, *cells]) + " |")
    return "\n".join([*lines, *(["", *sentences] if sentences else [])])


def main() -> None:
    """Count, compute and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--page", action="store_true", help="also write the tables of docs/concepts/scaling.md")
    given = parser.parse_args()
    moved = {model.name: counted(model) for model in MODELS}
    steps = simulated(moved)
    rows = f"{tables(moved)}\n\n{together(steps)}"
    print(rows)
    result = {
        "suite": "scaling",
        "bytes_per_token_and_block": moved,
        "jobs": steps,
        "machines": [asdict(m) for m in MACHINES],
        "models": [asdict(m) for m in MODELS],
    }
    folder = given.out or result_folder("scaling")
    text = "\n".join(["# Bytes that each policy moves", "", *counts(moved), "", COMPUTED, ""])
    write_result(folder, json.loads(json.dumps(result)), text)
    if given.page:
        PAGE.write_text(with_tables(PAGE.read_text(), BEGIN, END, rows))
    print(f"\nwritten to {folder}")


if __name__ == "__main__":
    main()

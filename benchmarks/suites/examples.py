"""What the 8B scripts of examples/ need of a node, before and after: planned, from bytes that the engine counts.

Like ``scaling``, whose model, machine and arithmetic it uses: blocks of Qwen3-8B's proportions run on
the CPU at an eighth of its width, all weights trained or adapters alone, plainly, with the model's own checkpointing
and under ebbtide's policies; the engine counts what each leaves on the device and what it moves. Nothing was timed.

    python -m benchmarks.suites.examples [--out DIR] [--page]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import ebbtide
from benchmarks.results_folder import parser_of, result_folder, with_tables, write_result
from benchmarks.suites.scaling import LAYERS, MACHINES, MODELS, SHRUNK, TOKENS

PAGE = Path(__file__).parents[2] / "examples" / "README.md"
COMPUTED = "../../../examples/README.md#before-and-after-planned"
BEGIN, END = "<!-- table: written by benchmarks/suites/examples.py -->", "<!-- end of the table -->"
MODEL, MACHINE = MODELS[0], MACHINES[0]
VOCABULARY = 151936
MODES = {"plain": "keep", "checkpointing": "keep", "ebbtide": "auto", "ebbtide, both flags": "minimal"}
"""What the two flags mean, and the policy that counts it."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A script.

    Attributes:
        script: Its file.
        adapters: Whether adapters alone are trained.
        ranks: Devices.
        tokens: Length of a sequence; each rank has one.
    """

    script: str
    adapters: bool
    ranks: int
    tokens: int

    def state_bytes(self) -> float:
        """Return weights, gradients and AdamW's moments of one rank, in bfloat16 and sharded; adapters are left out."""
        block = MODEL.hidden * (2 * MODEL.heads + 2 * MODEL.kv_heads) * 128 + 3 * MODEL.hidden * MODEL.inner
        weights = MODEL.layers * block + 2 * VOCABULARY * MODEL.hidden
        return weights * (2 if self.adapters else 8) / self.ranks


EXAMPLES = (
    Example(script="8b-full.sh", adapters=False, ranks=8, tokens=8192),
    Example(script="8b-lora.sh", adapters=True, ranks=2, tokens=4096),
    Example(script="long-context.sh", adapters=True, ranks=8, tokens=32768),
)


def counted(*, adapters: bool) -> dict[str, dict[str, float]]:
    """Return mode → bytes per token and block: what stays on the device, and what is moved."""
    from peft import LoraConfig, get_peft_model

    ids = torch.randint(0, 128, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    found: dict[str, dict[str, float]] = {}
    for mode, policy in MODES.items():
        network = MODEL.shrunk()
        if adapters:
            network = get_peft_model(
                network, LoraConfig(r=8, target_modules="all-linear"), autocast_adapter_dtype=False
            )
            network.enable_input_require_grads()
        if mode == "checkpointing":
            network.activation_checkpointing_enable({"use_reentrant": False})
        network.train()
        with ebbtide.enable_activation_offloading(network, policy=policy, min_bytes=0) as handle:
            for _ in range(2):
                network(input_ids=ids, labels=ids).loss.backward()
            stats = handle.stats()
        scale = SHRUNK / TOKENS / LAYERS
        found[mode] = {"stays": stats.kept_bytes * scale, "moved": stats.offloaded_bytes * scale}
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the tables of the page: the bytes that stay under each mode, and those that the offloading modes move.

    Args:
        found: ``"full"`` or ``"adapters"`` → what ``counted`` returned.
    """
    stays = ["| script | tokens a rank | weights and states | " + " | ".join(MODES) + " |", "| --- |" + " ---: |" * 6]
    moves = ["| script | mode | moved | host, a node | hidden |", "| --- | --- | ---: | ---: | ---: |"]
    for example in EXAMPLES:
        script, modes = f"[{example.script}]({example.script})", found["adapters" if example.adapters else "full"]
        blocks = example.tokens * MODEL.layers
        sizes = [example.state_bytes(), *(of_one["stays"] * blocks for of_one in modes.values())]
        cells = [script, f"{example.tokens // 1024}k", *(f"{size / 2**30:.1f} GiB" for size in sizes)]
        stays.append("| " + " | ".join(cells) + " |")
        rate = min(MACHINE.out_bytes_per_second, MACHINE.host_bytes_per_second / example.ranks)
        forward = MODEL.forward_seconds(example.tokens, MACHINE) * MODEL.layers
        for mode, moved in ((mode, of_one["moved"] * blocks) for mode, of_one in modes.items() if of_one["moved"]):
            hidden = f"{100 * min(1.0, forward / (moved / rate)):.0f} %"
            node = f"{moved * example.ranks / 2**30:.0f} GiB"
            moves.append(f"| {script} | {mode} | {moved / 2**30:.1f} GiB | {node} | {hidden} |")
    return "\n".join([*stays, "", *moves])


def counts(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the README of a results folder: the counted bytes; ``found`` as for ``table``."""
    lines = [
        "# Bytes kept and moved by the 8B scripts",
        "",
        f"Counted bytes per token and block; [Examples]({COMPUTED}) has the tables computed from them, at rates of "
        f"{MACHINE.name}.",
        "",
        "| trained | mode | stay | are moved |",
        "| --- | --- | ---: | ---: |",
    ]
    for trained, modes in found.items():
        lines += [
            f"| {trained} | {m} | {b['stays'] / 1e3:.1f} kB | {b['moved'] / 1e3:.1f} kB |" for m, b in modes.items()
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Count, compute and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--page", action="store_true", help="also write the table of examples/README.md")
    given = parser.parse_args()
    found = {"full": counted(adapters=False), "adapters": counted(adapters=True)}
    rows = table(found)
    print(rows)
    folder = given.out or result_folder("examples")
    write_result(folder, {"suite": "examples", "bytes_per_token_and_block": found}, counts(found))
    if given.page:
        PAGE.write_text(with_tables(PAGE.read_text(), BEGIN, END, rows))
    print(f"\nwritten to {folder}")


if __name__ == "__main__":
    main()

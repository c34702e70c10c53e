"""What a saved tensor costs the host under each action: µs of pack and unpack together.

A chain of element-wise operators saves one tensor each. The same chain runs without hooks, with hooks that do nothing,
and under the engine with every tensor light (below ``min_bytes``), kept, offloaded, or recomputed; all variants run in
turn, so that other load on the machine affects each. Gradients are first compared with the plain chain's: no number on
a red gate. Tensors are small, so that the bookkeeping is what is timed and not the bytes. On a device the chain's
kernels are enqueued behind one another and waited for at the end. The window there is far below what the chain saves,
and the suite checks that every pass copies the rest; a pass that fits into the window is held back entirely and has its
own row. Without an accelerator, "host memory" is offloading over a device whose streams and events do nothing. Then
steps of two small models are timed under four modes in turn. Where py-spy is installed, it shows which lines take the
time.

    python -m benchmarks.suites.overhead [--pairs 30] [--out DIR]
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.case import synchronize
from benchmarks.cases import device_name
from benchmarks.frames import shares
from benchmarks.nodevice import NoDevice
from benchmarks.results_folder import parser_of, result_folder, summary, write_result
from benchmarks.small_steps import SMALL_MODELS, SPY_SECONDS, small_steps
from ebbtide.base.events import Bus
from ebbtide.config import Keep, Minimal, Offload, Options, Policy
from ebbtide.engine import Block, Engine
from ebbtide.planner import plan_for
from ebbtide.store import open_tier
from ebbtide.store.host import HostTier
from ebbtide.store.protocol import Tier
from ebbtide.wrap.hooks import offloading

SAVED = 200
"""Operators in the chain, hence saved tensors."""

SHAPE = (64, 64)

WINDOW_BYTES = 64 * 1024

LINES_OF = ("keep", "recompute", "offload, host memory", "offload")

Scope = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One mode of running the chain.

    Attributes:
        scope: Open its hooks.
        engine: The engine behind them, if any.
        least_bytes: Bytes that every pass must copy out; with fewer, the row's label would be wrong.
    """

    scope: Scope
    engine: Engine | None = None
    least_bytes: int = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return the chain's gradient; raise ``SystemExit`` if too little was copied out."""
        before = self.copied_bytes()
        found = chain(x, self.scope())
        if (copied := self.copied_bytes() - before) < self.least_bytes:
            raise SystemExit(f"a pass copied {copied} bytes out, not {self.least_bytes}: no number for offload")
        return found

    def copied_bytes(self) -> int:
        """Return what was copied out so far."""
        return 0 if self.engine is None else self.engine.tier.counters.out_bytes


def chain(x: torch.Tensor, scope: AbstractContextManager[object]) -> torch.Tensor:
    """Return the gradient of a chain of operators that each save their input."""
    leaf = x.detach().requires_grad_()
    with scope:
        y = leaf
        for _ in range(SAVED):
            y = torch.sin(y)
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    return gradient


@contextmanager
def under(engine: Engine) -> Generator[None]:
    """Run one pass of one block under the engine."""
    engine.begin_pass()
    with offloading(engine, Block(name="chain", kind="chain", index=0, count=1, weights=tuple), []):
        yield
    engine.end_pass()


def variants() -> dict[str, Variant]:
    """Return every variant by the name of its row."""

    def engine(
        policy: Policy,
        min_bytes: int,
        window_bytes: int | None = WINDOW_BYTES,
        least_bytes: int = 0,
        tier: Tier | None = None,
    ) -> Variant:
        options = Options(min_bytes=min_bytes, window_bytes=window_bytes)
        made = Engine(plan_for(policy), tier or open_tier("auto"), options, Bus())
        return Variant(scope=lambda: under(made), engine=made, least_bytes=least_bytes)

    found = {
        "no hooks": Variant(scope=nullcontext),
        "empty hooks": Variant(scope=lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t)),
        "light": engine(Keep(), 1 << 20),
        "keep": engine(Keep(), 0),
        "recompute": engine(Minimal(), 0),
    }
    least_bytes = SAVED * SHAPE[0] * SHAPE[1] * torch.float32.itemsize - WINDOW_BYTES
    if torch.accelerator.is_available():
        found["offload"] = engine(Offload(), 0, least_bytes=least_bytes)
        found["offload, held back"] = engine(Offload(), 0, None)
    else:  # the disk tier copies at once and cancels copies that are not needed
        found["offload, host memory"] = engine(Offload(), 0, least_bytes=least_bytes, tier=HostTier(NoDevice()))
        found["offload, disk"] = engine(Offload(), 0)
    return found


def measure(pairs: int) -> tuple[dict[str, list[float]], dict[str, Counter[str]]]:
    """Return µs per saved tensor of every variant, in every round; and samples by line of the busiest variants."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    modes, x = variants(), torch.linspace(0.1, 1.0, SHAPE[0] * SHAPE[1], device=device).view(SHAPE)
    expected = chain(x, nullcontext())
    for name, mode in modes.items():
        if not torch.equal(mode.run(x), expected):
            raise SystemExit(f"{name}: the gradient differs; no speed number on a red gate")
    found: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(pairs):
        for name, mode in modes.items():
            synchronize(device)
            started = time.perf_counter()
            mode.run(x)
            synchronize(device)
            found[name].append((time.perf_counter() - started) / SAVED * 1e6)
    lines = {
        name: sampled
        for name, mode in modes.items()
        if name in LINES_OF and (sampled := shares(lambda mode=mode: mode.run(x), SPY_SECONDS)) is not None
    }
    return found, lines


def by_line(samples: dict[str, list[float]], lines: dict[str, Counter[str]]) -> list[str]:
    """Return the lines that take most of a saved tensor's time, in µs."""
    rows: list[str] = []
    for name, sampled in lines.items():
        whole = statistics.median(samples[name]) / max(1, sampled.total())
        rest = sum(n for place, n in sampled.items() if not place.startswith("ebbtide/"))
        rows += [
            "",
            f"## Where {name} spends its time",
            "",
            f"Innermost Python lines, µs per saved tensor, as py-spy sees them; "
            f"torch's and the suite's own: {rest * whole:.1f}.",
            "",
            "| line | µs |",
            "| --- | ---: |",
            *(
                f"| `{place}` | {n * whole:.2f} |"
                for place, n in sampled.most_common(40)
                if place.startswith("ebbtide/")
            ),
        ]
    return rows


def of_small_models(pairs: int) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Return the ratios of steps of small models by model and mode, and their table."""
    rows = [
        "",
        "## Steps of small models",
        "",
        "Forward and backward, float32; the modes take steps in turn in one process. *Lines of ours*: the share of the",
        "step in which the innermost Python line is ebbtide's, with what it asks of torch.",
        "",
        "| model | mode | step / plain | quartiles | lines of ours |",
        "| --- | --- | ---: | --- | ---: |",
    ]
    ratios: dict[str, dict[str, list[float]]] = {}
    for model, (shape, tokens) in SMALL_MODELS.items():
        modes = small_steps(shape, tokens, pairs)
        ratios[model] = {mode: values for mode, (values, _) in modes.items()}
        for mode, (values, share) in modes.items():
            row, percent = summary(values), "–" if share is None else f"{share:.1%}"
            rows.append(f"| {model} | {mode} | ×{row['median']:.3f} | {row['q1']:.3f} … {row['q3']:.3f} | {percent} |")
    return ratios, rows


def main() -> None:
    """Measure, print and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    given = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    samples, lines = measure(given.pairs)
    torch.set_num_threads(threads)
    ratios, steps = of_small_models(given.pairs)
    base = statistics.median(samples["no hooks"])
    rows = ["| saved tensors are | µs per saved tensor above no hooks | quartiles |", "| --- | --- | --- |"]
    for name, values in samples.items():
        if name != "no hooks":
            row = summary([v - base for v in values])
            rows.append(f"| {name} | {row['median']:.1f} | {row['q1']:.1f} … {row['q3']:.1f} |")
    text = "\n".join(
        [
            "# What a saved tensor costs",
            "",
            f"A chain of {SAVED} `sin` on {SHAPE[0]} x {SHAPE[1]} float32, one thread; {device_name()}.",
            "`offload` includes a copy of 16 KiB out and in (to disk: a direct write and read), `recompute` one",
            "`sin`; a training step moves tensors of MiB, where the bytes count and this does not.",
            "",
            *rows,
            *steps,
            *by_line(samples, lines),
            "",
        ]
    )
    print(text)
    folder = given.out or result_folder("overhead")
    write_result(
        folder,
        {"suite": "overhead", "pairs": given.pairs, "us_per_saved_tensor": samples, "steps_over_plain": ratios},
        text,
    )
    print(f"written to {folder}")


if __name__ == "__main__":
    main()

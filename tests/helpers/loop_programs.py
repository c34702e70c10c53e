"""Training programs as plain data, and how hypothesis draws them.

[Note: a program]
A ``Program`` describes a model's parts and its training loop; ``tests.helpers.loops`` interprets it. Its ``repr`` is an
expression that recreates it: ``python -m tests.helpers.loops "Program(...)" "Setting(...)"`` repeats it. Peculiarities
begin *late*: a part behaves oddly from step ``step`` on and in blocks from ``block`` on, an event happens from step
``step`` on. A decision of the first step, or for the first block, is then out of date.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields

from hypothesis import strategies as st

PARTS = {
    "mlp": 5,
    "attention": 4,
    "norm": 5,
    "functional_norm": 6,
    "conv": 3,
    "made_weight": 6,
    "masked": 2,
    "frozen_merge": 2,
    "states": 7,
    "generators": 11,
    "memory": 4,
    "in_place": 6,
    "decay": 3,
    "clamped": 2,
    "data_write": 2,
    "copied": 3,
    "function": 4,
    "embedding": 3,
    "scheduled": 4,
    "dropout": 4,
    "cached": 3,
    "adapters": 4,
    "checkpointed": 4,
    "recurrent": 2,
    "routed": 2,
    "hooked": 4,
    "codebook": 3,
    "grown": 3,
    "straight_through": 2,
    "operators": 6,
    "tied": 2,
    "counted": 2,
    "regions": 6,
    "depth": 3,
}
"""Kinds of parts, and how many variants each has: ``tests/helpers/loop_parts.py``, ``loop_stateful.py``."""

LOOPS = (
    "plain", "accumulate", "two_forwards", "two_losses", "retained", "gan", "gan_d_first", "penalty", "functional",
    "fast_weights", "twin", "one_autocast", "head_first", "carried", "thread", "closure", "inside_autocast",
    "inputs_only", "interleaved",
)  # fmt: skip
"""Shapes of a training step: ``tests/helpers/loop_steps.py``."""

EVENTS = (
    "weight_noise", "noise_copied", "biases_changed_between", "ema_between", "ema_copied_between", "ema_steps",
    "data_assigned", "data_assigned_back", "frozen_between", "thawed_between", "freeze_biases", "freeze_norms",
    "freeze_weights", "freeze_blocks", "freeze_all_but_biases", "swapped_parameters", "switched",
    "switched_between", "merged_between", "merged_steps", "matmul_precision", "conv_precision", "fp32_precision",
    "deterministic", "default_dtype", "sdpa", "eval_between", "train_between", "inference_between", "disabled",
    "closed_between", "disabled_between", "dropped", "failed_forward", "clipped", "zeroed", "loaded",
    "loaded_between", "copied_model", "hook_added", "eval_from", "reversed", "input_changed_between",
    "buffers_changed_between", "mode_between", "seeded_between", "stepped_between", "tf32_asked", "bf16_from",
    "grads_off_inside",
)  # fmt: skip
"""What happens around a step: ``tests/helpers/loop_events.py``."""

OPTIMIZERS = (
    "sgd", "sgd_momentum", "sgd_fused", "adamw", "adamw_foreach", "adamw_fused", "adagrad_fused", "adafactor", "rprop",
    "in_backward", "in_backward_fused", "lbfgs",
)  # fmt: skip
TRAINS = (
    "all",
    "all",
    "all",
    "biases",
    "no_biases",
    "no_norms",
    "no_stem",
    "no_stem",
    "last_block",
    "first_block",
    "adapters",
    "weights",
)
CALLS = ("stack", "stack", "stack", "stack", "twice", "shared", "skipping", "reversing", "by_name")
PRECISIONS = ("fp32", "fp32", "autocast", "bf16")
POLICIES = ("auto", "auto_relaxed", "minimal", "ckpt", "offload", "inputs", "keep", "drawn", "checkpoint")


class Short:
    """Its ``repr`` shows only the fields that differ from the defaults."""

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name), f.default) for f in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v, default in given if v != default)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Part(Short):
    """A piece of every block.

    Attributes:
        kind: A key of ``PARTS``.
        variant: Number of its variant.
        block: The first block in which it is peculiar.
        step: The first step in which it is.
    """

    kind: str
    variant: int = 0
    block: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Event(Short):
    """Something that happens around steps.

    Attributes:
        kind: One of ``EVENTS``.
        step: The first step in which it does.
        every: Interval in steps from then on.
    """

    kind: str
    step: int = 0
    every: int = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Program(Short):
    """A model and its training loop. See [Note: a program].

    Attributes:
        parts: The parts of each block, in order.
        loop: One of ``LOOPS``.
        loop_step: The first step of this shape; earlier ones are plain.
        optimizer: One of ``OPTIMIZERS``.
        trains: Which parameters require gradients; the optimizer has these.
        events: The events around the steps.
        precision: One of ``PRECISIONS``.
        calls: How the model calls its blocks.
        blocks: Number of blocks.
        lengths: Lengths of the sequences, in turn; even numbers.
        steps: Number of steps.
        input_grads: The batch requires gradients.
        seed: Seed of weights and data.
    """

    parts: tuple[Part, ...] = (Part(kind="mlp"),)
    loop: str = "plain"
    loop_step: int = 0
    optimizer: str = "sgd"
    trains: str = "all"
    events: tuple[Event, ...] = ()
    precision: str = "fp32"
    calls: str = "stack"
    blocks: int = 2
    lengths: tuple[int, ...] = (4,)
    steps: int = 3
    input_grads: bool = False
    seed: int = 0

    @property
    def features(self) -> set[str]:
        """Names of everything in it: kinds with their variants, events, loop, optimizer, calls, precision."""
        named = {f"loop:{self.loop}", f"optimizer:{self.optimizer}", f"calls:{self.calls}", f"trains:{self.trains}"}
        named |= {f"part:{p.kind}" for p in self.parts} | {f"part:{p.kind}:{p.variant}" for p in self.parts}
        if self.optimizer.startswith("in_backward") and self.loop in ("retained", "interleaved"):
            named.add("stepped between backwards")
        return named | {f"event:{e.kind}" for e in self.events} | {f"precision:{self.precision}"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Setting(Short):
    """Ebbtide's settings.

    Attributes:
        policy: One of ``POLICIES``. ``"drawn"`` draws an action for every site, ``"checkpoint"`` checkpoints every
            block.
        verify: As in ``enable_activation_offloading``.
        salt: Seed of the drawn actions.
    """

    policy: str = "offload"
    verify: bool = False
    salt: int = 0

    @property
    def recomputes(self) -> bool:
        """Whether it may recompute a tensor."""
        return self.policy not in ("offload", "inputs", "keep")

    @property
    def checkpoints(self) -> bool:
        """Whether it may checkpoint a block."""
        return self.policy in ("auto", "auto_relaxed", "minimal", "ckpt", "checkpoint")


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Draw a part."""
    kind = draw(st.sampled_from(tuple(PARTS)))
    return Part(
        kind=kind,
        variant=draw(st.integers(0, PARTS[kind] - 1)),
        block=draw(st.sampled_from((0, 0, 1, 2))),
        step=draw(st.sampled_from((0, 0, 1, 2, 4))),
    )


@st.composite
def events(draw: st.DrawFn) -> Event:
    """Draw an event."""
    return Event(
        kind=draw(st.sampled_from(EVENTS)),
        step=draw(st.sampled_from((0, 1, 2, 4))),
        every=draw(st.sampled_from((1, 1, 2, 3))),
    )


@st.composite
def programs(draw: st.DrawFn, *, most: int = 3) -> Program:
    """Draw a program.

    Args:
        draw: Hypothesis'.
        most: Most parts of a block, and most events.
    """
    known = OPTIMIZERS + (("bnb_adamw8bit",) if importlib.util.find_spec("bitsandbytes") else ())
    return Program(
        parts=tuple(draw(st.lists(parts(), min_size=1, max_size=most))),
        loop=draw(st.sampled_from(("plain", "plain", "plain", *LOOPS))),
        loop_step=draw(st.sampled_from((0, 0, 0, 1, 2))),
        optimizer=draw(st.sampled_from(known)),
        trains=draw(st.sampled_from(TRAINS)),
        events=tuple(draw(st.lists(events(), max_size=most))),
        precision=draw(st.sampled_from(PRECISIONS)),
        calls=draw(st.sampled_from(CALLS)),
        blocks=draw(st.sampled_from((2, 3))),
        lengths=tuple(draw(st.lists(st.sampled_from((2, 4, 6)), min_size=1, max_size=3))),
        steps=draw(st.sampled_from((3, 7))),
        input_grads=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def settings_of_ebbtide(draw: st.DrawFn) -> Setting:
    """Draw ebbtide's settings."""
    policy = draw(st.sampled_from(POLICIES))
    salt = draw(st.integers(0, 20)) if policy in ("drawn", "checkpoint") else 0
    return Setting(policy=policy, verify=draw(st.sampled_from((False, False, False, True))), salt=salt)

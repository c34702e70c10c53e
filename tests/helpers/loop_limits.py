"""Where ebbtide may differ from ordinary training: the documented limits, each by name.

A limit is a debt. ``tests/property/test_training_loops.py`` runs the example of each and fails when the limit does not
show: then delete it here and in ``docs/concepts/correctness.md`` or ``docs/reference/rare-limits.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.helpers.loop_programs import Event, Part, Program, Setting


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Something that ordinary training allows.

    Attributes:
        name: What it is, in the words of the documentation.
        features: A program with one of them may meet it.
        applies: Whether a program may meet it under a setting.
        errors: Names of the errors that ebbtide may raise; empty: gradients may differ without an error.
        example: A program that meets it.
        setting: The setting under which it does.
    """

    name: str
    features: frozenset[str]
    applies: Callable[[Program, Setting], bool]
    errors: frozenset[str] = frozenset()
    example: Program
    setting: Setting


WEIGHTS_CHANGE = frozenset(
    {
        "event:biases_changed_between",
        "event:noise_copied",
        "event:loaded_between",
        "event:ema_copied_between",
        "event:stepped_between",
        "event:weight_noise",
        "event:merged_between",
        "stepped between backwards",
        "loop:two_losses",
        "loop:gan_d_first",
        "part:embedding:0",
        "part:embedding:2",
    }
)
"""What changes weights after they were used and before backward is done with them."""

MODIFIED = frozenset({"ModifiedInPlaceError"})

LIMITS: tuple[Limit, ...] = (
    Limit(
        name="a recipe reads a weight that plain autograd did not save, and it was changed in place",
        features=WEIGHTS_CHANGE,
        applies=lambda program, setting: setting.recomputes or "autocast" in program.precision + program.loop,
        errors=MODIFIED,
        example=Program(events=(Event(kind="biases_changed_between"),)),
        setting=Setting(policy="minimal"),
    ),
    Limit(
        name="a block that is re-run whole needs its weights, buffers and inputs as they were",
        features=WEIGHTS_CHANGE
        | {
            "event:buffers_changed_between",
            "event:train_between",
            "event:input_changed_between",
            "event:eval_between",
            "event:inference_between",
            "part:grown:2",
            "part:codebook:0",
            "part:codebook:2",
            "part:decay",
            "part:memory:2",
        },
        applies=lambda program, setting: setting.checkpoints,
        errors=MODIFIED,
        example=Program(parts=(Part(kind="codebook", step=9),), events=(Event(kind="buffers_changed_between"),)),
        setting=Setting(policy="checkpoint"),
    ),
    Limit(
        name="what nobody saved is changed without a trace in forward, later than in the step of the comparison",
        features=frozenset({"part:clamped", "part:decay", "part:data_write", "part:codebook:2"}),
        applies=lambda program, setting: setting.recomputes,
        errors=frozenset({"RestoreError"}),
        example=Program(parts=(Part(kind="clamped", step=2),), steps=4),
        setting=Setting(policy="minimal"),
    ),
    Limit(
        name="a write through .data counts no version: of two operators that save the tensor, one sees the other's",
        features=frozenset({"part:data_write", "part:codebook:2"}),
        applies=lambda program, setting: True,
        example=Program(parts=(Part(kind="data_write"),)),
        setting=Setting(policy="minimal"),
    ),
)


def excuse(program: Program, setting: Setting, error: str | None) -> str:
    """Return ``excused: <limit>`` if a documented limit may explain the outcome; else an empty text.

    Args:
        program: The program that was trained.
        setting: Ebbtide's settings.
        error: Name of an error where ordinary training trains; None: values differ.
    """
    for limit in LIMITS:
        wanted = error in limit.errors if error is not None else not limit.errors
        if wanted and limit.applies(program, setting) and limit.features & program.features:
            return f"excused: {limit.name}"
    return ""

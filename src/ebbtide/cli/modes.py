"""The modes of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Mode:
    """What a mode of ``ebbtide compare`` changes in a run.

    Attributes:
        does: Its description.
        does_to_script: Its description for scripts, if that differs.
        offload: Value of a recipe's flag ``--activation_cpu_offload``.
        checkpointing: Value of a recipe's flag ``--gradient_checkpointing``.
        ordinary: It is ordinary training as users have it.
        variables: Environment variables besides the caller's.
    """

    does: str
    does_to_script: str = ""
    offload: bool = False
    checkpointing: bool = False
    ordinary: bool = False
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


MODES: dict[str, Mode] = {
    "plain": Mode(does="ordinary training", does_to_script="the unchanged script", ordinary=True),
    "checkpointing": Mode(
        does="the trainer's own activation checkpointing",
        does_to_script="with activation checkpointing: the model's own switch, else around its blocks",
        checkpointing=True,
    ),
    "ebbtide": Mode(
        does="the policy Auto, unless --policy names another", does_to_script="the policy Auto", offload=True
    ),
    "ebbtide-minimal": Mode(
        does="the policy Minimal: checkpointing's memory or less", offload=True, checkpointing=True
    ),
    "plain-again": Mode(does="ordinary training once more: what equal runs differ by", ordinary=True),
    "plain-malloc": Mode(
        does="ordinary training; glibc gives freed memory back at once",
        variables={"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"},
    ),
}
"""In display order. Scripts are switched by these names in ``ebbtide.script.switch``."""

"""Flags of ``ebbtide sft``. No torch here: the command line reads this module for ``--help``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ebbtide.base.errors import ConfigError
from ebbtide_recipes.language.config import LanguageConfig
from ebbtide_recipes.language.verl import GROUPS
from ebbtide_recipes.sft import verl
from ebbtide_recipes.skeleton.rules import at_least

ALIASES: Mapping[str, str] = {**verl.ALIASES, **LanguageConfig.aliases}
UNSUPPORTED: Mapping[str, str] = {
    **LanguageConfig.unsupported,
    **verl.UNSUPPORTED,
    "truncation_strategy": "--truncation: right, or error, which is raise; rows are never deleted or split",
}


@dataclass(frozen=True, kw_only=True)
class SftConfig(LanguageConfig):
    """Fine-tune a language or multimodal model; see where its activation memory goes.

    --activation_cpu_offload alone is ebbtide with the policy Auto, --gradient_checkpointing alone the trainer's own
    checkpointing, both together are ebbtide with the policy Minimal, neither is ordinary training.

    Attributes:
        dataset: Data set: builtin:pydoc, a .jsonl, .json or .parquet file, or a hub name, also as
            NAME:SUBSET:SPLIT, such as openai/gsm8k:main; NAME#1000 takes the first thousand rows. Several may be given.
        max_length: Tokens in a sequence; longer rows are cut.
        truncation: Cut longer rows at their end (right), or raise an error.
        packing: Concatenate rows and cut them into sequences of exactly max_length tokens; a token attends to the
            rows before its own.
        completion_only_loss: Learn only completions, or a chat's last answer; default: completions if rows have them,
            else everything.
        assistant_only_loss: Learn only the assistant's messages of chats, all of them; needs a chat template that marks
            them, or that TRL can mark.
        prompt_key: Column of the question, with --response_key: COLUMN or COLUMN.KEY; default: by the columns' names.
        response_key: Column of its answer.
        dataset_num_proc: Processes that tokenize rows.
        output_dir: Folder for the run file, training.log, checkpoints and the trained model.
    """

    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED
    granted: ClassVar[Mapping[str, tuple[str, ...]]] = verl.GRANTED
    aliases: ClassVar[Mapping[str, str]] = ALIASES
    translated: ClassVar[Mapping[str, str]] = verl.TRANSLATED
    translate = staticmethod(verl.translate)
    groups: ClassVar[Mapping[str, str]] = GROUPS
    page: ClassVar[str] = "docs/reference/sft-flags.md"
    always_ends: ClassVar[bool] = False  # a chat ends as its template does

    dataset: tuple[str, ...] = ("builtin:pydoc",)
    max_length: int = 1024
    truncation: Literal["right", "error"] = "right"
    packing: bool = False
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    prompt_key: str | None = None
    response_key: str | None = None
    dataset_num_proc: int | None = None
    output_dir: str = "runs/sft"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("max_length", self.max_length, 2, "1024 is the default; a token is learned from the one before it")
        if self.packing and self.truncation != "right":
            raise ConfigError(
                f"packing is true with truncation {self.truncation!r}",
                expected="rows that are not packed: packing cuts them wherever a sequence is full",
                hint="leave --truncation out, or --packing",
            )
        if (self.prompt_key is None) is not (self.response_key is None):
            name, other = ("prompt_key", "response_key")[:: 1 if self.response_key is None else -1]
            raise ConfigError(
                f"{name} is {getattr(self, name)!r} without {other}",
                expected="the column of the question and that of its answer",
                hint=f"--{other} COLUMN",
            )
        at_least("dataset_num_proc", self.dataset_num_proc, 1, "leave it out for one process")

    @property
    def pads(self) -> bool:
        """Whether sequences of a batch may differ in length: the last of packed ones is left out only in training."""
        return (self.per_device_train_batch_size > 1 and not self.packing) or (
            self.evaluates and self.per_device_eval_batch_size > 1
        )

    @property
    def learns_prompts(self) -> bool:
        """Whether prompts are learned before their completions: all of them, or their answers."""
        if self.completion_only_loss is None:
            return self.assistant_only_loss  # completions alone would leave the answers of prompts out
        return not self.completion_only_loss

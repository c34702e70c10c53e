"""The command line's names are frozen: scripts depend on them. ``make cli-surface`` rewrites them."""

from __future__ import annotations

import pytest

from ebbtide.cli import VERBS
from tests.contract.cli_surface import frozen, options

# Names that users of ms-swift and TRL know, and those of ebbtide's own first page.
PROMISED = {
    "model",
    "dataset",
    "activation_cpu_offload",
    "gradient_checkpointing",
    "max_slowdown",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "learning_rate",
    "max_length",
    "output_dir",
}


@pytest.fixture(autouse=True)
def _page(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "TERM"):  # set by options(): restored afterwards
        monkeypatch.setenv(name, "")


def test_verbs_are_frozen() -> None:
    assert sorted(VERBS) == sorted(frozen())


@pytest.mark.parametrize("verb", sorted(frozen()))
def test_option_names_are_frozen(verb: str) -> None:
    assert options(verb) == frozen()[verb]


def test_promised_names_are_there() -> None:
    assert set(frozen()["sft"]) >= PROMISED

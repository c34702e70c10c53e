"""Adapters of other kinds than LoRA, and existing adapters: trained, saved, resumed, also on models built empty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbtide.base.errors import ConfigError
from ebbtide_recipes.sft.recipe import main
from tests.integrations.ranks import sft_config

pytestmark = [
    # PEFT's own warnings.
    pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type .*Norm:UserWarning"),  # of LN_TUNING, which copies it
    # transformers loads a checkpoint's adapters over existing ones.
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
]

OURS = {"activation_cpu_offload": True}
EMPTY = {"memory_efficient_init": True}


def train(model: Path, folder: Path, /, **changes: object) -> dict[int, float]:
    main(sft_config(model, folder, **{"max_steps": 2, **changes}))
    events = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def values(folder: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    found = load_file(folder / "adapter_model.safetensors")
    return {name: value.numpy().tobytes() for name, value in found.items()}


@pytest.mark.parametrize(
    "kind", ["boft", "ia3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("vera", "ln_tuning"))]
)
def test_adapters_of_a_kind_train_alike_in_every_mode_and_go_on(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    of = {"train_type": "adapter", "adapter_config": kind}
    whole = train(tiny_model, tmp_path / "whole", **of, save_steps=1, save=True)
    assert len(set(whole.values())) == 2
    assert train(tiny_model, tmp_path / "ours", **of, **OURS) == whole
    assert train(tiny_model, tmp_path / "empty", **of, **EMPTY) == whole
    first = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-1")}
    assert train(tiny_model, tmp_path / "rest", **of, **first, save=True) == {2: whole[2]}
    assert values(tmp_path / "rest") == values(tmp_path / "whole")
    assert json.loads((tmp_path / "rest" / "adapter_config.json").read_text())["peft_type"] == kind.upper()
    with pytest.raises(ConfigError, match=f"written with adapters '{kind.upper()}', and this run has 'LOHA'"):
        train(tiny_model, tmp_path / "other", **{**of, "adapter_config": "loha"}, **first)


@pytest.mark.parametrize("efficient", [False, True])
def test_adapters_of_a_run_are_where_the_next_begins(tiny_model: Path, tmp_path: Path, efficient: bool) -> None:
    of = {"train_type": "lora", "lora_rank": 2, "memory_efficient_init": efficient}
    first = train(tiny_model, tmp_path / "first", **of, save=True)
    again = {"train_type": "lora", "adapters": str(tmp_path / "first"), "memory_efficient_init": efficient}
    second = train(tiny_model, tmp_path / "second", **again, **OURS, save=True)
    assert second[1] < first[1]  # the same rows, after learning
    before, after = values(tmp_path / "first"), values(tmp_path / "second")
    assert before.keys() == after.keys() and before != after
    settings = json.loads((tmp_path / "second" / "adapter_config.json").read_text())
    assert (settings["r"], settings["base_model_name_or_path"]) == (2, str(tiny_model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:bitsandbytes")
@pytest.mark.filterwarnings("ignore::FutureWarning:bitsandbytes")
def test_weights_in_four_bits_are_quantised_as_they_are_read(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    of = {"train_type": "qlora", "lora_rank": 2, "max_steps": 1}
    assert train(tiny_model, tmp_path / "empty", **of, **EMPTY) == train(tiny_model, tmp_path / "whole", **of)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:bitsandbytes")
@pytest.mark.filterwarnings("ignore::FutureWarning:bitsandbytes")
def test_adapters_on_weights_in_four_bits_keep_their_type_when_resumed(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    of = {"train_type": "qlora", "lora_rank": 2, "save_steps": 1}
    whole = train(tiny_model, tmp_path / "whole", **of)
    first = {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-1")}
    assert train(tiny_model, tmp_path / "rest", **of, **first) == {2: whole[2]}


def test_adapters_made_of_weights_need_the_weights(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "dora.json"
    file.write_text(json.dumps({"peft_type": "LORA", "r": 2, "use_dora": True, "target_modules": ["q_proj"]}))
    of = {"train_type": "adapter", "adapter_config": str(file)}
    assert len(train(tiny_model, tmp_path / "whole", **of)) == 2
    with pytest.raises(ConfigError, match="the model's weights.*\nhint: leave --memory_efficient_init out"):
        train(tiny_model, tmp_path / "empty", **of, **EMPTY)

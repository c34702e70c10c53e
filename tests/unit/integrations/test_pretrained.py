"""``from_pretrained`` without weights: folders that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.base.errors import ConfigError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_a_folder_of_an_adapter_is_refused(tmp_path: Path) -> None:
    from ebbtide.integrations.pretrained import weights_later

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with (
        pytest.raises(ConfigError, match=r"(?s)adapter of PEFT.*hint: .*base model.*PeftModel\.from_pretrained"),
        weights_later(),
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")

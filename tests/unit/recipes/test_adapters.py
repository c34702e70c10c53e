"""Which adapters are trained: by the name of a kind, by a file, or by a folder of trained ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BOFTConfig, LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.grpo.config import GrpoConfig
from ebbtide_recipes.language import adapters
from ebbtide_recipes.language.adapter_kinds import KINDS
from ebbtide_recipes.language.config import LanguageConfig
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.skeleton.precision import dtype_name

# PEFT asks a transformers model by the name that transformers 5.2x deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension:UserWarning"),  # of BOFT, which does without
    pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected that the base layer has no bias term:UserWarning"),  # of BEFT
    pytest.mark.filterwarnings("ignore:Unsupported layer type .*Norm:UserWarning"),  # of LN_TUNING, which copies it
]


def llama(device: str = "meta", *, tied: bool = False) -> LlamaForCausalLM:
    with torch.device(device):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=4,
                tie_word_embeddings=tied,
            )
        )


def adapter(**changes: Any) -> SftConfig:
    return SftConfig(train_type="adapter", **changes)


def written(folder: Path, content: object) -> str:
    (folder / "boft.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / "boft.json")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_fits_a_decoder_by_its_name_alone(kind: str) -> None:
    config = adapter(adapter_config=kind)
    adapters.check(config)
    made = adapters.chosen(config, llama())
    assert (made.peft_type, made.task_type) == (kind.upper(), "CAUSAL_LM")
    assert not made.is_prompt_learning


def adapted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_is_put_into_parts_that_are_left_out(kind: str) -> None:
    adapters.chosen(adapter(adapter_config=kind), model := llama(), without=["model.layers.1"])
    assert {name.partition("layers.")[2][:2] for name in adapted(model)} - {""} == {"0."}


@pytest.mark.parametrize("excluded", [["o_proj", "mlp.up_proj"], r".*\.(o_proj|up_proj)"])
def test_modules_that_a_file_excludes_stay_excluded_with_parts_that_are_left_out(
    tmp_path: Path, excluded: object
) -> None:
    config = adapter(adapter_config=written(tmp_path, {"peft_type": "LORA", "exclude_modules": excluded}))
    adapters.chosen(config, model := llama(), without=["model.layers.1"])
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
    assert adapted(model) == {f"model.layers.0.{part}" for part in parts}


def test_a_kind_that_cannot_exclude_is_put_on_the_named_modules_outside(tmp_path: Path) -> None:
    file = written(tmp_path, {"peft_type": "VERA", "target_modules": ["q_proj"]})
    adapters.chosen(adapter(adapter_config=file), model := llama(), without=["model.layers.1"])
    assert adapted(model) == {"model.layers.0.self_attn.q_proj"}
    with pytest.raises(ConfigError, match="do not fit the model: .*\nhint: "):
        adapters.chosen(adapter(adapter_config=file), llama(), without=["model.layers"])


def test_those_of_norms_are_on_norms_unless_modules_are_named() -> None:
    adapters.chosen(adapter(adapter_config="ln_tuning"), model := llama(), without=["model.layers.1"])
    norms = {"input_layernorm", "post_attention_layernorm"}
    assert adapted(model) == {"model.norm", *(f"model.layers.0.{name}" for name in norms)}
    without_weights = llama()
    without_weights.model.norm = type("PlainNorm", (nn.Module,), {})()
    assert "model.norm" not in adapters.chosen(adapter(adapter_config="ln_tuning"), without_weights).target_modules
    named = adapters.chosen(adapter(adapter_config="ln_tuning", target_modules=("q_proj",)), llama())
    assert set(named.target_modules) == {"q_proj"}


@pytest.mark.parametrize("kind", [SftConfig, GrpoConfig])
def test_adapters_of_the_head_are_refused_on_the_outline(kind: type[LanguageConfig], tmp_path: Path) -> None:
    config = kind(train_type="lora", target_modules=("q_proj", "lm_head"))
    with pytest.raises(ConfigError, match="the output embeddings, lm_head, would have adapters; .*\nhint: leave them"):
        adapters.chosen(config, llama())
    LoraConfig(r=2, target_modules=["lm_head"]).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ConfigError, match="the output embeddings, lm_head, would have adapters"):
        adapters.chosen(kind(train_type="lora", adapters=str(tmp_path)), llama())


@pytest.mark.parametrize("kind", [SftConfig, GrpoConfig])
@pytest.mark.parametrize(("tied", "indices"), [(True, [5, 6]), (False, {"lm_head": [5, 6]})])
def test_single_tokens_of_the_head_are_refused_on_the_outline(
    kind: type[LanguageConfig], tied: bool, indices: object, tmp_path: Path
) -> None:
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "trainable_token_indices": indices}
    config = kind(train_type="adapter", adapter_config=written(tmp_path, settings))
    found = "the output embeddings, lm_head, would have single tokens trained by trainable_token_indices; .*\nhint: "
    with pytest.raises(ConfigError, match=found):
        adapters.chosen(config, llama(tied=tied))
    file = written(tmp_path, {**settings, "trainable_token_indices": [5, 6]})
    assert adapters.chosen(kind(train_type="adapter", adapter_config=file), llama()).trainable_token_indices == [5, 6]


def test_a_file_says_how_and_where(tmp_path: Path) -> None:
    file = written(tmp_path, {"peft_type": "boft", "boft_block_size": 8, "target_modules": ["q_proj"]})
    made = adapters.chosen(adapter(adapter_config=file, target_modules=("v_proj",)), llama())
    assert isinstance(made, BOFTConfig)
    assert (made.boft_block_size, made.target_modules) == (8, {"q_proj"})  # the file's own modules
    file = written(tmp_path, {"peft_type": "BOFT", "boft_block_size": 8})
    assert adapters.chosen(adapter(adapter_config=file, target_modules=("v_proj",)), llama()).target_modules == {
        "v_proj"
    }


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    BOFTConfig(boft_block_size=8, target_modules=["q_proj"], base_model_name_or_path="gone").save_pretrained(tmp_path)
    made = adapters.chosen(adapter(adapter_config=str(tmp_path / "adapter_config.json")), llama())
    assert (made.peft_type, made.base_model_name_or_path, made.inference_mode) == ("BOFT", None, False)


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        ("bft", ConfigError, "adapter_config is 'bft'; expected one of beft, .*\nhint: did you mean 'boft'"),
        ("prefix_tuning", ConfigError, "adapter_config is 'prefix_tuning'; expected one of"),
        ("zzzzz", ConfigError, "\nhint: kinds"),
        ("nosuch/a.json", DataError, "adapter_config file 'nosuch/a.json' cannot be read"),
        ({"boft_block_size": 8}, DataError, "names no peft_type; expected a JSON object with one\nhint: such as"),
        ([1], DataError, r"adapter_config file .* is \[1\]; expected a file in the form of PEFT\'s"),
        ("{", DataError, "is not JSON"),
        ({"peft_type": "CPT"}, ConfigError, "peft_type in .*boft.json is 'CPT'"),
    ],
)
def test_what_names_no_kind_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, said: object, error: type[Exception], text: str
) -> None:
    name = written(tmp_path, said) if not isinstance(said, str) or said == "{" else said
    with pytest.raises(error, match=f"(?s){text}"):
        adapters.check(adapter(adapter_config=name))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"boft_blok_size": 4}, "unknown setting 'boft_blok_size' in .*\nhint: did you mean 'boft_block_size'"),
        (
            {"boft_block_size": 4, "boft_block_num": 4},
            "cannot be used: .*expected settings of PEFT's BOFTConfig\nhint: ",
        ),
        ({"boft_block_size": 7}, "do not fit the model: .*divisible.*expected settings that its modules can have"),
    ],
)
def test_settings_that_cannot_be_had_are_refused(tmp_path: Path, content: dict[str, Any], text: str) -> None:
    config = adapter(adapter_config=written(tmp_path, {"peft_type": "BOFT", **content}))
    with pytest.raises(ConfigError, match=f"(?s){text}"):
        adapters.chosen(config, llama())


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_adapters_that_change_the_weights_under_them_are_refused(tmp_path: Path, start: str) -> None:
    config = adapter(adapter_config=written(tmp_path, {"peft_type": "LORA", "init_lora_weights": start}))
    with pytest.raises(ConfigError, match=f"init_lora_weights is '{start}', which changes .*\nhint: leave"):
        adapters.chosen(config, llama())


def test_adapters_of_a_folder_go_on_with_their_values(tmp_path: Path) -> None:
    config = SftConfig(train_type="lora", lora_rank=2, target_modules=("q_proj",))
    first = adapters.put_on(llama("cpu"), adapters.chosen(config, llama()), config)
    with torch.no_grad():
        for name, value in first.named_parameters():
            if "lora_B" in name:
                value.fill_(0.5)
    first.save_pretrained(tmp_path)
    again = SftConfig(train_type="lora", adapters=str(tmp_path), seed=7)
    second = adapters.put_on(llama("cpu"), made := adapters.chosen(again, llama()), again)
    assert isinstance(made, LoraConfig) and made.r == 2
    values = dict(first.named_parameters())
    for name, value in second.named_parameters():
        assert value.requires_grad is ("lora_" in name)
        assert "lora_" not in name or value.equal(values[name])


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    LoraConfig(r=2, target_modules=["nosuch"]).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    config = SftConfig(train_type="lora", adapters=str(tmp_path))
    adapters.check(config)
    with pytest.raises(ConfigError, match="the adapters in .*; expected the model they were trained on\nhint: "):
        adapters.chosen(config, llama())


def test_a_damaged_file_of_values_is_an_error(tmp_path: Path) -> None:
    LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"half")
    config = SftConfig(train_type="lora", adapters=str(tmp_path))
    with pytest.raises(DataError, match="the adapters in .* cannot be loaded: .*expected adapters that were trained"):
        adapters.put_on(llama("cpu"), adapters.chosen(config, llama()), config)


def test_a_folder_without_adapters_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "run-a").mkdir()
    (tmp_path / "run-a" / "adapter_config.json").write_text("{}")
    config = SftConfig(train_type="lora", adapters=str(tmp_path / "run-b"))
    with pytest.raises(
        DataError, match="run-b' holds no adapters; expected a folder with .*\nhint: did you mean 'run-a'"
    ):
        adapters.check(config)


def test_every_training_type_has_its_kind_of_adapters(tmp_path: Path) -> None:
    BOFTConfig().save_pretrained(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    assert SftConfig().adapter_kind is None
    assert SftConfig(train_type="lora").adapter_kind == SftConfig(train_type="qlora").adapter_kind == "LORA"
    assert adapter(adapter_config="vera").adapter_kind == "VERA"
    assert adapter(adapters=str(tmp_path)).adapter_kind == "BOFT"


def test_an_error_without_a_message_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*given: object, **others: object) -> None:
        raise NotImplementedError

    with monkeypatch.context() as patch:
        patch.setattr("peft.get_peft_model", refuse)
        with pytest.raises(ConfigError, match=r"NotImplementedError\(\)"):
            adapters.chosen(adapter(adapter_config="boft"), llama())
    config = SftConfig(train_type="lora")
    adapters.put_on(llama("cpu"), adapters.chosen(config, llama()), config).save_pretrained(str(tmp_path))
    again = SftConfig(train_type="lora", adapters=str(tmp_path))
    monkeypatch.setattr("peft.PeftModel.from_pretrained", refuse)
    with pytest.raises(DataError, match=r"cannot be loaded: NotImplementedError\(\)"):
        adapters.put_on(llama("cpu"), adapters.chosen(again, llama()), again)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_prj",), "target_modules names 'q_prj'; expected modules of the model\nhint: did you mean 'q_proj'"),
        (("all-linear", "q_proj"), "target_modules is all-linear q_proj; expected .*\nhint: "),
        (
            ("mlp",),
            "target_modules is mlp, which names LlamaMLP: .*; expected modules that can have.*\nhint: all-linear",
        ),
    ],
)
def test_modules_that_get_no_adapter_are_refused(targets: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        adapters.chosen(SftConfig(train_type="lora", target_modules=targets), llama())


def test_adapters_are_those_of_the_config() -> None:
    made = adapters.chosen(SftConfig(train_type="lora", target_modules=("q_proj", "v_proj"), lora_rank=4), llama())
    assert (made.r, made.target_modules) == (4, {"q_proj", "v_proj"})
    assert adapters.chosen(SftConfig(train_type="lora"), llama()).target_modules == "all-linear"


def test_adapters_on_weights_in_bfloat16_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SftConfig(train_type="lora", bf16=True)
    with monkeypatch.context() as patched:
        patched.setattr("torch.accelerator.is_available", lambda: True)
        model = llama().to_empty(device="cpu").to(getattr(torch, dtype_name(config)))
    settings = adapters.chosen(config, llama())
    settings.modules_to_save, settings.bias = ["lm_head"], "all"  # copies of the base's
    made = adapters.put_on(model, settings, config)
    dtypes = {trained: {p.dtype for p in made.parameters() if p.requires_grad is trained} for trained in (True, False)}
    assert dtypes == {True: {torch.float32}, False: {torch.bfloat16}}

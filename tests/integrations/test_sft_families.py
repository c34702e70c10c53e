"""The recipe on models other than a plain float decoder: experts, images, weights in 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.base.errors import ConfigError, DataError
from ebbtide_recipes.sft.config import SftConfig
from ebbtide_recipes.sft.recipe import main
from tests.integrations.conftest import make_tiny_model
from tests.integrations.families import make_llava, make_moe, make_pictures, make_qwen_vl
from tests.integrations.ranks import sft_config

pytestmark = [
    # transformers' and bitsandbytes' own warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:bitsandbytes"),
    pytest.mark.filterwarnings("ignore::FutureWarning:bitsandbytes"),
]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-llama-256"), positions=256)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures"))


def train(model: Path, folder: Path, /, **changes: object) -> dict[str, Any]:
    main(sft_config(model, folder, **{"max_length": 256, "packing": False, **changes}))
    events = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    return {"losses": losses, "summary": json.loads((folder / "summary.json").read_text())}


def with_tokens(model: Path, added: dict[str, Any]) -> Path:
    """Add special tokens to a saved tokenizer, and remove those that are ``None``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({name: value for name, value in added.items() if value})
    tokenizer.save_pretrained(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, **added}))
    return model


def both(model: Path, folder: Path, **changes: object) -> dict[str, Any]:
    """Train without and with ebbtide; assert equal losses, and that bytes were saved."""
    plain = train(model, folder / "plain", **changes)
    ours = train(model, folder / "ours", activation_cpu_offload=True, **changes)
    assert ours["losses"] == plain["losses"]
    assert len(set(ours["losses"].values())) == len(ours["losses"]) > 1
    assert ours["summary"]["memory_saved_bytes"] > 0
    return ours


@pytest.mark.slow
def test_a_mixture_of_experts_trains_two_epochs_is_saved_and_goes_on(text_model: Path, tmp_path: Path) -> None:
    model = make_moe(tmp_path / "moe", text_model)
    changes = {
        "dataset": ("builtin:pydoc#12",), "max_steps": -1, "num_train_epochs": 2.0, "per_device_train_batch_size": 3
    }  # fmt: skip
    ours = both(model, tmp_path, **changes)
    assert len(ours["losses"]) == 8
    whole = train(model, tmp_path / "whole", **changes, save_steps=3, activation_cpu_offload=True)
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    rest = train(
        model, tmp_path / "rest", **changes, activation_cpu_offload=True, resume_from_checkpoint=str(checkpoint)
    )
    assert rest["losses"] == {step: whole["losses"][step] for step in (7, 8)}


def test_qlora_trains_adapters_on_weights_in_four_bits(text_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    both(text_model, tmp_path, train_type="qlora", packing=True)
    from safetensors import safe_open

    train(text_model, tmp_path / "saved", train_type="qlora", max_steps=1, save=True)
    with safe_open(tmp_path / "saved" / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118 - no mapping


def test_qlora_loads_the_weights_in_four_bits(text_model: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from ebbtide_recipes.language import models

    config = SftConfig(model=str(text_model), train_type="qlora", max_length=64)
    model, _ = models.load(config, models.look_up(config))
    kinds = [type(module) for name, module in model.named_modules() if name.endswith("_proj")]
    assert kinds and set(kinds) == {bitsandbytes.nn.Linear4bit}


@pytest.mark.parametrize("train_type", ["full", "qlora"])
def test_weights_that_are_quantised_already_are_refused(text_model: Path, tmp_path: Path, train_type: str) -> None:
    model = make_tiny_model(tmp_path / "quantised", positions=256)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ConfigError, match="are already quantised, and train_type is"):
        train(model, tmp_path / "out", train_type=train_type)


def test_loss_scaling_is_refused_for_adapters_that_are_bfloat16_on_quantised_weights(tmp_path: Path) -> None:
    from ebbtide_recipes.language import models

    model = make_tiny_model(tmp_path / "quantised", positions=256)
    config = json.loads((model / "config.json").read_text())
    for method, fp16 in (("gptq", True), ("bitsandbytes", False), ("bitsandbytes", True)):
        (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
        asked = SftConfig(model=str(model), train_type="lora", max_length=64, fp16=fp16)
        if method == "bitsandbytes" and fp16:
            with pytest.raises(ConfigError, match="fp16 is true with the quantised weights of .*\nhint: "):
                models.look_up(asked)
        else:
            assert models.look_up(asked).config.quantization_config["quant_method"] == method


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ({"eos_token": None}, "has no eos_token.*\nhint: "),
        ({"pad_token": "<pad>"}, "pads with '<pad>', token 304, and the model has 304 tokens.*\nhint: "),
        ({"additional_special_tokens": ["<new>"]}, "rows of .*a.jsonl have the token 304, '<new>', and the model has"),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path, added: dict, said: str) -> None:
    from ebbtide_recipes.grpo import data, rewards
    from ebbtide_recipes.grpo.config import GrpoConfig
    from ebbtide_recipes.language import models

    model = with_tokens(make_tiny_model(tmp_path / "model"), added)
    rows = tmp_path / "a.jsonl"
    rows.write_text(json.dumps({"prompt": "a <new> token", "completion": "It is.", "answer": "1"}) + "\n")
    with pytest.raises(DataError, match=said):
        train(model, tmp_path / "out", dataset=(str(rows),), max_length=64, per_device_train_batch_size=2)
    config = GrpoConfig(model=str(model), dataset=(str(rows),), max_prompt_length=32, max_completion_length=32)
    with pytest.raises(DataError, match=said):
        data.load(config.dataset, config, models.look_up(config), rewards.load(["accuracy"]))
    if "additional_special_tokens" in added:
        train(model, tmp_path / "out", dataset=("builtin:pydoc#2",), max_steps=1, max_length=64)


CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It returns the value."}]


@pytest.mark.parametrize(
    ("added", "changes"),
    [
        ({"pad_token": "<pad>"}, {"packing": True, "per_device_train_batch_size": 2}),
        ({"pad_token": "<pad>"}, {"per_device_train_batch_size": 1}),
        ({"eos_token": None}, {}),
    ],
)
def test_a_tokenizer_is_taken_that_fits_the_rows(tmp_path: Path, added: dict, changes: dict) -> None:
    from transformers import AutoModelForCausalLM

    model = with_tokens(make_tiny_model(tmp_path / "model"), added)
    rows = tmp_path / "a.jsonl"
    rows.write_text((json.dumps({"messages": CHAT}) + "\n") * 16)
    changes = {"dataset": (str(rows),), "max_steps": 1, "max_length": 32, "save": True, **changes}
    assert train(model, tmp_path / "out", **changes)["losses"][1] > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # no pad_token without an embedding was saved


def test_a_vision_language_model_learns_from_images_and_goes_on(
    text_model: Path, pictures: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    model = make_llava(tmp_path / "llava", text_model)
    changes = {
        "dataset": (str(pictures),), "max_steps": -1, "num_train_epochs": 2.0, "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    both(model, tmp_path, **changes)
    changes["activation_cpu_offload"] = True
    whole = train(model, tmp_path / "whole", **changes, save_steps=1, save=True)
    first = str(tmp_path / "whole" / "checkpoint-1")
    assert train(model, tmp_path / "rest", **changes, resume_from_checkpoint=first)["losses"] == {2: whole["losses"][2]}
    before, after = (load_file(place / "model.safetensors") for place in (model, tmp_path / "whole"))
    same = {name for name in before if before[name].equal(after[name])}
    assert same == {name for name in before if "vision_tower" in name}  # --freeze_vit is the default
    assert (tmp_path / "whole" / "processor_config.json").exists()
    settings = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("llava", "whole/checkpoint-1")]
    assert all("use_cache" not in setting for setting in settings)


def test_blocks_that_a_model_names_and_has_not_are_left_out_for_fsdp(text_model: Path, tmp_path: Path) -> None:
    from transformers import LlavaForConditionalGeneration

    from ebbtide_recipes.skeleton.trainer import name_present_blocks

    model = LlavaForConditionalGeneration.from_pretrained(make_llava(tmp_path / "llava", text_model))
    before = set(model._no_split_modules)
    name_present_blocks(model)
    there = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) == before & there
    assert {"LlamaDecoderLayer", "CLIPEncoderLayer"} <= set(model._no_split_modules)


@pytest.mark.slow
def test_the_vision_part_trains_when_asked_and_adapters_stay_out_of_it_when_not(
    text_model: Path, pictures: Path, tmp_path: Path
) -> None:
    from safetensors import safe_open

    model = make_llava(tmp_path / "llava", text_model)
    changes = {"dataset": (str(pictures),), "train_type": "lora", "max_steps": 1, "save": True}
    for frozen in (True, False):
        train(model, tmp_path / str(frozen), **changes, freeze_vit=frozen)
        with safe_open(tmp_path / str(frozen) / "adapter_model.safetensors", "pt") as file:
            assert any("vision_tower" in name for name in file.keys()) is not frozen  # noqa: SIM118 - no mapping


@pytest.mark.slow
def test_qwen_vl_sees_through_its_own_processor(
    text_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    model, processor = make_qwen_vl(tmp_path / "qwen", text_model)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda *args, **kwargs: processor)
    both(model, tmp_path, dataset=(str(pictures),), per_device_train_batch_size=6, max_steps=2)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"images": ["nowhere.png"]}, "row 1 of .* names the image 'nowhere.png', which does not exist"),
        ({"images": [3]}, "has the image 3; expected a path"),
        ({"images": ["0.png", "1.png"]}, "has 2 images and 1 <image> tags; expected one tag for each image"),
    ],
)
def test_bad_images_are_refused_before_the_weights_are_loaded(
    text_model: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict, said: str
) -> None:
    from ebbtide_recipes.language import models

    monkeypatch.setattr(models, "load", lambda *args: pytest.fail("the weights were loaded"))
    first = json.loads(pictures.read_text().splitlines()[0])
    bad = pictures.with_name("bad.jsonl")
    bad.write_text(json.dumps({**first, **row}) + "\n")
    with pytest.raises(DataError, match=said):
        train(make_llava(tmp_path / "llava", text_model), tmp_path / "out", dataset=(str(bad),))


def test_images_for_a_model_that_sees_none_are_refused(text_model: Path, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has images, and the model takes text alone"):
        train(text_model, tmp_path, dataset=(str(pictures),))

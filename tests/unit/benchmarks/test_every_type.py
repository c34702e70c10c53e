"""The suite on every model type: its rules of shrinking, its batches, and that it finds what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import small_models, trained
from benchmarks.small_batches import VARIANTS, Unknown, batches
from benchmarks.small_configs import METHODS, Shrinking, changed, number, picked, sections, sequence, small
from benchmarks.small_models import GROUPS, Untrained, classes, found_training, kinds
from benchmarks.suites.every_type import compared, is_equal, report, rows_of, write
from ebbtide.engine.engine import Engine


class Model(nn.Module):
    """Two blocks with dropout, and a forward whose argument the suite knows."""

    def __init__(self) -> None:
        super().__init__()
        block = [nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.ModuleList([nn.Sequential(*block), nn.Sequential(nn.Linear(8, 8), nn.GELU())])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def made() -> nn.Module:
    trained.seed(0)
    return Model()


def data() -> list[dict[str, Any]]:
    return [{"x": torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))} for rows in (4, 3, 4)]


@pytest.fixture
def want() -> dict[str, Any]:
    return trained.train(made(), data())


@pytest.mark.parametrize("way", trained.WAYS)
def test_equal_training_is_called_equal(way: str, want: dict[str, Any]) -> None:
    row = compared(want, made, data(), way)
    assert not row["differs"]
    assert row["saved_tensors"] > 0


def test_recipes_recompute_in_every_step_also_from_what_is_known_of_earlier_ones(want: dict[str, Any]) -> None:
    row = compared(want, made, data(), "recipes")
    assert row["recipe_steps"] == len(data())
    assert row["replayed"] > 0
    assert row["checkpointed_blocks"] == 0


@pytest.mark.parametrize("way", ["offload", "minimal"])
def test_a_restored_tensor_that_is_off_by_one_bit_differs(
    way: str, want: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Engine.unpack

    def off(engine: Engine, ticket: Any) -> Tensor:
        found = original(engine, ticket).clone()
        if found.dtype == torch.float32:
            found.view(torch.int32).flatten()[0] ^= 1
        return found

    monkeypatch.setattr(Engine, "unpack", off)
    row = compared(want, made, data(), way)
    assert row["differs"][0].startswith("step 0: layers.")
    assert not is_equal({"ways": {way: row}})


def test_an_error_where_ordinary_training_has_none_differs(
    want: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(engine: Engine, ticket: Any) -> Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(Engine, "unpack", broken)
    row = compared(want, made, data(), "offload")
    assert row["differs"] == ["error"]
    assert "broken" in row["error"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.ones(2, 3), torch.ones(3, 2)),
    ],
)
def test_digests_tell_bits_dtypes_and_shapes_apart(one: Tensor, other: Tensor) -> None:
    assert trained.digest(one) == trained.digest(one.clone())
    assert trained.digest(one) != trained.digest(other)


def test_a_nan_equals_itself() -> None:
    assert trained.digest(torch.tensor([float("nan")])) == trained.digest(torch.tensor([float("nan")]))


def test_what_only_one_run_has_differs() -> None:
    assert trained.differing({"a": "1", "b": None}, {"a": "1", "c": "2"}) == ["b", "c"]


def test_without_a_loss_the_outputs_are_the_loss() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    assert trained.loss_of({"loss": None, "parts": ((x * 1,), {"deep": x * 2})}).item() == 9 + 36
    with pytest.raises(ValueError, match="no differentiable output"):
        trained.loss_of({"number": torch.tensor([1])})


@pytest.mark.parametrize(
    ("name", "value", "method", "want"),
    [
        ("hidden_size", 4096, "table", 64),
        ("num_attention_heads", 32, "table", 4),
        ("num_key_value_heads", 8, "table", 2),
        ("head_dim", 128, "table", 16),
        ("intermediate_size", 11008, "table", 96),
        ("hidden_size", 4096, "heads/16", 256),
        ("num_attention_heads", 32, "heads/16", 2),
        ("head_dim", 128, "heads/16", 128),
        ("num_attention_heads", 12, "widths/4", 12),
        ("embed_dim", 96, "widths/4", 24),
        ("hidden_size", 4096, "counts", 4096),
        ("num_experts", 128, "counts", 4),
        ("num_experts_per_tok", 8, "table", 2),
        ("first_k_dense_replace", 3, "table", 1),
        ("vocab_size", 32000, "table", 256),
        ("sliding_window", 4096, "table", 8),
        ("encoder_layers", 12, "table", 2),
        ("vision_feature_layer", 12, "table", 12),
        ("kernel_size", 64, "table", 64),
        ("eos_token_id", 2, "table", 2),
        ("image_token_id", 32000, "table", 255),
        ("num_filters", 64, "counts", 8),
        ("num_pos_feats", 128, "table", 32),
        ("num_pos_feats", 128, "heads/8", 16),
        ("mm_tokens_per_image", 256, "table", 4),
    ],
)
def test_a_number_shrinks_by_its_name(name: str, value: int, method: str, want: int) -> None:
    assert number(name, value, Shrinking(method), {}) == want


def test_a_special_token_has_one_number_in_all_configurations() -> None:
    how = Shrinking("table")
    assert [how.token(n) for n in (32000, 32001, 32000, 2)] == [255, 254, 255, 2]


def test_the_layers_that_are_kept_have_every_kind() -> None:
    kinds_of = ["linear", "linear", "linear", "full"] * 2
    kept = picked(list(range(8)), {"layer_types": kinds_of}, 2)
    assert [kinds_of[n] for n in kept] == ["linear", "full"]
    assert picked(list(range(8)), {}, 2) == [0, 1]


def test_lists_shrink_with_the_layers() -> None:
    how = Shrinking("widths/4")
    assert sequence("layer_types", ["a", "a", "b"], how, [0, 2], 3) == ["a", "b"]
    assert sequence("deepstack_indexes", [8, 16, 24], how, [0, 1, 2, 3], 27) == [1, 2, 3]
    assert sequence("depths", [2, 2, 6, 2], how, [], None) == [2, 2, 2, 2]
    assert sequence("hidden_sizes", [96, 192], how, [], None) == [24, 48]
    assert sequence("num_heads", [3, 6], how, [], None) == [3, 6]


def test_a_window_over_pictures_fits_the_smallest_stage() -> None:
    how = Shrinking("table")
    assert number("window_size", 7, how, {"image_size": 224}) == 2
    assert number("window_size", 256, how, {}) == 256
    assert sequence("window_size_per_stage", [8, 4, 14, 7], how, [], None) == [2, 2, 2, 2]


def test_a_part_keeps_what_its_whole_gives_it() -> None:
    transformers = pytest.importorskip("transformers")
    backbone = small(transformers.DepthAnythingConfig, "table").backbone_config
    assert backbone.reshape_hidden_states is False
    assert backbone.out_indices == [1, 2, 3, 4]
    assert backbone.num_hidden_layers == 5


def test_fields_that_one_type_needs_are_set_in_a_part_and_in_a_dict() -> None:
    transformers = pytest.importorskip("transformers")
    assert small(transformers.DbrxConfig, "table", {"attn_config": {"clip_qkv": 8}}).attn_config.clip_qkv == 8
    assert small(transformers.ChameleonConfig, "table", {"vocabulary_map": {"a": 4}}).vocabulary_map == {"a": 4}


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_sections_of_a_head_are_half_of_its_turning_part(part: float) -> None:
    assert sum(sections(part)) == 8 * part


def test_a_nested_configuration_shrinks_with_its_parent() -> None:
    transformers = pytest.importorskip("transformers")
    config = small(transformers.LlavaConfig, "table")
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64
    assert config.text_config.num_hidden_layers == 2
    assert config.image_token_index < config.text_config.vocab_size == 256
    assert changed(config.vision_config, Shrinking("table")).keys() <= {"use_cache", "head_dim"}


def test_pictures_replace_as_many_placeholders_as_the_model_reads() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlavaForConditionalGeneration(small(transformers.LlavaConfig, "table"))
    for batch in batches(model, VARIANTS[0]):
        rows, length = batch["input_ids"].shape
        assert (batch["input_ids"] == model.config.image_token_index).sum() == rows * 16
        assert model(**batch).logits.shape[:2] == (rows, length)


def test_no_token_but_a_placeholder_is_one() -> None:
    transformers = pytest.importorskip("transformers")
    config = small(transformers.Mistral3Config, "table")
    model = transformers.Mistral3ForConditionalGeneration(config)
    for batch in batches(model, VARIANTS[0]):
        assert (batch["input_ids"] == config.image_token_id).sum() == len(batch["input_ids"]) * 4


def test_a_type_that_does_not_train_as_a_whole_is_trained_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    made = small_models.built

    def without_pictures(cls: Any, config: Any) -> nn.Module:
        if "ConditionalGeneration" in cls.__name__:
            raise ImportError("needs timm")
        return made(cls, config)

    monkeypatch.setattr(small_models, "built", without_pictures)
    _, _, about = found_training("gemma3", kinds()["gemma3"])
    assert about["class"] == "Gemma3ForCausalLM"


def test_an_argument_that_nothing_makes_is_named() -> None:
    class Strange(nn.Module):
        config = type("Config", (), {})()

        def forward(self, wavelets: Tensor) -> Tensor:
            return wavelets

    with pytest.raises(Unknown, match="wavelets"):
        next(batches(Strange(), {}))


def test_a_type_is_found_with_its_usual_class_and_no_part_is_a_type() -> None:
    pytest.importorskip("transformers")
    types = kinds()
    assert "llava" in types
    assert "qwen2_5_vl_text" not in types
    assert classes(types["bert"])[0].__name__ == "BertLMHeadModel"
    make, batches_, about = found_training("gpt2", types["gpt2"])
    assert about["method"] in METHODS
    assert len({tuple(batch["input_ids"].shape) for batch in batches_}) > 3
    assert make().training


def test_a_type_without_a_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def needing(*args: Any) -> Any:
        raise ImportError("needs natten")

    monkeypatch.setattr("benchmarks.small_models.built", needing)
    with pytest.raises(Untrained) as caught:
        found_training("gpt2", kinds()["gpt2"])
    assert caught.value.args[0] == "package"


def row(name: str, **ways: list[str]) -> dict[str, Any]:
    """A row of a trained type, as ``trained`` returns it."""
    figures = {"saved_percent": 40.0, "checkpointed_blocks": 2, "recipe_steps": 3, "replayed": 5, "saved_tensors": 10}
    found = {way: {"differs": ways.get(way, []), **figures} for way in (*trained.WAYS, "autocast")}
    about = {"class": "M", "parameters": 10**6, "method": "table", "variant": "", "inputs": {"x": [1]}}
    return {"type": name, **about, "finite": True, "ways": found}


def test_the_readme_has_a_row_for_each_type_and_a_reason_for_the_others() -> None:
    left = [{"type": f"left-{key}", "untrained": key, "reason": "a | b"} for key in GROUPS]
    text = report([row("one"), row("two", minimal=["step 1: loss"]), *left], "a-l", 7)
    assert text.startswith("# Model types of transformers, trained small: a to l")
    assert "2 were trained; **1 of these are equal**." in text
    assert "| one | M | `x` | 1.00 M | equal | 40 % | 40 % | 2 | 50 % |" in text
    assert "**differs**: minimal" in text
    assert "less than 50 %: one, two." in " ".join(text.split())
    assert "in fewer than 4 steps: one, two." in " ".join(text.split())
    assert all(f"- left-{key}: a / b" in text for key in GROUPS)
    assert "| no time was left | 7 |" in text


def test_a_run_resumes_from_its_folder(tmp_path: Path) -> None:
    assert rows_of(tmp_path) == {}
    rows = {"two": row("two"), "one": row("one")}
    write(tmp_path, rows, "a-z", 2)
    assert rows_of(tmp_path) == rows
    assert list(rows_of(tmp_path)) == ["one", "two"]

"""What training would need: the model from its config, the options side by side, the messages about them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from ebbtide.base.actions import Action
from ebbtide.base.errors import BudgetError, ConfigError, DataError
from ebbtide.config import Auto, Minimal, Options
from ebbtide.planner.checkpointing import checkpointed_peak
from ebbtide.planner.machines import MACHINES
from ebbtide.planner.policies import plan_for
from ebbtide.planner.profile import Profile, Rates
from ebbtide.planner.solve import follow
from ebbtide.planner.table import load_plan, table_plan
from ebbtide.profiling.simulated import Job, simulate_model
from ebbtide_recipes.language import adapters, models, smollm2
from ebbtide_recipes.plan import main as recipe
from ebbtide_recipes.plan import model, page, picture
from ebbtide_recipes.plan.config import PlanConfig
from ebbtide_recipes.plan.four_bits import QUANTISED_BYTES
from ebbtide_recipes.plan.job import state_ratio
from ebbtide_recipes.plan.options import Limits, Option, best, limits, options
from ebbtide_recipes.plan.page import Result
from ebbtide_recipes.sft.config import SftConfig
from tests.unit.profiling.test_trials import blocks as many_blocks

GIB = 1024**3
QWEN = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL = "small.json"
"""A machine that is small enough for a small model to be too large."""

Write = Callable[..., str]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    def written(**changes: Any) -> str:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps({**QWEN, **changes}))
        return str(folder)

    return written


@pytest.fixture(scope="module")
def qwen(write: Write) -> str:
    return write()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], str]:
    def machine(mebibytes: float) -> str:
        path = tmp_path_factory.mktemp("machine") / SMALL
        here = dataclasses.replace(MACHINES["h200"], name="small", memory_bytes=int(mebibytes * 2**20))
        here.save(path)
        return str(path)

    return machine


def found(model: str, **changes: Any) -> Result:
    return recipe.main(PlanConfig(**{"model": model, "gpu": "h200", "max_length": 1024, **changes}))


known = functools.cache(found)
"""``found``; simulating a model takes seconds, and the same values have the same result."""


@pytest.fixture(scope="module")
def result(qwen: str) -> Result:
    return known(qwen)


def named(result: Result, name: str) -> Option:
    return next(option for option in result.options if option.name.startswith(name))


# The options


def test_every_way_has_a_row_in_this_order(result: Result) -> None:
    assert [option.name for option in result.options] == [
        "plain", "checkpointing", "ebbtide-minimal", "ebbtide-offload", "ebbtide-auto, at most 5 % slower",
    ]  # fmt: skip


def test_plain_is_the_measure_of_all(result: Result) -> None:
    plain = named(result, "plain")
    assert plain.step_ratio == pytest.approx(1)
    assert plain.offloaded_bytes == 0
    assert max(option.peak_bytes or 0 for option in result.options) == plain.peak_bytes


def test_checkpointing_keeps_the_inputs_and_runs_every_block_again(result: Result) -> None:
    option, profile = named(result, "checkpointing"), result.profile
    assert option.step_ratio == pytest.approx(1 + profile.forward_seconds / profile.step_seconds)
    inputs = 4 * 1024 * 64 * 2  # four blocks, 1024 tokens, hidden size 64, bfloat16
    assert (option.peak_bytes or 0) <= inputs + max(b.saved_bytes for b in profile.blocks) + max(
        [profile.head_base_bytes, *(b.backward_base_bytes for b in profile.blocks)]
    )
    assert (option.peak_bytes or 0) >= inputs + profile.head_base_bytes


def test_what_fits_plainly_is_trained_plainly(result: Result) -> None:
    assert result.recommended is named(result, "plain")
    assert "recommended  plain: " in page.text(result)


def test_what_does_not_fit_plainly_gets_a_budget_of_nine_tenths(qwen: str, small: Callable[[float], str]) -> None:
    plain = named(known(qwen), "plain").peak_bytes or 0
    tight = found(qwen, gpu=small(plain / 2**20))
    option = tight.options[-1]
    assert named(tight, "plain").fits == "barely"
    assert isinstance(option.policy, Auto)
    assert option.policy.memory_budget == int(0.9 * tight.machine.memory_bytes)
    assert option.fits == "yes"
    assert tight.recommended is not None
    assert tight.recommended.policy is not None
    assert "--activation_cpu_offload true" in page.text(tight)
    assert f"--memory_budget {int(0.9 * tight.machine.memory_bytes) >> 20}MiB" in page.command(tight, option)


def test_where_nothing_fits_it_says_what_the_least_is(qwen: str, small: Callable[[float], str], tmp_path: Path) -> None:
    none = found(qwen, gpu=small(1))
    text = page.text(none)
    assert none.recommended is None
    assert "no plan fits: at least " in text
    assert "hint: that peak is in " in text
    assert "recommended  nothing, because no option fits; the lowest peak is " in text
    with pytest.raises(BudgetError, match="no plan was saved in 'plan.json': none fits"):
        recipe.save(none, "plan.json")


def test_a_budget_is_what_must_be_fitted_into(qwen: str) -> None:
    peak = named(known(qwen), "plain").peak_bytes or 0
    asked = found(qwen, memory_budget=str(int(peak * 0.97)))
    assert named(asked, "plain").fits == "no"
    assert asked.options[-1].fits == "yes"
    assert asked.recommended is not None
    assert (asked.recommended.peak_bytes or 0) <= int(peak * 0.97)


def test_a_budget_keeps_its_unit(qwen: str) -> None:
    asked = known(qwen, memory_budget="10GiB")
    assert "--memory_budget 10GiB" in page.command(asked, asked.options[-1])
    asked = dataclasses.replace(asked, options=asked.options[-1:])  # recommended
    assert 'ebbtide.Auto(memory_budget="10GiB")' in page.text(asked)


def test_shards_take_less_and_ranks_share_the_host(qwen: str) -> None:
    one, eight = known(qwen), found(qwen, gpus=8, host_memory="1GiB")
    assert (named(eight, "plain").peak_bytes or 0) < (named(one, "plain").peak_bytes or 0)
    assert eight.room.ranks == 8
    moved = named(eight, "ebbtide-offload").offloaded_bytes
    values = page.as_values(eight)["options"][3]
    assert values["offloaded_bytes_a_node"] == 8 * moved > 0
    assert "--nproc_per_node 8 --fsdp_strategy full_shard" in values["command"]


def test_auto_offloads_no_more_than_the_host_holds(qwen: str, result: Result) -> None:
    auto = "ebbtide-auto, at most"
    moved, margin = named(result, auto).offloaded_bytes, 256 * 2**20
    tight = found(qwen, host_memory=str(margin + moved // 2))
    assert 0 < named(tight, auto).offloaded_bytes <= moved // 2
    assert named(tight, auto).fits_host and not named(tight, "ebbtide-offload").fits_host
    assert json.loads(json.dumps(page.as_values(tight), allow_nan=False))["options"][4]["fits_host"] is True


def test_more_devices_than_a_node_has_are_several_nodes(result: Result) -> None:
    wide = dataclasses.replace(
        result,
        config=dataclasses.replace(result.config, gpus=16),
        room=dataclasses.replace(result.room, ranks=8),
    )
    assert page.command(wide, wide.options[0]).startswith(
        "torchrun --nnodes 2 --nproc_per_node 8 --node_rank RANK --master_addr FIRST -m ebbtide sft "
    )


def without_recipes(profile: Profile, *, narrow: bool = True) -> Profile:
    """Return the step of operators that the rules do not cover."""
    blocks = tuple(
        dataclasses.replace(
            block,
            units=tuple(
                dataclasses.replace(
                    u, recompute_seconds=None, recompute_flops=None, narrow_bytes=u.narrow_bytes if narrow else None
                )
                for u in block.units
            ),
            input_bytes=4 * 2**10,
        )
        for block in profile.blocks
    )
    return dataclasses.replace(profile, blocks=blocks)


def test_blocks_that_the_rules_cover_badly_are_checkpointed_by_minimal(result: Result) -> None:
    found_ = options(without_recipes(result.profile), result.room, 0.05)
    rerun = found_[2]
    assert (rerun.name, rerun.policy, rerun.solution) == ("ebbtide-minimal, checkpointed", Minimal(), None)
    assert (rerun.peak_bytes, rerun.step_ratio) == (found_[1].peak_bytes, found_[1].step_ratio)
    assert rerun.offloaded_bytes == 16 * 2**10
    assert "--activation_cpu_offload true --gradient_checkpointing true" in page.command(result, rerun)


def test_minimal_without_room_for_an_error_has_the_figures_of_recipes() -> None:
    """Logits set the peak, so a mix needs as much as checkpointing, which is all that the device has."""
    step = dataclasses.replace(many_blocks(400 * 10**6), head_base_bytes=30 * 10**9, store_bytes=10**12)
    room, recipes = limit(device=checkpointed_peak(step), host=10**12), follow(step, plan_for(Minimal()))
    shown = options(step, room, 0.05)[2]
    assert shown.solution is not None and shown.solution.assignment == recipes.assignment


def test_the_command_names_the_folder_of_a_config(result: Result) -> None:
    file = dataclasses.replace(result, config=dataclasses.replace(result.config, model="mine/config.json"))
    assert page.command(file, file.options[0]).startswith("ebbtide sft --model mine ")


def limit(*, device: int = 100, budget: int | None = None, host: int | None = 1000, ranks: int = 1) -> Limits:
    return Limits(device_bytes=device, budget_bytes=budget, host_bytes=host, ranks=ranks)


@pytest.mark.parametrize(
    ("room", "peak", "fits"),
    [
        (limit(), 90, "yes"),
        (limit(), 91, "barely"),
        (limit(), 101, "no"),
        (limit(budget=50), 50, "yes"),
        (limit(budget=50), 51, "no"),
        (limit(budget=95), 95, "barely"),
        (limit(budget=200), 101, "no"),
    ],
)
def test_what_fits(room: Limits, peak: int, fits: str) -> None:
    assert room.fits_device(peak) == fits


def test_ranks_of_a_node_share_its_host_memory() -> None:
    assert limit(ranks=8).fits_host(125)
    assert not limit(ranks=8).fits_host(126)
    assert limit(host=None).fits_host(10**15)
    of_two_nodes = limits(MACHINES["h100"], 16, budget_bytes=None)
    assert of_two_nodes.ranks == 8
    assert of_two_nodes.host_bytes == 2048 * GIB - 8 * GIB


def option(name: str, peak: int, ratio: float, *, fits: Any = "yes", host: bool = True) -> Option:
    return Option(name=name, policy=None, peak_bytes=peak, step_ratio=ratio, fits=fits, fits_host=host)


def test_the_fastest_that_fits_is_taken() -> None:
    slow, fast, full = option("slow", 10, 1.2), option("fast", 80, 1.03), option("full", 120, 1.0, fits="no")
    assert best([slow, fast, full]) is fast
    assert best([slow, option("fast", 80, 1.03, host=False), full]) is slow
    assert best([full]) is None


def test_of_equally_fast_ways_plain_comes_first_then_the_lowest_peak() -> None:
    plain, small, large = option("plain", 90, 1.0), option("small", 10, 1.004), option("large", 50, 1.0)
    assert best([plain, large, small]) is plain
    assert best([large, small]) is small


def test_a_way_that_barely_fits_is_the_last_resort() -> None:
    fast, slow = option("fast", 95, 1.0, fits="barely"), option("slow", 10, 1.5)
    assert best([fast, slow]) is slow
    assert best([fast]) is fast


# Messages


def test_the_page_says_that_nothing_was_measured(result: Result) -> None:
    text = page.text(result)
    assert text.startswith("model        ")
    assert "(bfloat16; all trained), 4 x Qwen3DecoderLayer; 1 x 1024 tokens per device" in text
    assert "\nmachine      h200: 139.0 GiB per device" in text
    assert "predicted, not measured: the step was simulated. Left out: fragmentation" in text


def test_values_for_programs_are_json(result: Result) -> None:
    values = json.loads(json.dumps(page.as_values(result), allow_nan=False))
    assert values["predicted"] is True
    assert values["recommended"] == "plain"
    assert values["model"]["tokens"] == 1024
    assert [option["name"] for option in values["options"]] == [option.name for option in result.options]
    assert recipe.shown(dataclasses.replace(result, config=dataclasses.replace(result.config, json=True))) == (
        json.dumps(values, indent=1)
    )


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("checkpointing", "--gradient_checkpointing true"),
        ("ebbtide-minimal", "--activation_cpu_offload true --gradient_checkpointing true"),
        ("ebbtide-offload", "--activation_cpu_offload true --policy offload"),
        ("ebbtide-auto", "--activation_cpu_offload true --max_slowdown 0.05"),
    ],
)
def test_the_command_line_trains_that_way(result: Result, name: str, flags: str) -> None:
    line = page.command(result, named(result, name))
    assert line == f"ebbtide sft --model {result.config.model} --max_length 1024 --torch_dtype bfloat16 {flags}"


def test_the_plan_that_is_saved_is_the_one_to_take(qwen: str, small: Callable[[float], str], tmp_path: Path) -> None:
    plain = named(known(qwen), "plain").peak_bytes or 0
    tight = found(qwen, gpu=small(plain / 2**20))
    path = tmp_path / "plan.json"
    said = recipe.save(tight, str(path))
    assert tight.recommended is not None
    assert f"the plan of {tight.recommended.name}" in said
    plan = load_plan(path)
    assert plan.predicted.peak_bytes == tight.recommended.peak_bytes
    assert {name for name, _ in plan.actions} == {f"model.layers.{i}" for i in range(4)}


# The model


def test_only_a_config_is_needed_and_a_file_will_do(qwen: str, result: Result) -> None:
    outline = found(f"{qwen}/config.json").outline
    assert outline.weights == result.outline.weights == sum(p.numel() for p in outline.module.parameters())
    assert all(p.is_meta for p in outline.module.parameters())


def test_the_builtin_models_shape_is_known_without_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EBBTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "make", lambda: pytest.fail("weights are made"))
    config = model.read(SftConfig())
    assert sum(p.numel() for p in models.outline(SftConfig(), config).parameters()) == 134_515_008
    assert not (tmp_path / "cache").exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT's, where training adapts
def test_adapters_are_those_that_training_puts_on(qwen: str) -> None:
    config = SftConfig(model=qwen, train_type="lora", lora_rank=4, target_modules=("q_proj", "v_proj"))
    read = model.read(config)
    ours = model.Subject(config).outline("bfloat16")
    theirs = models.outline(config, read, "bfloat16")
    trained = adapters.put_on(theirs, adapters.chosen(config, models.outline(config, read, "bfloat16")), config)

    def shapes(module: nn.Module) -> dict[str, Any]:
        return {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()}

    assert shapes(ours.module) == shapes(trained)
    assert 0 < ours.trained < ours.weights
    assert all(p.is_meta for p in ours.module.parameters())


def test_adapters_take_less_than_full_training(qwen: str) -> None:
    full, lora = known(qwen, max_length=512), known(qwen, max_length=512, train_type="lora")
    assert (named(lora, "ebbtide-minimal").peak_bytes or 0) < (named(full, "ebbtide-minimal").peak_bytes or 0)
    assert "--train_type lora" in page.text(lora)


@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_a_checkpoint_of_each_block_holds_its_hidden_states(qwen: str, train_type: str) -> None:
    """Under adapters the first block's input needs no gradient; its checkpoint holds it all the same."""
    blocks = known(qwen, max_length=512, train_type=train_type).profile.blocks
    assert [block.input_bytes for block in blocks] == [512 * 64 * 2] * 4


def test_experts_can_be_simulated(write: Write) -> None:
    moe = write(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    text = page.text(found(moe))
    assert "4 x Qwen3MoeDecoderLayer, 4 experts" in text
    assert "Experts are assumed to get equally many tokens" in text


# Bad input


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 0}, "gpus is 0; expected 1 or more"),
        ({"gpu": " "}, "gpu is empty"),
        ({"host_memory": "lots"}, "host_memory is 'lots'"),
        ({"memory_budget": "0"}, "memory_budget is '0'"),
        ({"max_slowdown": -1.0}, "max_slowdown is -1.0"),
        ({"max_slowdown": 5.0}, "max_slowdown is 5.0"),
        ({"max_length": 1}, "max_length is 1; expected 2 or more"),
        ({"lora_rank": 0}, "lora_rank is 0; expected 1 or more"),
        ({"train_type": "qlora", "gpus": 2}, "train_type is 'qlora' with gpus 2"),
        ({"train_type": "qlora", "bf16": True}, "train_type is 'qlora' with bf16 true"),
        ({"bf16": True, "torch_dtype": "bfloat16"}, "bf16 is true with torch_dtype bfloat16; expected float32"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"svg": " "}, "svg is empty"),
    ],
)
def test_values_that_make_no_plan_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PlanConfig(**changes)
    assert str(caught.value).startswith(said)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_budget": "200GiB"}, "memory_budget is 200GiB, and the device has 139.0 GiB"),
        ({"gpus": 12}, "--gpus 12"),
    ],
)
def test_what_the_machine_cannot_do_is_refused(qwen: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        found(qwen, **{"gpu": "h200", **changes})
    assert str(caught.value).startswith(said)


def test_a_model_that_cannot_be_made_says_what_is_needed(write: Write, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"a": ')
    for name in (str(tmp_path), str(tmp_path / "file.json"), write(model_type="nonsense"), write(model_type="t5")):
        with pytest.raises(DataError) as caught:
            found(name)
        assert "expected a folder with config.json, such a file, a hub name, or one of " in str(caught.value)
        assert caught.value.hint == "the config.json of a text or vision-language model is enough; no weights are read"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 7, "model_type": "llama"}, "is not a multiple of the number of attention heads (7)"),
        ({"hidden_size": "64"}, "'hidden_size' expected int, got str (value: '64')"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' expected int, got NoneType"),
        ({"hidden_size": 0, "head_dim": None, "model_type": "llama"}, "ZeroDivisionError: "),
        ({"hidden_size": -64}, "RuntimeError: Trying to create tensor with negative dimension -64"),
    ],
)
def test_sizes_that_make_no_model_are_errors_about_the_file(write: Write, changes: dict[str, Any], said: str) -> None:
    name = write(**changes)
    with pytest.raises(DataError) as caught:
        found(name)
    assert str(caught.value).startswith(f"{name}/config.json describes no model (") and said in caught.value.found
    assert caught.value.expected and caught.value.hint


def test_attention_that_a_model_lacks_names_the_flag(write: Write) -> None:
    mamba = write(model_type="mamba", state_size=8)
    with pytest.raises(ConfigError, match=r"with attn_impl 'sdpa'.*\nhint: use --attn_impl eager$") as caught:
        found(mamba)
    assert "attn_implementation" not in str(caught.value)


@pytest.mark.parametrize("batch", [10**9, 10**30])
def test_a_batch_takes_no_memory(qwen: str, batch: int) -> None:
    if batch < 2**63:
        assert "hint: " in page.text(found(qwen, per_device_train_batch_size=batch))
    else:
        with pytest.raises(ConfigError, match="cannot be simulated"):
            found(qwen, per_device_train_batch_size=batch)


def test_blocks_that_save_too_little_have_the_options_without_ebbtide(qwen: str, tmp_path: Path) -> None:
    out, drawn = tmp_path / "plan.json", tmp_path / "plan.svg"
    asked = known(qwen, max_length=16)
    assert [option.name for option in asked.options] == ["plain", "checkpointing"]
    assert asked.recommended is named(asked, "plain") and named(asked, "plain").peak_bytes
    assert "smaller than 64.0 KiB" in page.text(asked) and "--max_length" in page.text(asked)
    values = page.as_values(dataclasses.replace(asked, config=dataclasses.replace(asked.config, json=True)))
    assert any("64.0 KiB" in note for note in values["notes"])
    recipe.save(asked, str(out))
    assert set(load_plan(out).actions.values()) == {Action.KEEP}
    recipe.draw(asked, str(drawn))
    ElementTree.fromstring(drawn.read_text())


def test_weights_that_are_quantised_and_sequences_that_are_too_long_are_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match="are already quantised"):
        found(write(quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(ConfigError, match="max_length is 5000; expected at most 4096"):
        found(write(), max_length=5000)
    with pytest.raises(ConfigError, match=r"max_length is 1024 \(its default\); expected at most 512"):
        found(write(max_position_embeddings=512))
    with pytest.raises(DataError, match="there is no model folder './nothing'; .*\nhint: .*check the path"):
        found("./nothing")
    with pytest.raises(DataError, match="\nhint: without a network use a local folder, or a model fetched before$"):
        found("nofolder")  # does not name --use_hf, which plan lacks
    with pytest.raises(ConfigError, match="gpu is 'h2000'"):
        found("./nothing", gpu="h2000")


def test_a_plan_that_cannot_be_written_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "plan.json"):
        with pytest.raises(DataError, match="expected a file in an existing folder"):
            recipe.main(PlanConfig(model="/nowhere", gpu="h200", out=str(path)))


def test_flags_without_effect_are_reported(qwen: str) -> None:
    said: list[str] = []
    recipe.main(PlanConfig(model=qwen, gpu="h200", max_length=512, lora_rank=4), said.append)
    assert said == ["--lora_rank has no effect here: recipe is sft, train_type full"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 2}, "gpus is 2 on a machine without an accelerator"),
        ({"host_memory": "1GiB"}, "host_memory is set, and offloaded bytes of cpu go to disk"),
    ],
)
def test_a_machine_without_devices_has_neither_ranks_nor_a_host(
    qwen: str, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = tmp_path / "cpu.json"
    dataclasses.replace(MACHINES["h200"], name="cpu", devices=1, stores_on_disk=True).save(path)
    with pytest.raises(ConfigError, match=said):
        found(qwen, gpu=str(path), **changes)
    text = page.text(found(qwen, gpu=str(path)))
    assert "offloaded bytes go to disk" in text
    assert "(float32; all trained)" in text


def test_offloaded_bytes_go_where_the_machine_says_whatever_its_name(qwen: str, tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    dataclasses.replace(MACHINES["h200"], name="box", host_memory_bytes=2**29, stores_on_disk=True).save(path)
    disk = found(qwen, gpu=str(path))
    assert disk.profile.store_bytes is None and disk.room.host_bytes is None
    assert "offloaded bytes go to disk" in page.text(disk) and "per node" not in page.text(disk)


def test_a_step_that_cannot_be_simulated_is_reported(qwen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **named: object) -> None:
        raise RuntimeError("a shape that is wrong\nand more")

    monkeypatch.setattr("ebbtide.profiling.simulated.simulate_model", fail)
    with pytest.raises(ConfigError) as caught:
        found(qwen)
    assert "cannot be simulated (RuntimeError: a shape that is wrong); expected a model" in str(caught.value)


def test_a_saved_plan_is_carried_out_as_it_was_predicted(qwen: str, tmp_path: Path) -> None:
    import ebbtide

    machine, out = tmp_path / "cpu.json", tmp_path / "plan.json"
    dataclasses.replace(MACHINES["h200"], name="cpu", devices=1, stores_on_disk=True).save(machine)
    asked = found(qwen, gpu=str(machine))
    asked = dataclasses.replace(asked, options=[named(asked, "ebbtide-minimal")])
    recipe.save(asked, str(out))
    predicted = load_plan(out).predicted
    config = SftConfig(model=qwen, max_length=1024)
    module = models.outline(config, model.read(config), "float32").to_empty(device="cpu").train()
    with torch.no_grad():
        for weight in (*module.parameters(), *module.buffers()):
            weight.fill_(0.01)
    with ebbtide.enable_activation_offloading(module, policy=out, disk_path=tmp_path) as handle:
        module(**model.Subject(config).batch()).loss.backward()
    stats = handle.stats()
    assert stats.offloaded_bytes == predicted.offloaded_bytes
    assert stats.recomputed_bytes == predicted.recomputed_bytes


# What a job adds


def matrix(optim: str, dtype: torch.dtype) -> float:
    model = nn.Linear(256, 64, bias=False, dtype=dtype, device="meta")
    return state_ratio(optim, model) * 256 * 64 * dtype.itemsize


@pytest.mark.parametrize(
    ("optim", "state"),
    [
        ("adamw", 2 * 256 * 64 * 2),
        ("adamw_8bit", 2 * (256 * 64 + 4 * 64)),  # a scale of 4 bytes for 256 numbers
        ("sgd", 0),
        ("sgd_momentum", 256 * 64 * 2),
        ("adafactor", 4 * (256 + 64)),
    ],
)
def test_each_optimizer_has_its_bytes(optim: str, state: int) -> None:
    assert matrix(optim, torch.bfloat16) == pytest.approx(state)


def test_the_optimizers_state_is_in_every_peak(qwen: str, result: Result) -> None:
    sgd = found(qwen, optim="sgd")
    more = (named(result, "plain").peak_bytes or 0) - (named(sgd, "plain").peak_bytes or 0)
    assert more == 2 * 2 * result.outline.trained
    assert "--optim sgd is for " in page.text(sgd)


def test_mixed_precision_has_float32_weights_and_bfloat16_products(qwen: str, result: Result) -> None:
    mixed, single = found(qwen, bf16=True), found(qwen, torch_dtype="float32")
    assert mixed.outline.dtype == "float32"
    assert mixed.profile.saved_bytes < single.profile.saved_bytes
    assert "--torch_dtype float32 --bf16 true" in page.command(mixed, mixed.options[0])
    assert found(qwen, bf16=True, train_type="lora").outline.dtype == "bfloat16"


def test_weights_in_4_bits_take_less_memory_and_more_time(qwen: str) -> None:
    lora, qlora = (known(qwen, max_length=512, train_type=kind) for kind in ("lora", "qlora"))
    linear = [m for m in lora.outline.module.modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad]
    numbers = sum(m.weight.numel() for m in linear) - 512 * 64  # the head stays
    less = (named(lora, "plain").peak_bytes or 0) - (named(qlora, "plain").peak_bytes or 0)
    assert less == int(numbers * (2 - QUANTISED_BYTES)) - 2 * 128 * 64
    bits = 8 * QUANTISED_BYTES
    assert bits == pytest.approx(4.127, abs=1e-4), "0.127 bits of scales for a weight: QLoRA, section 3"
    assert qlora.profile.forward_seconds > lora.profile.forward_seconds
    sizes = [[u.nbytes for b in one.profile.blocks for u in b.units] for one in (lora, qlora)]
    assert sizes[0] == sizes[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:bitsandbytes")
@pytest.mark.filterwarnings("ignore::FutureWarning:bitsandbytes")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")], ids=len)
def test_a_plan_for_weights_in_4_bits_is_carried_out_as_it_was_predicted(
    qwen: str, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    """bitsandbytes' products have no recompute rule, and names of their own."""
    bnb, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    import ebbtide

    asked, out = known(qwen, train_type="qlora", target_modules=targets), tmp_path / "plan.json"
    minimal = table_plan(follow(asked.profile, plan_for(Minimal())), "minimal")
    minimal.save(out)
    config = SftConfig(model=qwen, max_length=1024, train_type="qlora", target_modules=targets)
    plain = models.outline(config, model.read(config), "bfloat16").to_empty(device="cpu")
    with torch.no_grad():
        for weight in (*plain.parameters(), *plain.buffers()):
            weight.fill_(0.01)
    for name, part in list(plain.named_modules()):
        if isinstance(part, nn.Linear) and part is not plain.get_output_embeddings():
            four = bnb.nn.Linear4bit(
                part.in_features, part.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            four.load_state_dict(part.state_dict())
            plain.set_submodule(name, four.to("cpu"))
    vars(plain)["is_loaded_in_4bit"] = True
    module = peft.get_peft_model(plain, adapters.chosen(config, models.outline(config, model.read(config), "bfloat16")))
    with ebbtide.enable_activation_offloading(module.train(), policy=out, disk_path=tmp_path) as handle:
        module(**model.Subject(config).batch()).loss.backward()
    stats, predicted = handle.stats(), minimal.predicted
    assert stats.offloaded_bytes == predicted.moved_bytes
    cast_up = predicted.offloaded_bytes - predicted.moved_bytes  # what was offloaded in a narrower type
    assert stats.recomputed_bytes == predicted.recomputed_bytes + cast_up > cast_up > 0
    assert {site for site, _ in handle._engine.last_pass.sites} == {site for _, site in minimal.actions}


def test_gradients_of_earlier_micro_batches_are_there(qwen: str, result: Result) -> None:
    several = found(qwen, gradient_accumulation_steps=8)
    gradients = 2 * result.outline.trained
    assert several.profile.head_base_bytes - result.profile.head_base_bytes == gradients
    first, last = several.profile.blocks[0], several.profile.blocks[-1]
    assert first.forward_base_bytes - result.profile.blocks[0].forward_base_bytes == gradients
    added = last.backward_base_bytes - result.profile.blocks[-1].backward_base_bytes
    assert 0 < added < gradients
    assert several.profile.epilogue_seconds == pytest.approx(result.profile.epilogue_seconds / 8)
    assert "--gradient_accumulation_steps 8" in page.command(several, several.options[0])


def test_under_fsdp_gradients_of_earlier_micro_batches_are_whole(qwen: str) -> None:
    """So in every forward and backward ranks differ from one device alone by what they hold of weights and state."""
    several = found(qwen, gpus=4, gradient_accumulation_steps=8)
    pairs = zip(several.profile.blocks, found(qwen, gradient_accumulation_steps=8).profile.blocks, strict=True)
    names = ("forward_base_bytes", "backward_base_bytes", "checkpoint_base_bytes")
    bases = [(getattr(four, name), getattr(one, name)) for four, one in pairs for name in names]
    assert len({four - one for four, one in bases if four}) == 1  # no base is below 0
    assert "gradients of all weights on each rank" in page.text(several)


class Towers(nn.Module):
    """A tower that the input does not reach, before or after others whose blocks may run twice."""

    def __init__(self, *, before: bool, times: int) -> None:
        super().__init__()

        def stack(width: int) -> nn.ModuleList:
            return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3))

        if before:
            self.visual = stack(32)
        self.embed, self.layers, self.head = nn.Embedding(100, 64), stack(64), nn.Linear(64, 100)
        if not before:
            self.visual = stack(32)
        self.times = times

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in [*self.layers] * self.times:
            x = layer(x)
        return self.head(x)


def gradients(*modules: nn.Module) -> int:
    return sum(p.numel() * p.itemsize for module in modules for p in module.parameters())


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_that_a_pass_makes_last_or_never_are_those_of_earlier_ones(before: bool, times: int) -> None:
    with torch.device("meta"):
        model = Towers(before=before, times=times)
    one, several = (
        simulate_model(
            model, torch.zeros(4, 8, dtype=torch.long), MACHINES["h200"], options=Options(min_bytes=0),
            job=Job(micro_batches=count),
        ).blocks
        for count in (1, 8)
    )  # fmt: skip
    assert len(one) == len(several) == 3 * times
    more = [block.backward_base_bytes - alone.backward_base_bytes for block, alone in zip(several, one, strict=True)]
    for place, added in enumerate(more):
        made = gradients(*model.layers[place % 3 + 1 :] if place < 3 else ())
        total = gradients(model) - gradients(model.head) - made
        assert total - gradients(model.layers[0]) <= added <= total, place


def test_no_cache_of_keys_and_values_is_simulated(result: Result) -> None:
    """Trainers call models without one; its contents would count as saved."""
    assert not any("CatBackward" in u.site.node for b in result.profile.blocks for u in b.units)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (999, "999"), (999_499, "999499"), (999_885_952, "1 billion"), (134_515_008, "135 million"),
        (999_400_000_000, "999 billion"), (1_026_408_232_448, "1.03 trillion"),
    ],
)  # fmt: skip
def test_numbers_of_weights_are_written_in_three_digits(number: int, words: str) -> None:
    assert page._count(number) == words


# The picture


def test_the_picture_holds_every_option_and_the_bound(result: Result) -> None:
    points = picture.pareto(result.profile, result.options)
    assert [p.name for p in points.options] == [option.name for option in result.options]
    peaks = [p.peak_bytes for p in points.auto]
    assert peaks == sorted(peaks)
    assert len(points.auto) == picture.BUDGETS
    faster = dataclasses.replace(points.auto[0], step_ratio=0.997)
    assert picture._label(faster).endswith(", -0.3 %")
    bound = [p.step_ratio for p in points.bound]
    assert bound == sorted(bound, reverse=True)
    for point in points.auto:
        within = [p.step_ratio for p in points.bound if p.peak_bytes >= point.peak_bytes]
        assert point.step_ratio >= within[0] - 1e-9
    drawn = ElementTree.fromstring(picture.svg(points, "a <model>"))
    circles = [e for e in drawn.iter() if e.tag.endswith("circle")]
    assert len(circles) == 2 * len(points.options) + len(points.auto)
    assert len([e for e in drawn.iter() if e.tag.endswith("polyline")]) == 2


def test_no_option_is_faster_than_the_bound_where_a_second_forward_is_the_only_way(result: Result) -> None:
    """As with weights in 4 bits, whose products have no recipe, over a slow link."""
    slow = Rates(out_bytes_per_second=1e8, in_bytes_per_second=1e8)
    profile = dataclasses.replace(without_recipes(result.profile, narrow=False), rates=slow)
    points = picture.pareto(profile, options(profile, result.room, 0.05))
    assert {"checkpointing", "ebbtide-minimal, checkpointed"} <= {p.name for p in points.options}
    for point in (*points.options, *points.auto):
        within = [p.step_ratio for p in points.bound if p.peak_bytes >= point.peak_bytes]
        assert point.step_ratio >= within[0] - 1e-9, point.name
    assert max(p.step_ratio for p in points.bound) > 1.01


def test_the_points_are_in_the_json_and_the_picture_in_its_file(qwen: str, tmp_path: Path, result: Result) -> None:
    drawn = found(qwen, json=True, svg=str(tmp_path / "plan.svg"))
    values = json.loads(recipe.shown(drawn))
    assert values["schema"] == 3
    assert {"options", "auto", "bound"} == set(values["pareto"])
    assert recipe.draw(drawn, str(tmp_path / "plan.svg")).startswith("drawn    ")
    assert (tmp_path / "plan.svg").read_text().startswith("<svg ")
    assert page.as_values(result)["pareto"] is None
    found(qwen, svg=str(tmp_path / "plan.svg"))  # a picture may be drawn once more
    (tmp_path / "plan.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"/>')  # of another tool
    with pytest.raises(DataError, match="plan.svg' holds something else"):
        found(qwen, svg=str(tmp_path / "plan.svg"))
    with pytest.raises(DataError, match="cannot be written"):
        recipe.draw(drawn, str(tmp_path))


def test_each_named_machine_is_in_the_help_and_in_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/plan.md").read_text()
    (row,) = [line for line in guide.splitlines() if line.startswith("| `--gpu` |")]
    listed = [name for name in re.findall("`([^`]+)`", row) if name in MACHINES]
    assert listed == list(MACHINES)
    described = " ".join((PlanConfig.__doc__ or "").split()).partition("gpu: Device to plan for: ")[2]
    assert described.startswith(", ".join(MACHINES) + ", or a JSON file")

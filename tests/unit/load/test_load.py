"""``load_sharded`` in one process: what it fills and refuses, and that a refusal leaves the model on meta."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ebbtide
from ebbtide.base.errors import ConfigError, DataError, EbbtideError
from ebbtide.base.events import BUS
from ebbtide.load import Saving, filling
from ebbtide.load import load as load_module
from ebbtide.load.filling import Filling, Values
from ebbtide.load.fourbit import FourBit
from ebbtide.load.header import CheckpointEntry
from ebbtide.load.layout import Conversion
from ebbtide.load.names import Match, NameMap
from ebbtide.load.targets import targets_of
from ebbtide.load.together import Ranks
from ebbtide.store import pages as pages_module
from tests.helpers.failing import failing
from tests.helpers.pages import asked_for_huge_pages


class Rotary(nn.Module):
    """A buffer that no checkpoint has, computed in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0) * 2, persistent=False)


class RotaryThatResets(Rotary):
    def reset_parameters(self) -> None:
        self.inv_freq.copy_(torch.arange(4.0) * 2)


class Model(nn.Module):
    def __init__(self, *, tied: bool = False, rotary: str = "") -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if rotary:
            self.rotary = RotaryThatResets() if rotary == "resets" else Rotary()


def meta(**options: Any) -> Model:
    with torch.device("meta"):
        return Model(**options)


@pytest.fixture
def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {k: torch.randn(v.shape).to(v.dtype) for k, v in Model().state_dict().items()}


@pytest.fixture
def path(tmp_path: Path, values: dict[str, torch.Tensor]) -> Path:
    save_file(values, tmp_path / "model.safetensors")
    return tmp_path


def test_parameters_and_persistent_buffers_are_those_of_the_file(path: Path, values: dict[str, torch.Tensor]) -> None:
    model = ebbtide.load_sharded(meta(), path)
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    assert model.state_dict().keys() == values.keys()


def test_tied_weights_stay_one_and_may_have_either_name(path: Path, values: dict[str, torch.Tensor]) -> None:
    for key in ("embed.weight", "head.weight"):
        kept = {k: v for k, v in values.items() if k == key or not k.startswith(("embed", "head"))}
        model = ebbtide.load_sharded(meta(tied=True), kept)
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.head.weight, values[key])


def test_tied_weights_that_differ_in_the_checkpoint_are_refused(
    values: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    values["embed.weight"][3] = torch.nan
    same = values | {"head.weight": values["embed.weight"].clone()}
    loaded = ebbtide.load_sharded(meta(tied=True), same).head.weight
    assert torch.equal(loaded.isnan(), values["embed.weight"].isnan())
    with pytest.raises(DataError, match=r"embed\.weight and head\.weight differ.*one tied weight"):
        ebbtide.load_sharded(meta(tied=True), values)
    same["head.weight"][-1, -1] += 1  # in the last of several parts that are compared
    monkeypatch.setattr(filling, "_PART", 3 * values["embed.weight"].shape[1] + 1)
    with pytest.raises(DataError, match=r"embed\.weight and head\.weight differ.*one tied weight"):
        ebbtide.load_sharded(meta(tied=True), same)


@pytest.mark.parametrize("shape", [(12, 4), (4,)])
def test_a_tied_weight_of_another_shape_under_its_second_name_is_refused(
    values: dict[str, torch.Tensor], shape: tuple[int, ...]
) -> None:
    values["head.weight"] = torch.zeros(shape)
    with pytest.raises(DataError) as caught:
        ebbtide.load_sharded(meta(tied=True), values)
    words = f"1 of another shape: head.weight is {shape} in the checkpoint and (10, 4) in the model"
    assert words in caught.value.found and caught.value.hint


def test_initialising_takes_no_values_wherever_they_are(path: Path, values: dict[str, torch.Tensor]) -> None:
    for weights in (path, values, Model()):
        model = ebbtide.load_sharded(meta(), weights, source="initialize")
        assert model.norm.weight.eq(1).all() and not torch.equal(model.head.weight, values["head.weight"])


def test_a_computed_buffer_is_computed_again_or_named(path: Path) -> None:
    model = ebbtide.load_sharded(meta(rotary="resets"), path)
    assert torch.equal(model.rotary.inv_freq, torch.arange(4.0) * 2)
    with pytest.raises(DataError, match="no initializer found for rotary.inv_freq") as caught:
        ebbtide.load_sharded(meta(rotary="silent"), path)
    assert "init=" in caught.value.hint

    def init(module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.inv_freq.fill_(3)

    assert ebbtide.load_sharded(meta(rotary="silent"), path, init=init).rotary.inv_freq.eq(3).all()


def test_the_function_of_the_user_has_the_last_word() -> None:
    """As after ``model.apply(init)``, whatever the modules above set."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3)
            nn.init.constant_(module.bias, 4)

    with torch.device("meta"):
        model = nn.Transformer(d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, batch_first=True)
    loaded = ebbtide.load_sharded(model, init=init)
    linears = [module for module in loaded.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 7 and all(m.weight.eq(3).all() and m.bias.eq(4).all() for m in linears)
    assert loaded.encoder.layers[0].self_attn.in_proj_weight.std() > 0


def test_a_buffer_that_is_there_is_kept(path: Path) -> None:
    model = meta(rotary="silent")
    model.rotary.inv_freq = torch.full((4,), 5.0)
    assert ebbtide.load_sharded(model, path).rotary.inv_freq.eq(5).all()


def test_a_buffer_that_has_values_and_is_missing_is_reported(
    values: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def model(ignored: list[str] | None = None) -> Model:
        made = meta()
        made.norm.running_var, made.norm.num_batches_tracked = torch.full((4,), 2.0), torch.tensor(0)
        if ignored is not None:  # as a model of transformers
            made.base_model_prefix, made.config, made._keys_to_ignore_on_load_missing = "model", None, ignored
        return made

    del values["norm.running_var"], values["norm.num_batches_tracked"]
    with pytest.raises(DataError, match=r"1 missing: norm\.running_var"):
        ebbtide.load_sharded(model(), values)
    with caplog.at_level(logging.WARNING, "ebbtide.load"):
        loaded = ebbtide.load_sharded(model(), values, missing="initialize")
    assert loaded.norm.running_var.eq(2).all() and "kept as they are: norm.running_var" in caplog.text
    assert ebbtide.load_sharded(model(["running_var"]), values).norm.running_var.eq(2).all()


def test_a_loaded_model_gives_its_values_and_its_optimizer_follows() -> None:
    model = Model(tied=True, rotary="silent")
    model.head.weight.requires_grad_(False)
    model.rotary.inv_freq.fill_(5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    whole = weakref.ref(model.embed.weight)
    optimizer = torch.optim.SGD(model.parameters())
    on_meta: list[bool] = []
    loaded = ebbtide.load_sharded(
        model, shard=lambda m: on_meta.extend(p.is_meta for p in m.parameters()), optimizer=optimizer
    )
    assert loaded is model and on_meta and all(on_meta)
    assert {k: torch.equal(v, before[k]) for k, v in model.state_dict().items()} == dict.fromkeys(before, True)
    assert model.head.weight is model.embed.weight and not model.head.weight.requires_grad
    assert loaded.rotary.inv_freq.eq(5).all()
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)] == [True] * 3
    assert whole() is None  # the full copy is freed


def test_a_loaded_model_that_cannot_be_sharded_so_keeps_its_values() -> None:
    model = Model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ConfigError, match="dtype is"):
        ebbtide.load_sharded(model, dtype=torch.int8)
    assert {k: torch.equal(v, before[k]) for k, v in model.state_dict().items()} == dict.fromkeys(before, True)
    with pytest.raises(ConfigError, match="the model already has its parameters"):
        ebbtide.load_sharded(model, source="initialize")


def test_buffers_of_a_given_model_are_those_that_it_has_now() -> None:
    """Also those that no checkpoint saves, which cannot be computed on meta."""
    given = Model(rotary="silent")
    given.rotary.inv_freq.fill_(5)
    loaded = ebbtide.load_sharded(meta(rotary="silent"), given)
    assert loaded.rotary.inv_freq.eq(5).all() and torch.equal(loaded.norm.running_var, given.norm.running_var)
    resets = Model(rotary="resets")
    resets.rotary.inv_freq.fill_(5)  # not the value that the constructor would compute
    assert ebbtide.load_sharded(meta(rotary="resets"), resets).rotary.inv_freq.eq(5).all()
    there = meta(rotary="silent")
    there.rotary.inv_freq = torch.full((4,), 7.0)
    assert ebbtide.load_sharded(there, given).rotary.inv_freq.eq(7).all()
    with pytest.raises(DataError, match="no initializer found for rotary.inv_freq"):
        ebbtide.load_sharded(meta(rotary="silent"), given.state_dict())


def test_all_mismatches_are_reported_at_once(values: dict[str, torch.Tensor]) -> None:
    del values["embed.weight"]
    values |= {"spare": torch.ones(1), "head.weight": torch.ones(10, 5), "norm.bias": torch.ones(4, dtype=torch.int8)}
    model = meta()
    with pytest.raises(DataError) as caught:
        ebbtide.load_sharded(model, values)
    text = str(caught.value)
    assert "1 missing: embed.weight" in text
    assert "1 unexpected: spare" in text
    assert "1 of another shape: head.weight is (10, 5) in the checkpoint and (10, 4) in the model" in text
    assert "1 of a dtype that cannot be converted: norm.bias is int8 in the checkpoint and float32 in the model" in text
    assert all(p.is_meta for p in model.parameters())


def test_of_another_models_checkpoint_the_first_names_are_listed_and_no_name_is_proposed() -> None:
    other = {f"layers.{number}.weight": torch.ones(1) for number in range(30)}
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(DataError) as caught:
        ebbtide.load_sharded(model, other)
    assert "30 unexpected: layers.0.weight, " in str(caught.value) and " and 22 more" in caught.value.found
    assert caught.value.hint.startswith("build the model from")


def test_what_is_missing_or_unexpected_can_be_allowed(values: dict[str, torch.Tensor]) -> None:
    del values["embed.weight"]
    values["spare"] = torch.ones(1)
    model = ebbtide.load_sharded(meta(), values, missing="initialize", unexpected="ignore")
    assert model.embed.weight.std() > 0.5 and torch.equal(model.head.weight, values["head.weight"])


def test_a_second_model_has_other_first_values_and_a_seed_repeats_them(values: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(1)
    first, second = (ebbtide.load_sharded(meta()).head.weight for _ in range(2))
    assert first.std() > 0 and not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(ebbtide.load_sharded(meta()).head.weight, first)
    assert torch.equal(ebbtide.load_sharded(meta()).head.weight, second)
    state = torch.get_rng_state()
    ebbtide.load_sharded(meta(rotary="resets"), values)
    assert torch.equal(torch.get_rng_state(), state), "nothing was drawn"


def test_tensors_without_elements_need_no_values(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Linear(2, 2)
        model.none = nn.Parameter(torch.zeros(0, 4))
        model.register_buffer("nothing", torch.zeros(3, 0))
        return model

    model = ebbtide.load_sharded(meta_of(make))
    assert model.weight.any() and model.none.shape == (0, 4) and model.nothing.shape == (3, 0)
    ebbtide.save_sharded(model, tmp_path)
    loaded = ebbtide.load_sharded(meta_of(make), tmp_path)
    assert loaded.none.shape == (0, 4) and torch.equal(loaded.weight, model.weight)


def test_numbers_in_eight_bits_are_not_taken_for_values(values: dict[str, torch.Tensor]) -> None:
    values["head.weight"] = values["head.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(DataError, match="head.weight is float8_e4m3fn in the checkpoint") as caught:
        ebbtide.load_sharded(meta(), values)
    assert caught.value.hint.startswith("convert them in the checkpoint")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_dtype_is_that_of_parameters(path: Path, values: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    model = ebbtide.load_sharded(meta(), path, dtype=dtype)
    assert torch.equal(model.head.weight, values["head.weight"].to(dtype))
    assert torch.equal(model.norm.running_mean, values["norm.running_mean"])


def widened(model: nn.Module) -> None:
    """Shard a model as accelerate does for mixed precision: its weights become float32."""
    model.float()


@pytest.mark.parametrize("given", ["a file", "values", "a model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_and_buffers_that_shard_widens_are_rounded_first(
    tmp_path: Path, values: dict[str, torch.Tensor], dtype: torch.dtype, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a model that was loaded in its own dtype and then widened."""
    values["head.weight"] = values["embed.weight"].to(dtype).float()  # equal once both are rounded
    real = Model(tied=True, rotary="silent")
    real.load_state_dict(values)
    save_file(values, tmp_path / "model.safetensors")
    weights: Any = {"a file": tmp_path, "values": values, "a model": real}[given]
    model = meta(tied=True, rotary="silent" if given == "a model" else "").to(dtype)
    monkeypatch.setattr(filling, "_PART", 3)  # less than a row
    loaded = ebbtide.load_sharded(model, weights, shard=widened)
    if given == "a model":
        real.rotary.inv_freq.add_(1e-3)
        loaded = ebbtide.load_sharded(meta(tied=True, rotary="silent").to(dtype), real, shard=widened)
        assert torch.equal(loaded.rotary.inv_freq, real.rotary.inv_freq.to(dtype).float())
    wanted = real.to(dtype).float().state_dict()
    assert not torch.equal(wanted["norm.running_mean"], values["norm.running_mean"])
    found = loaded.state_dict()
    assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in wanted.items()}
    assert {k: torch.equal(v, wanted[k]) for k, v in found.items()} == dict.fromkeys(wanted, True)
    assert loaded.head.weight is loaded.embed.weight
    values["head.weight"][-1, -1] += 1
    with pytest.raises(DataError, match="one tied weight"):
        ebbtide.load_sharded(meta(tied=True).to(dtype), values, shard=widened)


def test_the_dtype_before_shard_is_the_one_that_was_asked_for(path: Path, values: dict[str, torch.Tensor]) -> None:
    """Or that of the model's library."""
    model = meta()
    model._keep_in_fp32_modules = ["head"]
    loaded = ebbtide.load_sharded(model, path, dtype=torch.bfloat16, shard=widened)
    assert torch.equal(loaded.head.weight, values["head.weight"])
    assert torch.equal(loaded.embed.weight, values["embed.weight"].bfloat16().float())
    loaded = ebbtide.load_sharded(meta().bfloat16(), path, dtype=torch.float32, shard=widened)
    assert torch.equal(loaded.embed.weight, values["embed.weight"])


def test_values_of_one_size_and_another_dtype_are_rounded(values: dict[str, torch.Tensor]) -> None:
    values = {name: value.bfloat16() if value.is_floating_point() else value for name, value in values.items()}
    values["head.weight"][0] = 1e5  # more than float16 holds
    model = ebbtide.load_sharded(meta().half(), values, shard=widened)
    assert model.head.weight[0].isinf().all()
    assert torch.equal(model.head.weight, values["head.weight"].half().float())


@pytest.mark.parametrize(
    ("stored", "before", "after"),
    [("bfloat16", "bfloat16", "float32"), ("bfloat16", "float32", "float64"), ("float32", "float32", "float32")]
    + [("float32", "bfloat16", "bfloat16"), ("float32", "float32", "bfloat16"), ("float64", "float32", "bfloat16")],
)
def test_weights_are_gone_over_again_only_to_round_them(
    values: dict[str, torch.Tensor], stored: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = [getattr(torch, name) for name in (stored, before, after)]
    given = {k: v.to(dtypes[0]) if v.is_floating_point() else v for k, v in values.items()}
    monkeypatch.setattr(filling, "_parts", None)
    model = ebbtide.load_sharded(meta().to(dtypes[1]), given, shard=lambda m: m.to(dtypes[2]))
    wanted = {k: v.to(dtypes[1]).to(dtypes[2]) if v.is_floating_point() else v for k, v in given.items()}
    assert {k: torch.equal(v, wanted[k]) for k, v in model.state_dict().items()} == dict.fromkeys(wanted, True)


def test_weights_that_are_converted_whole_are_rounded_too() -> None:
    """By a conversion that cannot be followed slice by slice."""
    value = torch.randn(3, 4)
    conversion = Conversion(
        keys=("a",), shapes={"weight": torch.Size((4, 3))}, convert=lambda tensors: {"weight": tensors["a"].t()}
    )
    match = Match(names=("weight",), base="weight", dtype=torch.bfloat16, source=conversion)
    model = meta_of(lambda: nn.Linear(3, 4, bias=False))
    targets = targets_of(model, torch.device("cpu"))
    entries = {"a": CheckpointEntry(shape=(3, 4), dtype=torch.float32)}
    plan = NameMap(matches={"weight": match})
    Filling(plan, targets, entries, FourBit(model, None)).fill(Values({"a": value}), lambda nbytes: None)
    assert torch.equal(targets["weight"].local, value.t().bfloat16().float())


def test_memory_formats_stay() -> None:
    def convolution() -> nn.Module:
        return nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)

    with torch.device("meta"):
        empty = convolution()
    values = convolution()
    for model in (ebbtide.load_sharded(empty, values.state_dict()), ebbtide.load_sharded(convolution())):
        assert model.weight.stride() == values.weight.stride() == (36, 1, 12, 4)
    assert torch.equal(empty.weight, values.weight)


def test_an_optimizer_that_was_there_before_holds_the_new_parameters(path: Path) -> None:
    model = meta(tied=True)
    groups = [{"params": list(model.norm.parameters()), "lr": 0.5}, {"params": [model.head.weight]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    ebbtide.load_sharded(model, tied_values(path), optimizer=optimizer)
    assert [len(g["params"]) for g in optimizer.param_groups] == [2, 1]
    assert optimizer.param_groups[1]["params"][0] is model.embed.weight
    assert optimizer.param_groups[0]["lr"] == 0.5
    before = model.embed.weight.detach().clone()
    model.embed(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.embed.weight)


def test_an_optimizer_that_keeps_its_list_of_parameters_trains_the_new_ones() -> None:
    model = meta_of(lambda: nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    ebbtide.load_sharded(model, {"weight": torch.ones(1, 4)}, optimizer=optimizer)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(torch.ones(2, 4)) - 1).square().mean()
        value.backward()
        return value.detach()  # LBFGS of torch 2.8 warns of a value that needs a gradient

    optimizer.step(loss)
    assert not torch.equal(model.weight, torch.ones(1, 4))


def test_an_optimizer_whose_parameters_a_wrapper_flattens_is_refused_before_anything_is_read() -> None:
    model, values = meta_of(lambda: nn.Linear(4, 1)), nn.Linear(4, 1).state_dict()
    optimizer = torch.optim.AdamW(model.parameters())
    read: list[int] = []

    def flatten(model: nn.Module) -> None:
        del model.bias
        model.flat = nn.Parameter(torch.zeros(1))

    with pytest.raises(ConfigError, match="'bias' is part of a flat parameter"):
        ebbtide.load_sharded(
            model, values, shard=flatten, optimizer=optimizer, progress=lambda done, _: read.append(done)
        )
    assert not read and model.weight.is_meta and optimizer.param_groups[0]["params"][0] is model.weight


def meta_of(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def tied_values(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for k, v in load_file(path / "model.safetensors").items() if k != "head.weight"}


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[next(model.parameters())]["step"] = 1
    return optimizer


REFUSALS: dict[str, tuple[Callable[[nn.Module, Path], dict[str, Any]], str]] = {
    "a started optimizer": (lambda m, p: {"optimizer": _stepped(m)}, "the optimizer already has state"),
    "an optimizer of others": (
        lambda m, p: {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)},
        "holds a parameter that is not the model's",
    ),
    "no optimizer": (lambda m, p: {"optimizer": 3}, "optimizer is a int"),
    "no source": (lambda m, p: {"source": "slice"}, "source is 'slice'"),
    "no dtype": (lambda m, p: {"dtype": torch.int8}, "dtype is torch.int8"),
    "no function": (lambda m, p: {"shard": 3}, "shard is 3"),
    "no path": (lambda m, p: {"weights": 3}, "weights is a int"),
    "bytes": (lambda m, p: {"weights": b"model"}, "weights is a bytes"),
    "no paths": (lambda m, p: {"weights": [p, 3]}, "weights is a list"),
    "a word for missing": (lambda m, p: {"missing": "ok"}, "missing is 'ok'"),
    "nothing there": (lambda m, p: {"weights": p / "not-here"}, "not-here' does not exist"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_used_is_refused_and_the_model_stays_on_meta(path: Path, name: str) -> None:
    change, message = REFUSALS[name]
    model = meta()
    arguments = {"weights": path, "dtype": torch.bfloat16, **change(model, path)}
    with pytest.raises(EbbtideError) as caught:
        ebbtide.load_sharded(model, arguments.pop("weights"), **arguments)
    assert message in str(caught.value)
    assert caught.value.expected and caught.value.hint
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())


def test_models_that_weights_cannot_be_loaded_into_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="the model already has its parameters"):
        ebbtide.load_sharded(Model(), path)
    with pytest.raises(ConfigError, match="model is a type"):
        ebbtide.load_sharded(Model, path)  # type: ignore[arg-type]
    quantised = meta()
    quantised.head.weight = type("Int8Params", (nn.Parameter,), {})(quantised.head.weight)
    with pytest.raises(ConfigError, match=r"'head.weight' is quantised \(Int8Params\)"):
        ebbtide.load_sharded(quantised, path)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("build", [meta, Model], ids=["on meta", "loaded"])
def test_hooks_for_gradients_are_not_lost_silently(build: Callable[[], Model], register: str) -> None:
    model = build()
    getattr(model.norm.weight, register)(lambda _: None)
    with pytest.raises(ConfigError, match="'norm.weight' has a hook for its gradient.*\n?.*\nhint: register"):
        ebbtide.load_sharded(model)


def test_a_function_that_wraps_may_fail(path: Path) -> None:
    def shard(model: nn.Module) -> None:
        raise ValueError("no mesh")

    model = meta()
    with pytest.raises(ValueError, match="no mesh"):
        ebbtide.load_sharded(model, path, shard=shard, dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("result", [[], True, (1, 2)])
def test_a_function_that_wraps_returns_a_module(path: Path, result: object) -> None:
    model = meta()
    with pytest.raises(ConfigError, match=f"the function passed as shard= returned a {type(result).__name__}"):
        ebbtide.load_sharded(model, path, shard=lambda _: result)  # type: ignore[arg-type, return-value]
    assert all(p.is_meta for p in model.parameters())


class Locked(nn.Linear):
    """A module that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_is_loaded_if_all_of_it_has_values() -> None:
    values = nn.Linear(4, 4).state_dict()
    model = ebbtide.load_sharded(meta_of(Locked), values)
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    with pytest.raises(ConfigError, match="cannot be copied .*lock") as caught:
        ebbtide.load_sharded(meta_of(Locked), {"weight": values["weight"]}, missing="initialize")
    assert "'bias'" in str(caught.value) and caught.value.hint


def test_a_model_that_comes_back_inside_of_another_is_refused(path: Path) -> None:
    model = meta()
    optimizer = torch.optim.SGD(model.parameters())
    for given in (None, optimizer):
        with pytest.raises(ConfigError, match=r"'model.embed.weight' on meta, which is new.*\n?.*\nhint: return"):
            ebbtide.load_sharded(model, path, shard=lambda m: nn.ModuleDict({"model": m}), optimizer=given)
    assert all(p.is_meta for p in model.parameters())


class Sizeless(nn.Module):
    """A wrapper whose length is that of a module that has none, as in torch.compile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def __len__(self) -> int:
        raise TypeError("this model has no len()")


def test_a_wrapper_without_a_truth_value_is_returned(path: Path, values: dict[str, torch.Tensor]) -> None:
    wrapped = ebbtide.load_sharded(meta(), path, shard=Sizeless)
    assert isinstance(wrapped, Sizeless)
    assert all(torch.equal(v, values[k]) for k, v in wrapped._orig_mod.state_dict().items())


def test_a_loaded_model_keeps_its_values_if_it_is_not_wrapped() -> None:
    def shard(model: nn.Module) -> None:
        raise ValueError("no mesh")

    model = Model(tied=True)
    model.norm.kept = [model.norm.weight]
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="no mesh"):
        ebbtide.load_sharded(model, shard=shard)
    assert all(p is before[name] for name, p in model.named_parameters()) and not model.embed.weight.is_meta
    assert model.head.weight is model.embed.weight and model.norm.kept[0] is model.norm.weight

    def half(model: Model) -> None:
        model.head.weight = nn.Parameter(torch.empty(3, device="meta"))  # as sharding replaces it
        raise ValueError("no mesh")

    with pytest.raises(ValueError, match="no mesh"):
        ebbtide.load_sharded(model, shard=half)
    assert all(p.is_meta for p in model.parameters())  # full values in a sharded part would be no valid model


def test_files_are_read_ahead_from_before_the_model_is_wrapped_until_it_is_read(
    path: Path, values: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    class Ahead(load_module.ReadAhead):
        def __enter__(self) -> load_module.ReadAhead:
            heard.append(f"begin {sum(e.nbytes for e in self._entries)} of {self._parts}")
            return super().__enter__()

        def __exit__(self, *exception: object) -> None:
            heard.append("end")
            super().__exit__(*exception)

    def shard(model: nn.Module) -> None:
        heard.append("shard")

    monkeypatch.setattr(load_module, "ReadAhead", Ahead)
    total = sum(v.numel() * v.element_size() for v in values.values())
    ebbtide.load_sharded(meta(rotary="resets"), path, shard=shard, progress=lambda done, total: heard.append("read"))
    assert heard[:3] == [f"begin {total} of 1", "shard", "end"]
    assert set(heard[3:]) == {"read"}
    heard.clear()
    ebbtide.load_sharded(meta(), values, shard=shard)
    ebbtide.load_sharded(meta(rotary="resets"), source="initialize", init=lambda module: None, shard=shard)
    assert heard == ["shard"] * 2, "values in memory and first values have no files"


def test_slices_are_read_in_the_order_of_the_files(
    tmp_path: Path, values: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, names in enumerate((["head.weight", "norm.bias"], set(values) - {"head.weight", "norm.bias"})):
        save_file({name: values[name] for name in names}, tmp_path / f"{number}.safetensors")
    places: list[tuple[str, int]] = []

    class Reader(load_module.SliceReader):
        def read(self, pieces: Any, done: Any = None) -> None:
            found = list(pieces)
            places.extend((self._entries[p.key].file, self._entries[p.key].offset_bytes) for p in found)
            super().read(found, done)

    monkeypatch.setattr(load_module, "SliceReader", Reader)
    loaded = ebbtide.load_sharded(meta(), [tmp_path / "0.safetensors", tmp_path / "1.safetensors"])
    assert {k: torch.equal(v, values[k]) for k, v in loaded.state_dict().items()} == dict.fromkeys(values, True)
    assert places == sorted(places) and len(places) == len(values)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are asked for on Linux")
def test_large_shards_ask_for_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    monkeypatch.setattr(pages_module, "host_reclaims_pages", lambda: False)
    save_file({"weight": torch.randn(2048, 1024)}, tmp_path / "model.safetensors")
    loaded = ebbtide.load_sharded(nn.Linear(1024, 2048, bias=False, device="meta"), tmp_path)
    first = loaded.weight.data_ptr()
    assert asked_for_huge_pages(first + mmap.PAGESIZE, first + loaded.weight.nbytes - mmap.PAGESIZE)


def test_ranks_on_several_machines_read_only_their_slices(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = load_module.Loading._choose

    def choose(self: load_module.Loading, sights: Any) -> None:
        real(self, [sights[0], {**sights[0], "host": "another"}])

    class Reader(load_module.SliceReader):
        def __init__(self, *args: Any, ahead: bool, **kwargs: Any) -> None:
            asked.append(ahead)
            super().__init__(*args, ahead=ahead, **kwargs)

    monkeypatch.setattr(load_module, "SliceReader", Reader)
    ebbtide.load_sharded(meta(), path)
    monkeypatch.setattr(load_module.Loading, "_choose", choose)
    monkeypatch.delattr(load_module, "ReadAhead")  # would be an error if it was used
    ebbtide.load_sharded(meta(), path)
    assert asked == [True, False]


def test_progress_and_events_tell_the_way(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    remove = BUS.subscribe(lambda kind, fields: heard.append((kind, dict(fields))))
    told: list[tuple[int, int]] = []
    try:
        with caplog.at_level(logging.INFO, "ebbtide.load"):
            ebbtide.load_sharded(meta(), path, progress=lambda done, total: told.append((done, total)))
    finally:
        remove()
    total = sum(v.numel() * v.element_size() for v in load_file(path / "model.safetensors").values())
    assert told[-1] == (total, total)
    assert [f["edge"] for k, f in heard if k == "load"][0] == "begin"
    assert heard[-1][1] | {"seconds": 0} == {
        "edge": "end", "source": "slices", "rank": 0, "bytes": total, "seconds": 0,
    }  # fmt: skip
    assert "loading by slices: every rank sees the checkpoint" in caplog.text


def test_saving_and_loading_gives_the_same_and_replaces_what_was_there(path: Path, tmp_path: Path) -> None:
    model = ebbtide.load_sharded(meta(tied=True), tied_values(path))
    out = tmp_path / "out"
    ebbtide.save_sharded(model, out, max_file_bytes=100)
    assert len(list(out.glob("model-*-of-*.safetensors"))) == 2
    again = ebbtide.load_sharded(meta(tied=True), out)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    ebbtide.save_sharded(again, out)
    assert [f.name for f in out.iterdir()] == ["model.safetensors"]
    saved = load_file(out / "model.safetensors")
    assert "head.weight" not in saved and torch.equal(saved["embed.weight"], model.embed.weight)


def test_a_tensor_on_meta_that_is_no_buffer_is_named(path: Path) -> None:
    model = meta()
    model.norm.table = torch.ones(3, device="meta")
    with pytest.raises(ConfigError, match=r"'norm\.table' is on meta.*\nhint: .*init_empty_weights"):
        ebbtide.load_sharded(model, path)
    assert all(parameter.is_meta for parameter in model.parameters()), "found before anything was read"
    del model.norm.table
    model.norm.__dict__["second"] = model.norm.weight  # another name for it
    assert ebbtide.load_sharded(model, path).norm.__dict__["second"] is model.norm.weight
    with torch.device("meta"):
        normed = nn.utils.spectral_norm(nn.Linear(4, 10))  # computes its weight from another in each forward
    values = {key: value.clone() for key, value in nn.utils.spectral_norm(nn.Linear(4, 10)).state_dict().items()}
    assert ebbtide.load_sharded(normed, values)(torch.ones(2, 4)).isfinite().all()


class Pair(NamedTuple):
    """A tuple whose constructor takes no list."""

    one: torch.Tensor
    other: int


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda tensor: [1, tensor],
    "tuple": lambda tensor: (tensor, "a"),
    "named": lambda tensor: Pair(tensor, 3),
    "dict": lambda tensor: {"a": tensor},
    "set": lambda tensor: {tensor},
    "nested": lambda tensor: {"a": [(tensor,)]},
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_tensors_in_lists_and_dicts_follow_the_parameters_or_are_named(
    path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = meta()
    model.norm.kept = HOLDERS[kind](torch.ones(3, device="meta"))
    model.norm.queue = [torch.empty(0, device="meta")]  # nothing to lose
    assert ebbtide.load_sharded(model, path) is model
    assert "1 attributes have tensors on meta, which are not loaded: norm.kept" in caplog.text
    model = meta()
    model.norm.kept = HOLDERS[kind](model.norm.weight)
    loaded = ebbtide.load_sharded(model, path)
    found = str(loaded.norm.kept)
    assert found == str(HOLDERS[kind](loaded.norm.weight)) and "meta" not in found
    loaded.norm.kept = [model.norm.weight]
    loaded.norm.kept.append(loaded.norm.kept)  # it contains itself
    assert ebbtide.load_sharded(loaded).norm.kept[0] is loaded.norm.weight


@pytest.mark.parametrize("loaded", [False, True])
def test_second_names_follow_what_is_sharded_and_what_is_left_behind_is_named(
    path: Path, loaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model() if loaded else meta()
    model.norm.__dict__["second"] = model.norm.weight
    model.trained = list(model.parameters())

    def shard(model: nn.Module) -> None:
        model.norm.weight = nn.Parameter(torch.empty(4, device="meta"))
        model.norm.__dict__["other"] = torch.empty(4, device="meta")

    assert ebbtide.load_sharded(model, None if loaded else path, shard=shard) is model
    assert model.norm.__dict__["second"] is model.norm.weight and not model.norm.weight.is_meta
    assert [held is now for held, now in zip(model.trained, model.parameters(), strict=True)] == [True] * 4
    assert "1 attributes have tensors on meta, which are not loaded: norm.other" in caplog.text


NORMS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "old weight norm": nn.utils.weight_norm,
    "weight norm": nn.utils.parametrizations.weight_norm,
    "old spectral norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_whose_weights_are_computed_are_loaded(norm: str, kind: Any) -> None:
    real = NORMS[norm](kind(4, 4), "weight_hh_l0").eval()
    with torch.device("meta"):
        model = NORMS[norm](kind(4, 4), "weight_hh_l0").eval()
    ebbtide.load_sharded(model, {key: value.clone() for key, value in real.state_dict().items()})
    assert torch.equal(model(torch.ones(1, 3, 4))[0], real(torch.ones(1, 3, 4))[0])


def test_an_attribute_of_a_similar_name_hides_no_tensor_on_meta(path: Path) -> None:
    model = meta()
    model.norm.running = torch.ones(3, device="meta")  # not computed from running_mean
    with pytest.raises(ConfigError, match=r"'norm\.running' is on meta"):
        ebbtide.load_sharded(model, path)


class Table(nn.Module):
    def __init__(self, table: torch.Tensor, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=persistent)


@pytest.mark.parametrize("persistent", [(False, True), (True, False), (False, False)])
def test_a_buffer_that_any_module_saves_is_saved_under_that_name(tmp_path: Path, persistent: tuple[bool, bool]) -> None:
    table = torch.arange(4.0)
    model = nn.Sequential(*(Table(table, persistent=one) for one in persistent), nn.Linear(2, 2))
    ebbtide.save_sharded(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_a_model_under_ddp_is_saved_under_its_own_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        ebbtide.save_sharded(nn.parallel.DistributedDataParallel(model), tmp_path)
    finally:
        torch.distributed.destroy_process_group()
    (file,) = tmp_path.glob("*.safetensors")
    assert load_file(file).keys() == {"weight", "bias"}


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'embed.weight' is on meta"):
        ebbtide.save_sharded(meta(), tmp_path)
    with pytest.raises(ConfigError, match="model is a OrderedDict; expected a torch.nn.Module.*\nhint: "):
        ebbtide.save_sharded(Model().state_dict(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written .*\nhint: choose a folder"):
        ebbtide.save_sharded(Model(), tmp_path / "file")


NO_FILES = [("name", value) for value in ("", "a/b", "../up", "a\0", 3)] + [("max_file_bytes", n) for n in (0, -1)]


@pytest.mark.parametrize(("option", "value"), NO_FILES)
def test_a_name_or_a_size_that_no_file_has_is_refused(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option} is "):
        ebbtide.save_sharded(nn.Linear(2, 2), tmp_path / "out", **{option: value})
    assert not (tmp_path / "out").exists()


def test_8_bit_weights_are_not_saved_without_their_scales(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.weight = type("Int8Params", (nn.Parameter,), {})(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="'weight' is quantised to 8 bits"):
        ebbtide.save_sharded(model, tmp_path)


class Extra(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)


class Own(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = torch.ones(1)


def test_state_that_is_not_saved_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ebbtide.save_sharded(nn.Sequential(Extra(2, 2), nn.Linear(2, 2), Own(2, 2)), tmp_path)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("0, 2 save state of their own")
    caplog.clear()
    ebbtide.save_sharded(Model(), tmp_path)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_tensors_that_are_made_of_others_are_refused(path: Path, tmp_path: Path) -> None:
    two = nn.Parameter(TwoTensor(torch.ones(10, 4), torch.zeros(10, 4)))
    model = Model()
    model.head.weight = two
    with pytest.raises(ConfigError, match=r"'head\.weight' is a TwoTensor"):
        ebbtide.save_sharded(model, tmp_path / "out")
    model = meta()
    model.head.weight = nn.Parameter(two.detach().to("meta"))
    with pytest.raises(ConfigError, match=r"'head\.weight' is a TwoTensor"):
        ebbtide.load_sharded(model, path)
    assert isinstance(model.head.weight, TwoTensor) and model.head.weight.is_meta


class Marked(nn.Parameter):
    """A parameter with an attribute, as libraries make them."""


def test_parameters_keep_their_class(path: Path) -> None:
    model = meta()
    model.head.weight = Marked(model.head.weight)
    model.head.weight.tag = "a"  # type: ignore[attr-defined]
    model.head.weight.requires_grad_(False)
    loaded = ebbtide.load_sharded(model, path).head.weight
    assert type(loaded) is Marked and loaded.tag == "a" and not loaded.requires_grad
    assert torch.equal(loaded, load_file(path / "model.safetensors")["head.weight"])


def test_lazily_conjugated_values_are_saved_as_they_are(tmp_path: Path) -> None:
    model, value = nn.Module(), torch.tensor([1 + 2j, 3 - 4j]).conj()
    model.register_buffer("conjugate", value)
    model.register_buffer("negative", value.imag)
    assert value.is_conj() and value.imag.is_neg()
    ebbtide.save_sharded(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["conjugate"].tolist() == [1 - 2j, 3 + 4j] and saved["negative"].tolist() == [-2, 4]


@pytest.mark.parametrize("other", [[[4], "F32"], [[4, 10], "BF16"]])
def test_ranks_that_save_different_tensors_under_one_name_are_named(tmp_path: Path, other: list[Any]) -> None:
    saving = Saving(nn.Linear(10, 4), tmp_path, Ranks(lambda ranks, about, text: {}), max_file_bytes=100, name="model")
    alone = saving.ranks.run_on_all_ranks
    saving.ranks.run_on_all_ranks = lambda about, act: [*alone(about, act), {"weight": other}]  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"'weight' is F32 \(4, 10\) on rank 0 and (F32 \(4,\)|BF16 .*) on rank 1"):
        saving.run()
    assert not list(tmp_path.iterdir())


def test_a_save_that_is_killed_while_files_are_named_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ebbtide.save_sharded(Model(), tmp_path, max_file_bytes=100)
    plain, names = Path.replace, list[str]()

    def killed(self: Path, target: Path) -> Path:
        names.append(target.name)
        if len(names) == 2:
            raise KeyboardInterrupt
        return plain(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        ebbtide.save_sharded(Model(), tmp_path, max_file_bytes=100)
    with pytest.raises(DataError, match="and no index of a model"):
        ebbtide.load_sharded(meta(), tmp_path)


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, synced = os.fsync, list[str]()

    def fsync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        plain(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    ebbtide.save_sharded(Model(), tmp_path, max_file_bytes=100)
    assert sorted(synced) == sorted(f"{file.name}.part" for file in tmp_path.iterdir()) and len(synced) > 2


def test_a_save_that_fails_leaves_what_was_there_and_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    ebbtide.save_sharded(model, tmp_path, max_file_bytes=100)
    before = sorted(file.name for file in tmp_path.iterdir())
    (tmp_path / "model.safetensors.part").write_bytes(b"of a save that was killed")
    with monkeypatch.context() as patch, pytest.raises(DataError, match="No space left on device"):
        patch.setattr(os, "pwrite", failing(errno.ENOSPC))
        ebbtide.save_sharded(Model(), tmp_path, max_file_bytes=100)
    assert sorted(file.name for file in tmp_path.glob("*.safetensors*") if file.suffix != ".part") == before
    assert [file.name for file in tmp_path.glob("*.part")] == ["model.safetensors.part"]
    ebbtide.save_sharded(model, tmp_path, max_file_bytes=100)
    assert sorted(file.name for file in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("write", "found", "hint"),
    [
        (failing(errno.EDQUOT), os.strerror(errno.EDQUOT), "free some space"),
        (failing(errno.EIO), os.strerror(errno.EIO), "see the system log"),
        (lambda *_: 0, "short write: 0 of ", "see the system log"),
    ],
)
def test_only_a_full_disk_is_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., int], found: str, hint: str
) -> None:
    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(DataError, match=found) as caught:
        ebbtide.save_sharded(Model(), tmp_path)
    assert hint in caught.value.hint


def test_a_model_of_more_files_than_a_process_may_open_is_saved(tmp_path: Path) -> None:
    import resource

    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(40)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 8, limits[1]))
    try:
        ebbtide.save_sharded(model, tmp_path, max_file_bytes=64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list(tmp_path.glob("*.safetensors"))) == 40

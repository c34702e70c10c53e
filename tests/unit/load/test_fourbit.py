"""4-bit weights in one process: columns and scales equal the library's, made while loading or read from disk."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

import ebbtide
from ebbtide.base.errors import ConfigError, DataError
from tests.helpers.failing import failing
from tests.helpers.torches import NO_INTEGERS, shards_integers

bnb = pytest.importorskip("bitsandbytes")

MIB = 1 << 20


def linear(storage: torch.dtype, *, nested: bool, kind: str = "nf4") -> Any:
    return bnb.nn.Linear4bit(
        64, 96, bias=True, compute_dtype=torch.bfloat16, compress_statistics=nested, quant_type=kind,
        quant_storage=storage,
    )  # fmt: skip


def meta(storage: torch.dtype = torch.uint8, *, nested: bool = False, kind: str = "nf4") -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(linear(storage, nested=nested, kind=kind), nn.LayerNorm(96))


@pytest.fixture
def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {k: torch.randn(v.shape) for k, v in meta().state_dict().items()}


def whole(values: dict[str, torch.Tensor], storage: torch.dtype, *, nested: bool, kind: str) -> nn.Sequential:
    """Build and quantise like the library."""
    model = nn.Sequential(linear(storage, nested=nested, kind=kind), nn.LayerNorm(96))
    model.load_state_dict(values)
    return model.to("cpu")


def bits(model: nn.Module) -> dict[str, bytes]:
    """Return parameters and scales as bytes: packed numbers in a floating-point dtype may be NaN."""
    return {k: v.reshape(-1).view(torch.uint8).numpy().tobytes() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_columns_and_scales_are_those_of_the_library(
    values: dict[str, torch.Tensor], tmp_path: Path, storage: torch.dtype, nested: bool, kind: str
) -> None:
    wanted = whole(values, storage, nested=nested, kind=kind)
    save_file(values, tmp_path / "model.safetensors")
    model = ebbtide.load_sharded(meta(storage, nested=nested, kind=kind), tmp_path)
    assert bits(model) == bits(wanted)
    assert len(bits(model)) >= 8 - (not nested) * 2
    weight, other = model[0].weight, wanted[0].weight
    assert type(weight) is type(other) and weight.dtype == storage and not weight.requires_grad
    assert model[0].quant_state is weight.quant_state and weight.bnb_quantized
    x = torch.randn(2, 64, requires_grad=True)
    assert torch.equal(model(x), wanted(x))


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_what_was_quantised_is_saved_and_loaded_with_its_scales(
    values: dict[str, torch.Tensor], tmp_path: Path, nested: bool
) -> None:
    model = ebbtide.load_sharded(meta(nested=nested), values)
    ebbtide.save_sharded(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items())
    again = ebbtide.load_sharded(meta(nested=nested), tmp_path)
    assert bits(again) == bits(model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["of the others", "asked for"])
def test_they_are_quantised_in_the_dtype_of_the_model(
    values: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> None:
    model = meta()
    if dtype is None:
        model[1].bfloat16()
    loaded = ebbtide.load_sharded(model, values, dtype=dtype)
    wanted = bnb.nn.Params4bit(values["0.weight"].bfloat16(), quant_type="nf4", compress_statistics=False).to("cpu")
    assert loaded[0].quant_state.dtype == torch.bfloat16
    assert torch.equal(loaded[0].weight.data, wanted.data)
    assert torch.equal(loaded[0].quant_state.absmax, wanted.quant_state.absmax)


def test_a_weight_that_no_checkpoint_has_is_refused(values: dict[str, torch.Tensor]) -> None:
    del values["0.weight"]
    with pytest.raises(DataError, match="1 4-bit weights are not in the checkpoint: 0.weight"):
        ebbtide.load_sharded(meta(), values, missing="initialize")
    with pytest.raises(DataError, match="1 4-bit weights are not in the checkpoint"):
        ebbtide.load_sharded(meta())


def test_damaged_scales_are_reported(values: dict[str, torch.Tensor]) -> None:
    saved = dict(ebbtide.load_sharded(meta(), values).state_dict())
    saved["0.weight.quant_state.bitsandbytes__nf4"] = torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(DataError, match="'0.weight' has scales that its library rejects"):
        ebbtide.load_sharded(meta(), saved)


@pytest.mark.parametrize("storage", [torch.float16, torch.uint8], ids=str)
def test_columns_that_are_packed_in_another_dtype_are_refused(
    values: dict[str, torch.Tensor], storage: torch.dtype
) -> None:
    """Converted, they would be other numbers."""
    saved = dict(ebbtide.load_sharded(meta(torch.bfloat16), values).state_dict())
    with pytest.raises(DataError, match=rf"'0\.weight' is packed as torch\.bfloat16 .* as {storage}") as caught:
        ebbtide.load_sharded(meta(storage), saved)
    assert "quant_storage=torch.bfloat16" in caught.value.hint


def gathered(model: nn.Module) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)), mp_policy=policy)


@pytest.mark.parametrize("shard", [lambda model: model.float(), gathered], ids=["converted", "gathered"])
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.uint8, torch.float32], ids=str)
def test_columns_that_the_sharded_model_converts_are_refused(
    values: dict[str, torch.Tensor], storage: torch.dtype, shard: Callable[[nn.Module], nn.Module | None]
) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = meta(storage)
    try:
        if storage is torch.uint8 and shard is gathered and not shards_integers():
            pytest.skip(NO_INTEGERS)
        if storage is not torch.bfloat16:
            assert not ebbtide.load_sharded(model, values, shard=shard)[0].weight.is_meta
            return
        with pytest.raises(ConfigError, match=r"'0\.weight' is packed as torch\.bfloat16 .* torch\.float32") as caught:
            ebbtide.load_sharded(model, values, shard=shard)
        assert "shard=" in caught.value.hint and model[0].weight.is_meta
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_columns_that_a_flat_parameter_converts_are_refused(
    values: dict[str, torch.Tensor], param_dtype: torch.dtype | None
) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    def shard(model: nn.Module) -> nn.Module:
        policy = MixedPrecision(param_dtype=param_dtype)
        fill, cpu = ebbtide.load.empty_module("cpu"), torch.device("cpu")
        return FullyShardedDataParallel(
            model, device_id=cpu, use_orig_params=True, param_init_fn=fill, mixed_precision=policy
        )

    try:
        if param_dtype is torch.float16:
            with pytest.raises(ConfigError, match=r"'0\.weight' is packed as torch\.bfloat16 .* torch\.float16"):
                ebbtide.load_sharded(meta(torch.bfloat16).bfloat16(), values, shard=shard)
            return
        model = ebbtide.load_sharded(meta(torch.bfloat16).bfloat16(), values, shard=shard)
        x = torch.randn(2, 64, dtype=torch.bfloat16)
        assert torch.equal(model(x), ebbtide.load_sharded(meta(torch.bfloat16).bfloat16(), values)(x))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("saved", [False, True], ids=["to be quantised", "with scales"])
def test_a_load_may_be_repeated_after_it_failed(values: dict[str, torch.Tensor], saved: bool) -> None:
    wanted = ebbtide.load_sharded(meta(), values)
    model, before = meta(), dict(meta().named_parameters())
    good = dict(wanted.state_dict()) if saved else values
    damaged = "0.weight.quant_state.bitsandbytes__nf4"
    faults: list[dict[str, Any]] = [{"weights": good | ({damaged: torch.zeros(5, dtype=torch.uint8)} if saved else {})}]
    faults += [{"weights": {}}, {"weights": good, "shard": failing(errno.EIO)}]
    for fault in faults[not saved :]:
        with pytest.raises((DataError, OSError)):
            ebbtide.load_sharded(model, **fault)
        assert {n: (type(p), p.shape, p.is_meta) for n, p in model.named_parameters()} == {
            n: (type(p), p.shape, True) for n, p in before.items()
        }
    assert bits(ebbtide.load_sharded(model, good)) == bits(wanted)


def test_what_is_quantised_already_is_refused(values: dict[str, torch.Tensor]) -> None:
    quantised = whole(values, torch.uint8, nested=False, kind="nf4")
    model = nn.Sequential(quantised[0], nn.LayerNorm(96, device="meta"))
    with pytest.raises(ConfigError, match=r"'0.weight' is quantised \(Params4bit\)"):
        ebbtide.load_sharded(model, values)


CHILD = """
import json, sys
from pathlib import Path
import torch, bitsandbytes as bnb
from torch import nn
import ebbtide.loading

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(field + ":")).split()[1]) * 1024

def meta(width, layers):
    with torch.device("meta"):
        return nn.Sequential(*(bnb.nn.Linear4bit(width, width, bias=False, quant_type="nf4") for _ in range(layers)))

torch.set_num_threads(1)
width, layers, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ebbtide.loading.load_sharded(meta(64, 1), {"0.weight": torch.randn(64, 64)})  # what is imported and started once
weight = torch.randn(width, width, dtype=torch.bfloat16)
base = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
if path == "one":
    kept = bnb.nn.Params4bit(weight, quant_type="nf4").to("cpu")
else:
    kept = ebbtide.loading.load_sharded(meta(width, layers), path, device="cpu", dtype=torch.bfloat16)
print(json.dumps(status("VmHWM") - base))
"""


def _peak(width: int, layers: int, path: str) -> int:
    command = [sys.executable, "-c", CHILD, str(width), str(layers), path]
    # With a fixed threshold, freed memory is not kept.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB // 4)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return int(json.loads(result.stdout))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell a process's peak")
def test_what_is_there_in_full_precision_is_one_weight(tmp_path: Path) -> None:
    width, layers = 1024, 96
    values = {f"{i}.weight": torch.randn(width, width, dtype=torch.bfloat16) for i in range(layers)}
    save_file(values, tmp_path / "model.safetensors")
    above, one = _peak(width, layers, str(tmp_path)), _peak(width, layers, "one")
    weight_bytes = width * width * 2
    columns_bytes = layers * weight_bytes // 4
    # Besides columns and scales: the library's memory for one weight, the weight, and staging buffers.
    assert above <= columns_bytes * 1.125 + one + weight_bytes + 32 * MIB
    assert above < layers * weight_bytes

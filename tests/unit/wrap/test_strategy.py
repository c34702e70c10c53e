"""The strategy is read from the model; one that is asked for is checked."""

from __future__ import annotations

import sys
import types

import pytest
from torch import nn

import ebbtide
from ebbtide.base.errors import ConfigError, StrategyError
from ebbtide.wrap import check_strategy, weights_move
from tests.helpers.models import build


@pytest.mark.parametrize("devices", [0, 1, 2])
def test_data_parallel_over_several_devices_is_refused(devices: int) -> None:
    """Its replicas would compute with the weights of the first device."""
    model = nn.DataParallel(nn.Linear(2, 2))
    model.device_ids = list(range(devices))
    if devices < 2:
        assert check_strategy(model, "auto") == "single"
    else:
        with pytest.raises(StrategyError, match="DataParallel over 2 devices.*\nhint: "):
            check_strategy(model, "auto")


@pytest.mark.parametrize("strategy", ["auto", "single"])
def test_a_model_without_wrapper_is_single(strategy: str) -> None:
    assert check_strategy(nn.Linear(2, 2), strategy) == "single"
    assert not weights_move(nn.Linear(2, 2))


def test_a_pass_looks_for_wrappers_only_where_their_code_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, walks = nn.Sequential(nn.Linear(2, 2)), list[str]()
    modules = model.modules
    monkeypatch.setattr(model, "modules", lambda: walks.append("walk") or modules())
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", types.ModuleType("torch.distributed.fsdp"))
    assert not weights_move(model) and walks == []
    wrapper = types.SimpleNamespace(FSDPModule=nn.Linear, FullyShardedDataParallel=nn.Conv2d)
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", wrapper)
    assert weights_move(model) and walks == ["walk"]


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("fsdp2", "torch.distributed.fsdp.fully_shard(model)"),
        ("fsdp", "FullyShardedDataParallel(model)"),
        ("ddp", "DistributedDataParallel(model)"),
    ],
)
def test_another_strategy_than_the_models_is_refused(strategy: str, how: str) -> None:
    with pytest.raises(StrategyError) as raised:
        ebbtide.enable_activation_offloading(build("mlp").model, strategy)
    assert str(raised.value) == (
        f"strategy is {strategy!r} and the model is wrapped as 'single'; expected a model wrapped by {how}\n"
        "hint: wrap the model first, or pass strategy='auto'"
    )


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"(?s)strategy is 'fspd2'.*one of auto, single.*did you mean 'fsdp2'"):
        check_strategy(nn.Linear(2, 2), "fspd2")

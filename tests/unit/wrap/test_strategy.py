"""The strategy is read from the model; a requested one is checked."""

from __future__ import annotations

import sys
import types

import pytest
from torch import nn

import ebbtide
from ebbtide.base.errors import ConfigError, StrategyError
from ebbtide.wrap import check_strategy, weights_move
from ebbtide.wrap.agreement import groups_of, has_collectives
from ebbtide.wrap.blocks import gathered_for, weights_of
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


def test_weights_that_zero_3_divides_are_known_by_their_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins; the package's own are in ``tests/integrations/hosts/test_deepspeed.py``."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    engine = types.SimpleNamespace(DeepSpeedEngine=nn.Conv2d)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", engine)
    assert not weights_move(model) and not has_collectives(model) and check_strategy(model, "auto") == "single"
    for p in model.parameters():
        p.ds_id, p.ds_persist = 0, True  # small: it stays unsharded
    assert not weights_move(model) and not has_collectives(model)
    assert len(list(weights_of(model))) == 2 and list(gathered_for(model[0])) == []
    model[0].weight.ds_persist = False
    assert weights_move(model) and has_collectives(model) and check_strategy(model, "auto") == "deepspeed"
    assert list(weights_of(model)) == [model[0].bias]
    assert [p is model[0].weight for p in gathered_for(model[0])] == [True] and list(gathered_for(model)) == []
    assert groups_of(model) == []  # no process group
    with pytest.raises(StrategyError, match="wrapped as 'deepspeed'.*\nhint: "):
        check_strategy(model, "fsdp2")


def test_batch_norm_over_ranks_needs_them_in_training_alone() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4, track_running_stats=False))
    assert has_collectives(block) and not has_collectives(block.eval())


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

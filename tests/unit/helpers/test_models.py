"""The tiny models and the oracle, on which the other tiers rely."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.models import DROPOUT, NAMES, PLAIN, build
from tests.helpers.oracle import Oracle, differences, same_bits
from tests.helpers.sizes import WIDE


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_oracle_gives_the_bits_of_plain_training(name: str) -> None:
    tiny = build(name)
    plain = tiny.step()
    oracle = Oracle()
    with oracle:
        again = tiny.step()
    assert differences(plain, again) == []
    assert oracle.packed_bytes > 0
    assert oracle.unpacked > 0
    assert any(g is not None and g.abs().sum() > 0 for g in plain.param_grads.values())
    assert all(g is not None for g in plain.input_grads.values())
    assert len(tiny.block_list()) >= 2


@pytest.mark.parametrize("name", PLAIN)
def test_same_seed_gives_the_same_model_and_another_seed_another(name: str) -> None:
    one, again, other = build(name), build(name), build(name, seed=1)
    assert differences(one.step(), again.step()) == []
    assert differences(one.step(), other.step()) != []


def test_building_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    build("mlp")
    assert torch.equal(before, torch.get_rng_state())


def test_configuration_changes_reach_the_model() -> None:
    assert build("llama", num_hidden_layers=2).model.config.num_hidden_layers == 2


@pytest.mark.parametrize("name", DROPOUT)
def test_families_with_dropout_draw_from_the_seed(name: str) -> None:
    tiny = build(name)
    seen: list[dict[str, torch.Tensor]] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(tiny.loss()[1])
    assert all(torch.equal(seen[0][k], seen[1][k]) for k in seen[0])
    assert not all(torch.equal(seen[0][k], seen[2][k]) for k in seen[0])


def test_a_size_reaches_model_and_batch() -> None:
    tiny, wide = build("llama"), build("llama", size=WIDE)
    assert (tiny.model.config.hidden_size, wide.model.config.hidden_size) == (48, 64)
    assert (tiny.inputs["input_ids"].shape, wide.inputs["input_ids"].shape) == ((2, 12), (2, 128))


def test_the_forward_runs_under_autocast_when_asked() -> None:
    logits = build("llama", autocast=True).loss()[1]["logits"]
    assert (logits.dtype, build("llama").loss()[1]["logits"].dtype) == (torch.bfloat16, torch.float32)


def test_modules_that_a_model_keeps_in_float32_stay_so() -> None:
    dtypes = {name: p.dtype for name, p in build("wan", dtype=torch.bfloat16).model.named_parameters()}
    assert dtypes["blocks.0.attn1.to_q.weight"] == torch.bfloat16
    assert dtypes["blocks.0.norm2.weight"] == torch.float32


def test_plain_modules_refuse_configuration() -> None:
    with pytest.raises(TypeError, match="take no configuration"):
        build("mlp", width=3)


def test_differences_names_what_differs() -> None:
    tiny = build("mlp")
    plain = tiny.step()
    with torch.no_grad():
        tiny.model.layers[2].down.bias[0] += 1e-3
    found = differences(plain, tiny.step())
    assert any(line.startswith("outputs.loss: largest difference") for line in found)
    tiny.model.layers[0].norm.weight.requires_grad_(False)
    assert "param_grads.layers.0.norm.weight: gradient against none" in differences(plain, tiny.step())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.ones(2, 3), torch.ones(3, 2).t(), True),
        (torch.ones(3).expand(2, 3), torch.ones(2, 3), True),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.tensor(True), torch.tensor(False), False),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
    ],
)
def test_same_bits(one: torch.Tensor, other: torch.Tensor, same: bool) -> None:
    assert same_bits(one, other) is same


def test_oracle_copies_whole_storages_and_restores_views_as_they_were() -> None:
    base = torch.randn(4, 6)
    views = [base, base.t(), base[1:, ::2], base[:1].expand(3, 6), base.as_strided((3, 3), (1, 1))]
    oracle = Oracle()
    for view in views:
        restored = oracle._unpack(oracle._pack(view))
        assert same_bits(restored, view)
        assert (restored.stride(), restored.storage_offset()) == (view.stride(), view.storage_offset())
        assert restored.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert oracle.packed_bytes == len(views) * base.untyped_storage().nbytes()

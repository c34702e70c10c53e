"""Other offloaders on a model: refused if they take all saved tensors of a block, reported if they take a part."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.base.actions import Action
from ebbtide.base.errors import ConflictError
from ebbtide.wrap.other_offloaders import OFFLOADERS
from tests.helpers.engines import ByTable, assert_nothing_left, hooks_are_closed
from tests.helpers.models import WIDTH, Attention, Mlp, Stack, build
from tests.helpers.oracle import Oracle, differences, same_bits
from tests.helpers.torches import needs_slots

Around = Callable[..., Any]


def taken(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with Oracle():
        return function(*args)


def taken_and_checkpointed(function: Callable[..., Tensor], *args: Tensor, reentrant: bool = False) -> Tensor:
    """Like transformers' layers with ``offload=True``, which use ``save_on_cpu``."""
    with Oracle():
        return checkpoint(function, *args, use_reentrant=reentrant)


class Layer(nn.Module):
    """A block that lets others run its parts."""

    def __init__(self, all_of_it: Around | None = None, a_part: Around | None = None) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()
        self.all_of_it, self.a_part = all_of_it, a_part

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) if self.all_of_it is None else self.all_of_it(self.run, x)

    def run(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.mlp(x) if self.a_part is None else self.a_part(self.mlp, x)


def enable(model: nn.Module, policy: str = "offload") -> ebbtide.Handle:
    return ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0)


def train(model: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1, 1, 2 * 6 * WIDTH).reshape(2, 6, WIDTH).requires_grad_()
    model.zero_grad()
    model(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


HINT = (
    "; expected one offloader on a model\nhint: remove that context, or unset its flag (TRL and torchtune: "
    "activation_offloading, enable_activation_offloading; transformers: activation_checkpointing_kwargs['offload'])"
)


@needs_slots
@pytest.mark.parametrize("policy", ["keep", "inputs", "offload", "minimal", "auto"])
@pytest.mark.parametrize(
    ("around", "found"),
    [
        (taken, "tests.helpers.oracle.Oracle._pack"),
        (taken_and_checkpointed, "what a checkpoint keeps is a tests.helpers.oracle._Copy"),
        (
            lambda *args: taken_and_checkpointed(*args, reentrant=True),
            "tests.helpers.oracle.Oracle._pack",
        ),
    ],
)
def test_hooks_inside_a_block_that_take_all_it_saves_are_refused(around: Around, found: str, policy: str) -> None:
    model = Stack(Layer(), Layer(around))
    with enable(model, policy) as handle:
        for _ in range(2):  # in every step, not in the first alone
            with pytest.raises(ConflictError) as raised:
                train(model)
            expected = f"block 'layers.1' saves all its tensors under other saved-tensor hooks inside it ({found})"
            assert str(raised.value) == expected + HINT
            assert hooks_are_closed()
        raised = None  # type: ignore[assignment]  # its traceback holds the graph
        model.layers[1].all_of_it = None
        train(model)
        assert_nothing_left(handle._engine)


@needs_slots
@pytest.mark.parametrize("part", [taken, lambda f, x: saved_tensors_hooks_of_their_own(f, x), taken_and_checkpointed])
def test_hooks_inside_a_block_that_take_a_part_are_logged_once(part: Around, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Stack(Layer(a_part=part), Layer())
    expected = train(model)
    with caplog.at_level(logging.WARNING, "ebbtide"), enable(model) as handle:
        for _ in range(2):
            assert all(map(torch.equal, train(model), expected))
        assert handle.stats().offloaded_bytes > 0
    said = [r.getMessage() for r in caplog.records if "a part under other" in r.getMessage()]
    assert len(said) == 1 and "block 'layers.0' saves a part under other saved-tensor hooks" in said[0]


def saved_tensors_hooks_of_their_own(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: (t,), lambda packed: packed[0]):
        return function(x)


@pytest.mark.parametrize("inside", [checkpoint, None])
def test_checkpoints_and_contexts_of_our_own_inside_a_block_are_no_others(
    inside: Around | None, caplog: pytest.LogCaptureFixture
) -> None:
    def ours(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        with ebbtide.offload_saved_tensors(min_bytes=0):
            return function(x)

    def checkpointed(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=False)

    around = ours if inside is None else checkpointed
    model = Stack(Layer(a_part=around), Layer(around))
    expected = train(model)
    with caplog.at_level(logging.WARNING, "ebbtide"), enable(model):
        assert all(map(torch.equal, train(model), expected))
    assert not [r for r in caplog.records if "other saved-tensor hooks" in r.getMessage()]


class Calls(nn.Module):
    """A block that calls another one, which is no part of it."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.others: tuple[nn.Module, ...] = others

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            x = other(x).sin()
        return self.mlp(x)


def test_the_hooks_of_our_own_checkpoint_are_no_others() -> None:
    torch.manual_seed(0)
    first = Calls()
    model = Stack(first, Calls(first), Calls())
    expected, plan = train(model), ByTable(Action.OFFLOAD, Action.CHECKPOINT)
    with ebbtide.enable_activation_offloading(model, policy=plan, min_bytes=0) as handle:
        for step in range(3):
            assert all(map(same_bits, expected, train(model))), step
            # Of each structure (the second block holds the first) the first that runs is not checkpointed.
            assert handle.stats().checkpointed_blocks == (3 if step else 2)


@needs_slots
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_transformers_offloads_itself_is_refused_and_its_flag_named(
    monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    pin_nothing(monkeypatch)
    tiny = build("llama")
    if not hasattr(tiny.model, "activation_checkpointing_enable"):
        pytest.skip("this version of transformers offloads nothing itself")
    tiny.model.activation_checkpointing_enable({"use_reentrant": reentrant}, every_n_layers=2, offload=True)
    with enable(tiny.model), pytest.raises(ConflictError, match=r"(?s)block 'model\.layers\.0' saves all") as e:
        tiny.step()
    assert "transformers: activation_checkpointing_kwargs['offload']" in str(e.value)
    tiny.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    expected = tiny.step()
    with enable(tiny.model) as handle:
        assert differences(expected, tiny.step()) == []
        assert handle.stats().offloaded_bytes > 0


def pin_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off pinning in transformers' ``save_on_cpu``: it needs an accelerator."""
    modeling = pytest.importorskip("transformers.modeling_utils")
    monkeypatch.setattr(modeling, "save_on_cpu", lambda **options: save_on_cpu(), raising=False)


def test_what_trl_offloads_is_refused_and_its_flag_named(monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl.models.activation_offloading")
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)  # TRL empties the device's cache, which a CPU lacks
    tiny = build("llama")
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "default_stream", lambda: None)  # a CUDA build of torch needs a driver
        theirs = trl.get_act_offloading_ctx_manager(tiny.model, use_pin_memory=False, use_streams=False)
    with enable(tiny.model):
        with (
            theirs,
            pytest.raises(
                ConflictError,
                match=r"OffloadActivations.*: TRL offloads activations;.*\nhint: set activation_offloading=",
            ),
        ):
            tiny.step()
        tiny.step()


def test_what_accelerate_offloads_is_refused_and_its_flag_named() -> None:
    """``fsdp_activation_checkpointing_offload``: accelerate itself puts its wrappers around the layers."""
    utils = pytest.importorskip("accelerate.utils")
    plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
    )
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    model = utils.fsdp_utils.fsdp2_apply_ac(accelerator, build("llama").model)
    with pytest.raises(ConflictError, match=r"(?s)offload_wrapper.*accelerate: activation_checkpointing_offload=False"):
        enable(model)


@pytest.mark.parametrize(("prefix", "name", "unset"), OFFLOADERS, ids=[name for _, name, _ in OFFLOADERS])
def test_whose_hooks_they_are_and_the_flag_to_unset_are_named(prefix: str, name: str, unset: str) -> None:
    """Most are not installed here: a hook with the same name is a stand-in."""

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    pack.__module__, _, pack.__qualname__ = (prefix + "offload.pack").rpartition(".")
    model = Stack(Layer(), Layer())
    with enable(model), saved_tensors_hooks(pack, lambda packed: packed), pytest.raises(ConflictError) as raised:
        train(model)
    assert str(raised.value) == (
        f"block 'layers.0' runs under other saved-tensor hooks ({prefix}offload.pack): {name} offloads "
        f"activations; expected one offloader on a model\nhint: {unset}"
    )


def test_save_on_cpu_around_a_step_is_named() -> None:
    model = Stack(Layer(), Layer())
    with enable(model), save_on_cpu(), pytest.raises(ConflictError, match=r"torch's save_on_cpu .*\nhint: remove"):
        train(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_the_compiler_offloads_is_refused_and_its_switch_named(when: str) -> None:
    config = pytest.importorskip("torch._functorch.config")
    if not hasattr(config, "enable_activation_offloading"):
        pytest.skip("this torch's compiler offloads nothing")
    model = Stack(Layer(), Layer())
    expected = r"block 'layers.1' is compiled.*\nhint: set torch._functorch.config.enable_activation_offloading = False"
    with config.patch(enable_activation_offloading=True):
        with enable(model):
            train(model)  # nothing is compiled
            if when == "after":
                model.layers[1].compile(backend="eager")
                with pytest.raises(ConflictError, match=expected):
                    train(model)
        if when == "before":
            model.layers[1].compile(backend="eager")
            with pytest.raises(ConflictError, match=expected):
                enable(model)
    enable(model).close()  # the refused one has left nothing


class Frees(nn.Module):
    """A block that frees what its second half saves and computes it again in backward, as Megatron's recompute does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        given = x.detach()
        h = self.norm(x)
        y = self.mlp(h)
        size = h.untyped_storage().nbytes()
        h.untyped_storage().resize_(0)

        def fill(_: Tensor) -> None:
            with torch.no_grad():
                h.untyped_storage().resize_(size)
                h.untyped_storage().copy_(self.norm(given).untyped_storage())

        if y.requires_grad:
            y.register_hook(fill)
        return x + y


@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_a_block_that_frees_what_it_saved_is_refused(policy: str) -> None:
    torch.manual_seed(0)
    model = Stack(Frees(), Frees())
    expected = train(model)
    handle = enable(model, policy)
    with handle, pytest.raises(ConflictError) as raised:
        train(model)
    assert str(raised.value) == (
        "block 'layers.0' freed the memory of Frees/mlp.norm/NativeLayerNormBackward0#0, which it had saved, to "
        "compute it again in backward; expected one offloader on a model\nhint: unset what frees it (Megatron-LM: "
        "recompute_granularity, --recompute-modules)"
    )
    for other in ("keep", "inputs"):  # which leave that tensor alone
        with enable(model, other):
            assert all(map(torch.equal, train(model), expected))

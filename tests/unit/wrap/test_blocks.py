"""Blocks are found by structure, or by explicit paths."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import ebbtide
from ebbtide.base.errors import BlocksError
from ebbtide.wrap import find_blocks
from ebbtide.wrap.blocks import has_forward, paths_in
from tests.helpers.models import TRANSFORMERS, WIDTH, Attention, Block, Conv, Mlp, Recurrent, Stack, build


class Named(nn.Module):
    """Any modules under any names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Down(Named):
    def __init__(self) -> None:
        super().__init__(resnets=nn.ModuleList([Conv(), Conv()]), norm=nn.LayerNorm(WIDTH))


class Up(Down):
    pass


class Stage(Named):
    """Lists of layers and nothing else, as in a U-Net; some of the layers have a stack, or are alone in their list."""

    def __init__(self, *, last: bool = False) -> None:
        inner = Named(norm=nn.LayerNorm(WIDTH), layers=nn.ModuleList([Block(), Block()]))
        lists = {"resnets": [Conv(), Conv()]} | ({} if last else {"attentions": [inner], "down": [Block()]})
        super().__init__(**{name: nn.ModuleList(layers) for name, layers in lists.items()})


class Parts(Named):
    """One list whose layers are of different classes, as in a block of T5."""

    def __init__(self) -> None:
        super().__init__(layer=nn.ModuleList([Attention(), Mlp()]))


def names(model: nn.Module, globs: Sequence[str] | str | None = None) -> list[str]:
    return [block.name for _, block in find_blocks(model, globs)]


def experts() -> nn.Module:
    return Named(router=nn.Linear(WIDTH, 4), experts=nn.ModuleList(Mlp() for _ in range(4)))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(Stack(Block(), Block(), Block()), ["layers.0", "layers.1", "layers.2"], id="list"),
        pytest.param(Named(body=nn.Sequential(Block(), Block())), ["body.0", "body.1"], id="sequential"),
        pytest.param(nn.Sequential(Block(), Block()), ["0", "1"], id="the model itself is the stack"),
        pytest.param(
            Named(layers=nn.ModuleDict({"a": Block(), "b": Block()})), ["layers.a", "layers.b"], id="dictionary"
        ),
        pytest.param(
            Named(encoder=Stack(Block(), Block()), decoder=Stack(Mlp(), Mlp())),
            ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
            id="two stacks",
        ),
        pytest.param(
            Stack(experts(), experts()), ["layers.0", "layers.1"], id="experts inside are not blocks"
        ),
        pytest.param(
            Named(down=nn.ModuleList([Down(), Down()]), up=nn.ModuleList([Up(), Up()])),
            ["down.0", "down.1", "up.0", "up.1"],
            id="down and up",
        ),
        pytest.param(
            Named(down=nn.ModuleList([Stage(), Stage(last=True)])),
            [
                *("down.0.resnets.0", "down.0.resnets.1", "down.0.attentions.0.layers.0"),
                *("down.0.attentions.0.layers.1", "down.0.down.0", "down.1.resnets.0", "down.1.resnets.1"),
            ],
            id="stages of lists",
        ),
        pytest.param(Stack(Parts(), Parts()), ["layers.0", "layers.1"], id="parts of a layer are not blocks"),
        pytest.param(
            Named(stages=nn.ModuleList([Down(), Down(), Down(), Up()])),
            ["stages.0", "stages.1", "stages.2", "stages.3"],
            id="mostly of one class",
        ),
        pytest.param(
            Stack(Block(), Block(), nn.Identity()), ["layers.0", "layers.1"], id="a part without weights is no block"
        ),
        pytest.param(
            Named(embed=nn.Embedding(50, WIDTH), body=Named(core=Named(h=nn.ModuleList([Block(), Block()])))),
            ["body.core.h.0", "body.core.h.1"],
            id="deep down",
        ),
    ],
)  # fmt: skip
def test_found_by_structure(model: nn.Module, expected: list[str]) -> None:
    assert names(model) == expected


def test_indices_count_within_a_stack_and_kinds_are_classes() -> None:
    blocks = [b for _, b in find_blocks(Named(encoder=Stack(Block(), Block()), decoder=Stack(Mlp(), Mlp())))]
    assert [b.index for b in blocks] == [0, 1, 0, 1]
    assert [b.kind for b in blocks] == ["Block", "Block", "Mlp", "Mlp"]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_layers_are_found(name: str) -> None:
    tiny = build(name)
    assert set(map(id, tiny.block_list())) <= {id(module) for module, _ in find_blocks(tiny.model)}


class Silent(nn.Module):
    """Attention without weights: it draws random numbers, and learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x)


def test_layers_that_are_lists_of_norms_and_modules_are_one_stack() -> None:
    """As in x-transformers, whose norms and residuals outnumber what is composed."""
    layers = nn.ModuleList(
        nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH)]), attention_or_mlp(), nn.LayerNorm(WIDTH)])
        for attention_or_mlp in (Attention, Mlp, Attention, Mlp)
    )
    found = [block.name for _, block in find_blocks(Named(embed=nn.Embedding(9, WIDTH), body=Named(layers=layers)))]
    assert found == [f"body.layers.{i}.{part}" for i in range(4) for part in ("0.0", "1", "2")]


def test_a_list_of_lists_is_one_stack() -> None:
    """A list has no forward: as a block it would offload nothing. PVT, GLPN, PoolFormer and Florence-2 are such."""
    stages = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block(), Block()])])
    model = Named(embeddings=nn.ModuleList([Conv(), Conv()]), block=stages)
    assert names(model) == ["embeddings.0", "embeddings.1", "block.0.0", "block.1.0", "block.1.1"]


def bare(**parts: nn.Module) -> nn.Module:
    """A module without a forward, as autoencoders make for their stages."""
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(
            Named(
                down=nn.ModuleList(
                    bare(block=nn.ModuleList([Conv(), Conv()]), attn=nn.ModuleList(), downsample=nn.Conv2d(3, 3, 3))
                    for _ in range(2)
                ),
                mid=bare(block_1=Conv(), attn_1=Attention(), block_2=Conv()),
            ),
            ["down.0.block.0", "down.0.block.1", "down.0.downsample", "down.1.block.0", "down.1.block.1"]
            + ["down.1.downsample"],
            id="stages",
        ),
        pytest.param(
            Named(down1=bare(a=Mlp(), b=Mlp()), down2=bare(a=Mlp(), b=Mlp()), down3=bare(a=Mlp(), b=Mlp())),
            ["down1.a", "down1.b", "down2.a", "down2.b", "down3.a", "down3.b"],
            id="attributes",
        ),
        pytest.param(
            Named(joint=nn.ModuleList([Conv()]), single=nn.ModuleList([Mlp()])),
            ["joint.0", "single.0"],
            id="the largest",
        ),
    ],
)  # fmt: skip
def test_a_module_without_a_forward_is_no_block(model: nn.Module, expected: list[str]) -> None:
    """It is never called: as a block it would offload nothing. Autoencoders of latent diffusion have such stages."""
    assert names(model) == expected
    assert all(has_forward(module) for module, _ in find_blocks(model))


def test_a_path_to_a_module_without_a_forward_names_what_it_holds() -> None:
    model = Named(down=nn.ModuleList([bare(a=Conv(), b=Mlp()), bare(a=Conv(), b=Mlp())]))
    assert names(model, "down.1") == ["down.1.a", "down.1.b"]
    assert names(model, "down") == ["down.0.a", "down.0.b", "down.1.a", "down.1.b"]


def test_a_module_of_a_block_that_is_found_in_another_place_is_no_block_of_its_own() -> None:
    """As in MONAI's DynUNet: what holds the layers calls them through a chain of other modules."""
    down = [Named(conv1=Conv(), conv2=Conv(), conv3=Conv()) for _ in range(2)]
    chain = Named(layer=down[0], below=Named(layer=down[1], bottom=Named(conv1=Conv(), conv2=Conv(), conv3=Conv())))
    model = Named(downs=nn.ModuleList(down), chain=chain)
    below = [f"chain.below.bottom.conv{number}" for number in (1, 2, 3)]
    assert names(model) == ["downs.0", "downs.1", *below]


def test_few_parameters_do_not_keep_a_stack_from_being_one() -> None:
    small = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    model = Named(layers=nn.ModuleList([Block(), Block()]), heads=small, attention=nn.Sequential(Silent(), Silent()))
    assert names(model) == ["layers.0", "layers.1", "heads.0", "heads.1", "attention.0", "attention.1"]


class Bottleneck(Down):
    pass


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(
            Named(stem=Mlp(), layer1=Block(), layer2=Block(), layer3=Block(), head=nn.Linear(2, 2)),
            ["layer1", "layer2", "layer3"],
            id="attributes",
        ),
        pytest.param(Named(layer_0=Mlp(), layer_1=Mlp()), ["layer_0", "layer_1"], id="two"),
        pytest.param(
            Named(layer1=experts(), layer2=experts(), layer3=experts()), ["layer1", "layer2", "layer3"], id="experts"
        ),
        pytest.param(
            Named(encoder1=Stack(Mlp(), Mlp()), encoder2=Stack(Mlp(), Mlp())),
            ["encoder1.layers.0", "encoder1.layers.1", "encoder2.layers.0", "encoder2.layers.1"],
            id="two models in one",
        ),
        pytest.param(
            Named(
                conv1=nn.Conv2d(3, 8, 3),
                layer1=nn.Sequential(Bottleneck(), Bottleneck()),
                layer2=nn.Sequential(Bottleneck(), Bottleneck(), Bottleneck()),
                fc=nn.Linear(8, 2),
            ),
            ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"],
            id="stages of a resnet",
        ),
        pytest.param(
            Named(norm1=nn.LayerNorm(4), norm2=nn.LayerNorm(4), norm3=nn.LayerNorm(4)), ["(model)"], id="leaves repeat"
        ),
    ],
)  # fmt: skip
def test_attributes_of_one_class_are_a_stack(model: nn.Module, expected: list[str]) -> None:
    assert names(model) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(Named(a=Mlp(), b=Attention(), tiny=nn.Sequential(nn.Linear(2, 2))), ["a", "b"], id="largest"),
        pytest.param(Named(a=Mlp(), tiny=nn.Sequential(nn.Linear(2, 2))), ["a", "tiny"], id="at least two"),
        pytest.param(Named(inner=Named(core=Named(a=Mlp(), b=Mlp()))), ["inner.core.a", "inner.core.b"], id="deep"),
        pytest.param(Stack(Block()), ["layers.0.0", "layers.0.1"], id="one block"),
        pytest.param(
            Named(layers=nn.ModuleList([Mlp(), Attention(), Block()]), head=nn.Sequential(nn.Linear(2, 2))),
            ["layers.0", "layers.1", "layers.2"],
            id="layers of different classes",
        ),
        pytest.param(
            Named(body=Named(embed=nn.Linear(WIDTH, 4), layers=nn.ModuleList([Block()])), head=Mlp(4)),
            ["body.layers.0", "head"],
            id="one layer that may be called often",
        ),
        pytest.param(
            Named(body=Named(embed=nn.Sequential(nn.Linear(WIDTH, 999)), layers=nn.ModuleList([Block()])), head=Mlp(4)),
            ["body", "head"],
            id="one small layer",
        ),
        pytest.param(nn.Linear(3, 3), ["(model)"], id="leaf"),
        pytest.param(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ["(model)"], id="leaves"),
        pytest.param(Recurrent(), ["(model)"], id="a lone lstm"),
        pytest.param(torch.compile(Named(a=Mlp(), b=Attention()), backend="eager"), ["(model)"], id="compiled"),
    ],
)  # fmt: skip
def test_where_nothing_repeats(model: nn.Module, expected: list[str]) -> None:
    assert names(model) == expected


@pytest.mark.parametrize(
    "model", [nn.Identity(), Stack(nn.Identity(), nn.Identity()), Named()], ids=["leaf", "list", "empty"]
)
def test_a_model_without_parameters_says_so(model: nn.Module) -> None:
    with pytest.raises(BlocksError) as raised:
        find_blocks(model)
    assert str(raised.value) == (
        f"{type(model).__name__} has no parameters; expected a model with parameters\n"
        "hint: use `with ebbtide.offload_saved_tensors():` around the forward"
    )


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (["layers.*"], ["layers.0", "layers.1", "layers.2"]),
        (["layers.1"], ["layers.1"]),
        (["layers.[02]"], ["layers.0", "layers.2"]),
        (["layers.2", "layers.0"], ["layers.0", "layers.2"]),
        (["*"], ["layers.0", "layers.1", "layers.2"]),
        (["layers.0", "layers.0.*"], ["layers.0"]),
        (["layers.*.0", "layers.1"], ["layers.0.0", "layers.1", "layers.2.0"]),
    ],
)
def test_globs_choose_the_outermost_matches(globs: list[str], expected: list[str]) -> None:
    assert names(Stack(Block(), Block(), Block()), globs) == expected


@pytest.mark.parametrize(
    ("glob", "hint"),
    [
        ("layer.*", "hint: did you mean 'layers'"),
        ("layers.7", "hint: did you mean 'layers"),
        ("zzz", "hint: for example 'layers'"),
        ("", "hint: for example 'layers'"),
    ],
)
def test_a_glob_without_matches_names_the_nearest(glob: str, hint: str) -> None:
    with pytest.raises(BlocksError, match="matches no module of Stack") as raised:
        find_blocks(Stack(Block(), Block()), ["layers.0", glob])
    assert f"blocks={glob!r}" in str(raised.value)
    assert hint in str(raised.value)


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("layers.1", ["_orig_mod.layers.1"]),
        ("layers.?", ["_orig_mod.layers.0", "_orig_mod.layers.1"]),
        ("layers.1.0", ["_orig_mod.layers.1._checkpoint_wrapped_module.0"]),
    ],
)
def test_a_wrapped_module_is_known_by_the_name_it_had(glob: str, expected: list[str]) -> None:
    model = torch.compile(Stack(Block(), checkpoint_wrapper(Block())), backend="eager")
    found = find_blocks(model, glob)
    assert [paths_in(model)[module] for module, _ in found] == expected
    assert all(fnmatchcase(block.name, glob) for _, block in found)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft_leave_blocks_their_names() -> None:
    peft = pytest.importorskip("peft")
    llama = build("llama").model
    plain = [block.name for _, block in find_blocks(llama)]
    plan = ebbtide.make_plan(llama, build("llama").inputs, machine="h100", min_bytes=0)
    model = peft.get_peft_model(llama, peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert [block.name for _, block in find_blocks(model)] == plain
    compiled = torch.compile(model, backend="eager")
    assert [block.name for _, block in find_blocks(compiled, "model.layers.*")] == plain
    assert [block.name for _, block in find_blocks(model, "base_model.model.model.layers.*")] == plain
    with ebbtide.enable_activation_offloading(model, policy=plan, min_bytes=0):
        pass


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_inside_the_model_and_prompts_leave_blocks_their_names() -> None:
    peft = pytest.importorskip("peft")
    llama = build("llama").model
    plain = [block.name for _, block in find_blocks(llama)]
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], r=2), llama)
    assert [block.name for _, block in find_blocks(llama)] == plain
    tuned = peft.get_peft_model(
        build("llama").model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    assert [block.name for _, block in find_blocks(tuned)] == plain


def test_an_engine_of_deepspeed_leaves_blocks_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in; the package's own is in ``tests/integrations/hosts/test_deepspeed.py``."""

    class DeepSpeedEngine(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine))
    assert names(DeepSpeedEngine(Stack(Block(), Block())), "layers.*") == ["layers.0", "layers.1"]


def test_a_lazy_model_where_nothing_repeats_is_one_block() -> None:
    assert names(nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(4))) == ["(model)"]
    body, tail = nn.Sequential(nn.Linear(4, 40), nn.ReLU()), nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    assert names(Named(body=body, head=Named(tail=tail))) == ["body", "head"]


def test_one_glob_may_be_given_alone() -> None:
    assert names(Stack(Block(), Block()), "layers.*") == ["layers.0", "layers.1"]


def test_weights_are_those_of_the_block_and_below() -> None:
    model = Stack(Block(), Block())
    model.layers[0].register_buffer("scale", torch.ones(3))
    module, block = find_blocks(model)[0]
    assert set(map(id, block.weights())) == {id(t) for t in (*module.parameters(), *module.buffers())}


@pytest.mark.usefixtures("world")
def test_blocks_keep_their_kind_under_replicate_of_fsdp2() -> None:
    torch_module = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    model = Stack(*(Block() for _ in range(2)))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("replicate",))
    for layer in model.layers:
        torch_module.replicate(layer, mesh=mesh)
    assert [block.kind for _, block in find_blocks(torch_module.replicate(model, mesh=mesh))] == ["Block"] * 2

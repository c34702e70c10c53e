"""Attention of a simulated step: where it is fused, and what the operators return."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.profiling.attention import FusedAttention
from ebbtide.profiling.faketensors import without_bytes

BATCH, HEADS, TOKENS, WIDTH, OTHER = 2, 4, 64, 32, 16
UNFUSED, CPU = "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"
FUSED, OF_MASKS = "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
EFFICIENT, CUDNN = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION


class Operators(TorchDispatchMode):
    """Notes the operators of attention, and the masks of the fused one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.masks: list[torch.Tensor | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in (UNFUSED, CPU, FUSED, OF_MASKS):
            self.names.append(name)
            self.masks += args[3:4] if name == FUSED else []
        return func(*args, **(kwargs or {}))


@pytest.fixture
def operators() -> Generator[Operators]:
    operators = Operators()
    with without_bytes(), operators, FusedAttention():
        yield operators


def inputs(
    width: int = WIDTH, value: int | None = None, *, shared: int = HEADS, batch: int = BATCH, keys: int = TOKENS,
    dtype: torch.dtype = BF16,
) -> list[torch.Tensor]:  # fmt: skip
    shapes = (BATCH, HEADS, TOKENS, width), (batch, shared, keys, width), (batch, shared, keys, value or width)
    return [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def mask(*shape: int, dtype: torch.dtype = torch.bool, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape or (BATCH, 1, TOKENS, TOKENS), dtype=dtype, requires_grad=grad)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nothing special": (CPU, {}, {}),
    "causal": (CPU, {}, {"is_causal": True}),
    "mask": (CPU, {}, {"attn_mask": mask}),
    "unaligned": (CPU, {"width": 20}, {}),
    "dropout": (FUSED, {}, {"dropout_p": 0.1}),
    "dropout, causal": (FUSED, {}, {"dropout_p": 0.1, "is_causal": True}),
    "dropout, mask": (FUSED, {}, {"dropout_p": 0.1, "attn_mask": mask}),
    "dropout, float mask": (FUSED, {}, {"dropout_p": 0.1, "attn_mask": lambda: mask(TOKENS, TOKENS, dtype=BF16)}),
    "dropout, float32": (FUSED, {"dtype": F32}, {"dropout_p": 0.1}),
    "dropout, float64": (UNFUSED, {"dtype": F64}, {"dropout_p": 0.1}),
    "dropout, unaligned: torch pads": (FUSED, {"width": 20}, {"dropout_p": 0.1}),
    "dropout, unaligned, mask": (UNFUSED, {"width": 20}, {"dropout_p": 0.1, "attn_mask": mask}),
    "dropout, wide": (FUSED, {"width": 320}, {"dropout_p": 0.1}),
    "dropout, wide and unaligned": (UNFUSED, {"width": 324}, {"dropout_p": 0.1}),
    "dropout, shared heads": (FUSED, {"shared": 2}, {"dropout_p": 0.1, "enable_gqa": True}),
    "dropout, shared heads, mask": (UNFUSED, {"shared": 2}, {"dropout_p": 0.1, "enable_gqa": True, "attn_mask": mask}),
    "dropout, one head for all": (UNFUSED, {"shared": 1}, {"dropout_p": 0.1}),
    "dropout, one batch for all": (UNFUSED, {"batch": 1}, {"dropout_p": 0.1}),
    "dropout, more keys": (FUSED, {"keys": 96}, {"dropout_p": 0.1, "is_causal": True}),
    "dropout, more keys, unaligned": (UNFUSED, {"keys": 96, "width": 20}, {"dropout_p": 0.1, "is_causal": True}),
    "dropout, one column of a mask": (
        UNFUSED, {}, {"dropout_p": 0.1, "attn_mask": lambda: mask(TOKENS, 1).expand(TOKENS, TOKENS)},
    ),
    "other width": (FUSED, {"value": OTHER}, {}),
    "other width, causal": (FUSED, {"value": OTHER}, {"is_causal": True, "scale": 0.1}),
    "other width, mask": (FUSED, {"value": OTHER}, {"attn_mask": mask}),
    "other width, groups of one": (FUSED, {"value": OTHER}, {"enable_gqa": True}),
    "other width, float32": (FUSED, {"value": OTHER, "dtype": F32}, {}),
    "other width, float32, 4 aligned": (FUSED, {"width": 36, "value": 20, "dtype": F32}, {}),
    "other width, float32, unaligned": (UNFUSED, {"width": 36, "value": 18, "dtype": F32}, {}),
    "other width, unaligned keys": (UNFUSED, {"width": 36, "value": OTHER}, {}),
    "other width, unaligned values": (UNFUSED, {"value": 20}, {}),
    "other width, shared heads": (UNFUSED, {"value": OTHER, "shared": 2}, {"enable_gqa": True}),
    "mask with gradients": (OF_MASKS, {}, {"attn_mask": lambda: mask(1, HEADS, TOKENS, TOKENS, dtype=BF16, grad=True)}),
    "mask of three dimensions": (FUSED, {}, {"attn_mask": lambda: mask(HEADS, TOKENS, TOKENS)}),
}  # fmt: skip


def attend(case: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the tensors of a case, and its attention."""
    _, shapes, options = CASES[case]
    tensors = inputs(**shapes)
    options = {name: x() if callable(x) else x for name, x in options.items()}
    result = F.scaled_dot_product_attention(*tensors, **options)
    bias = options.get("attn_mask")
    return [*tensors, *([bias] if bias is not None and bias.requires_grad else [])], result


@pytest.mark.parametrize("case", CASES)
def test_attention_is_fused_where_a_gpu_or_the_cpu_fuses_it(operators: Operators, case: str) -> None:
    attend(case)
    assert operators.names == [CASES[case][0]]


@pytest.mark.parametrize("case", [case for case, (expected, _, _) in CASES.items() if expected in (FUSED, OF_MASKS)])
def test_results_and_gradients_have_the_shapes_of_unfused_attention(operators: Operators, case: str) -> None:
    found: list[Any] = []
    for kernels in ([MATH], [FLASH, EFFICIENT, CUDNN, MATH]):
        with sdpa_kernel(kernels):
            tensors, result = attend(case)
        gradients = torch.autograd.grad(result.float().sum(), tensors)
        found.append([(x.shape, x.dtype) for x in (result, *gradients)])
    assert found[0] == found[1]
    assert operators.names == [UNFUSED, CASES[case][0]]


@pytest.mark.parametrize(
    ("kernels", "case", "expected"),
    [
        ([MATH], "dropout", UNFUSED),
        ([MATH], "other width", UNFUSED),
        ([MATH], "mask with gradients", UNFUSED),
        ([FLASH, MATH], "dropout", FUSED),
        ([FLASH, MATH], "other width", UNFUSED),
        ([FLASH, MATH], "dropout, wide", UNFUSED),
        ([EFFICIENT, MATH], "other width", FUSED),
        ([EFFICIENT, MATH], "dropout, unaligned: torch pads", UNFUSED),
        ([EFFICIENT], "nothing special", FUSED),
        ([CUDNN], "nothing special", FUSED),
        ([CUDNN, MATH], "dropout, float32", UNFUSED),
    ],
)
def test_a_context_of_the_model_forbids_kernels(
    operators: Operators, kernels: list[SDPBackend], case: str, expected: str
) -> None:
    with sdpa_kernel(kernels):
        attend(case)
    assert operators.names == [expected]


def test_inputs_of_three_dimensions_and_transposed_ones_are_unfused(operators: Operators) -> None:
    query, key, value = inputs(TOKENS)
    F.scaled_dot_product_attention(query[0], key[0], value[0], dropout_p=0.1)
    for swapped in range(3):
        mixed = [x.transpose(2, 3) if place == swapped else x for place, x in enumerate((query, key, value))]
        F.scaled_dot_product_attention(*mixed, dropout_p=0.1)
    assert operators.names == 4 * [UNFUSED]


def test_masks_reach_the_operator_as_numbers_for_every_pair(operators: Operators) -> None:
    attend("other width, mask")
    (found,) = operators.masks
    assert found is not None and found.dtype is BF16 and found.shape == (BATCH, HEADS, TOKENS, TOKENS)
    assert found.untyped_storage().nbytes() == BATCH * TOKENS * TOKENS * 2


def test_without_keys_nothing_is_fused(operators: Operators) -> None:
    F.scaled_dot_product_attention(*inputs(keys=0), dropout_p=0.1)
    assert FUSED not in operators.names


@pytest.mark.parametrize("dtype", [F32, F64])
def test_autocast_casts_what_it_casts_in_attention(operators: Operators, dtype: torch.dtype) -> None:
    tensors = inputs(value=OTHER, dtype=dtype)
    for bias in (None, mask(TOKENS, TOKENS, dtype=dtype), mask(TOKENS, TOKENS)):
        with torch.autocast("cpu", BF16):
            fused = F.scaled_dot_product_attention(*tensors, bias)
            with sdpa_kernel(MATH):
                assert F.scaled_dot_product_attention(*tensors, bias).dtype == fused.dtype
        assert all(x.dtype == dtype for x in torch.autograd.grad(fused.sum(), tensors))
    assert operators.names == 3 * [FUSED if dtype is F32 else UNFUSED, UNFUSED]


def test_calls_that_torch_refuses_are_refused(operators: Operators) -> None:
    query, key, value = inputs(value=OTHER)
    attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    for given in (
        {"query": query, "key": key, "value": value, "attn_mask": mask(), "is_causal": True},
        {"query": query, "key": key.float(), "value": value},
        {"query": query, "key": key[..., :8], "value": value},
        {"query": query, "key": key, "value": value[:, :, 1:]},
    ):
        with pytest.raises(RuntimeError):
            attention(**given)
    with pytest.raises(TypeError):
        attention(query, key, value, window=8)


@pytest.mark.parametrize("weights", [False, True])
def test_torchs_own_layer_calls_it(operators: Operators, weights: bool) -> None:
    layer = nn.MultiheadAttention(HEADS * WIDTH, HEADS, dropout=0.1, batch_first=True, dtype=BF16)
    x = torch.empty(BATCH, TOKENS, HEADS * WIDTH, dtype=BF16)
    result, scores = layer(x, x, x, need_weights=weights)
    assert result.shape == x.shape and (scores is not None) == weights
    assert operators.names == ([] if weights else [FUSED])


def test_real_tensors_get_their_values() -> None:
    tensors = [torch.randn(BATCH, HEADS, TOKENS, width) for width in (WIDTH, WIDTH, OTHER)]
    expected = F.scaled_dot_product_attention(*tensors)
    with FusedAttention():
        assert torch.equal(F.scaled_dot_product_attention(*tensors), expected)

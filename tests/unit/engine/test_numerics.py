"""Numerics: the settings that decide a kernel's bits are read and restored without a trace, however they were set."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.engine import recompute as recompute_module
from ebbtide.engine.numerics import current_numerics, exactly
from tests.helpers.interrupts import Fuse
from tests.helpers.parts import WIDTH, Model, Part, differing, gated_model, training_step
from tests.helpers.torches import CURRENT_PRECISIONS, needs_current_precisions

# ruff: noqa: B023 - functions defined in a loop are called in the same round

NODES = [("generic", "all"), *((b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn"))]

DENORMAL = float.fromhex("0x1p-1074")
"""No compiler makes a constant of a product of it."""

Setting = Callable[[], object]


@pytest.fixture(autouse=True)
def settings_of_a_new_process() -> Iterator[None]:
    _reset()
    yield
    _reset()


def _reset() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for node in NODES:
        default = "tf32" if node in (("cuda", "conv"), ("cuda", "rnn")) else "none"
        if CURRENT_PRECISIONS:
            torch._C._set_fp32_precision_setter(*node, default)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    torch.set_default_dtype(torch.float32)
    for name in ("mkldnn_deterministic", "cudnn_benchmark", "cudnn_deterministic"):
        getattr(torch._C, f"_set_{name}")(False)
    torch._C._set_mkldnn_enabled(True)
    torch._C._set_nnpack_enabled(True)
    torch._C._set_cudnn_enabled(True)
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_accumulation = False


def _set(path: str, value: object) -> Setting:
    *owner, name = path.split(".")

    def call() -> None:
        target: Any = torch.backends
        for part in owner:
            target = getattr(target, part)
        setattr(target, name, value)

    call.__name__ = f"{path}={value}"
    return call


def _all(*settings: Setting) -> Setting:
    def call() -> None:
        for setting in settings:
            setting()

    call.__name__ = ",".join(setting.__name__ for setting in settings)
    return call


def _offered(*settings: Setting) -> list[Setting]:
    """Return the settings that this torch has."""
    return [s for s in settings if CURRENT_PRECISIONS or not ("fp32_precision" in s.__name__ or "(" in s.__name__)]


def highest() -> None:
    torch.set_float32_matmul_precision("highest")


def high() -> None:
    torch.set_float32_matmul_precision("high")


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


def deterministic() -> None:
    torch.use_deterministic_algorithms(True)


def warn_only() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


def double() -> None:
    torch.set_default_dtype(torch.float64)


def two_threads() -> None:
    torch.set_num_threads(2)


def flush_denormal() -> None:
    torch.set_flush_denormal(True)


def without_nnpack() -> None:
    torch._C._set_nnpack_enabled(False)


def nothing() -> None:
    pass


PRECISIONS = _offered(
    _set("fp32_precision", "tf32"),
    _set("fp32_precision", "ieee"),
    _set("fp32_precision", "bf16"),
    _set("cuda.matmul.fp32_precision", "tf32"),
    _set("cuda.matmul.fp32_precision", "ieee"),
    _set("cudnn.fp32_precision", "tf32"),
    _set("cudnn.fp32_precision", "ieee"),
    _set("cudnn.conv.fp32_precision", "tf32"),
    _set("cudnn.conv.fp32_precision", "ieee"),
    _set("cudnn.rnn.fp32_precision", "ieee"),
    _set("mkldnn.matmul.fp32_precision", "bf16"),
    _set("mkldnn.conv.fp32_precision", "bf16"),
    _set("mkldnn.rnn.fp32_precision", "tf32"),
    _all(_set("fp32_precision", "tf32"), _set("cuda.matmul.fp32_precision", "tf32")),
    _all(_set("fp32_precision", "ieee"), _set("cudnn.fp32_precision", "ieee")),
    _all(_set("cudnn.fp32_precision", "ieee"), _set("cudnn.conv.fp32_precision", "ieee")),
    _all(_set("cudnn.fp32_precision", "tf32"), _set("cudnn.conv.fp32_precision", "none")),
    highest,
    high,
    medium,
    _set("cuda.matmul.allow_tf32", True),
    _set("cudnn.allow_tf32", False),
    _all(medium, _set("cuda.matmul.fp32_precision", "ieee")),
)  # fmt: skip

FLAGS = _offered(
    deterministic,
    warn_only,
    double,
    two_threads,
    flush_denormal,
    without_nnpack,
    _set("mkldnn.enabled", False),
    _set("mkldnn.deterministic", True),
    _set("cudnn.enabled", False),
    _set("cudnn.benchmark", True),
    _set("cudnn.deterministic", True),
    _set("cuda.matmul.allow_fp16_reduced_precision_reduction", False),
    _set("cuda.matmul.allow_bf16_reduced_precision_reduction", (False, False)),
    _set("cuda.matmul.allow_fp16_accumulation", True),
)


def _names(setting: Setting) -> str:
    return setting.__name__


def _read(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:
        return "raises"


def _shown() -> list[Any]:
    """Return the numerics visible to a program, through the current and the older interface."""
    cuda = torch.backends.cuda.matmul
    getters: list[Callable[[], Any]] = [
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cudnn.allow_tf32,
        lambda: cuda.allow_tf32,
        torch.are_deterministic_algorithms_enabled,
        torch.is_deterministic_algorithms_warn_only_enabled,
        torch.get_num_threads,
        torch.get_default_dtype,
        lambda: 2 * DENORMAL > DENORMAL,
        lambda: torch.backends.mkldnn.enabled,
        lambda: torch.backends.mkldnn.deterministic,
        torch._C._get_nnpack_enabled,
        lambda: [getattr(torch.backends.cudnn, n) for n in ("enabled", "benchmark", "deterministic")],
        lambda: [getattr(cuda, f"allow_{t}_reduced_precision_reduction") for t in ("fp16", "bf16")],
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda: cuda.allow_fp16_accumulation,
    ]
    precisions = [torch._C._get_fp32_precision_getter(*node) for node in NODES if CURRENT_PRECISIONS]
    return [*precisions, *(_read(getter) for getter in getters)]


THEN = _offered(
    nothing,
    _set("fp32_precision", "tf32"),
    _set("fp32_precision", "ieee"),
    _set("cudnn.fp32_precision", "ieee"),
    _all(_set("fp32_precision", "ieee"), _set("cudnn.fp32_precision", "none")),
    high,
)
"""What a program may do next: shows which settings are inherited."""


def _seen_afterwards(setting: Setting, between: Callable[[], object]) -> list[list[Any]]:
    seen: list[list[Any]] = []
    for then in THEN:
        _reset()
        setting()
        between()
        then()
        seen.append(_shown())
    return seen


@pytest.mark.parametrize("policy", ["auto", "minimal"])
@pytest.mark.parametrize("setting", PRECISIONS, ids=_names)
def test_training_goes_on_under_every_setting(setting: Setting, policy: str) -> None:
    model, x = gated_model(), torch.randn(4, WIDTH)
    setting()
    expected = training_step(model, x)
    shown = _shown()
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*"):
        for _ in range(6):
            assert differing(expected, training_step(model, x)) == []
            assert _shown() == shown


@pytest.mark.parametrize("first", [nothing, *PRECISIONS, *FLAGS], ids=_names)
def test_a_recompute_restores_the_previous_numerics(first: Setting) -> None:
    first()
    numerics, shown = current_numerics(), _shown()[: len(NODES)]
    for setting in (nothing, *PRECISIONS, *FLAGS):
        inside: list[Any] = []

        def recompute() -> Tensor:
            inside.append((current_numerics(), _shown()[: len(NODES)]))
            return torch.zeros(())

        def between() -> None:
            exactly("cpu", numerics, recompute)

        assert _seen_afterwards(setting, between) == _seen_afterwards(setting, nothing), setting.__name__
        assert inside == [(numerics, shown)] * len(THEN), setting.__name__


@pytest.mark.parametrize("setting", [s for s in (*PRECISIONS, *FLAGS) if s is not highest], ids=_names)
def test_numerics_differ_where_kernels_may(setting: Setting) -> None:
    before, shown = current_numerics(), _shown()
    setting()
    assert (current_numerics() != before) == (_shown() != shown)


FRESH = """
import torch
from ebbtide.engine.numerics import NumericsChange, current_numerics
b = torch.backends
b.mkldnn.conv.fp32_precision = "bf16"
forward = current_numerics()
b.mkldnn.conv.fp32_precision = "none"
if changes:
    change = NumericsChange()
    change.apply(forward)
    assert b.mkldnn.conv.fp32_precision == "bf16"
    change.undo()
found = [b.cudnn.conv.fp32_precision, b.cudnn.rnn.fp32_precision]
b.fp32_precision = "ieee"
print(*found, b.cudnn.conv.fp32_precision, b.cudnn.rnn.fp32_precision, b.mkldnn.conv.fp32_precision)
"""


@needs_current_precisions
def test_what_nobody_has_set_yields_to_what_is_set_later() -> None:
    """In a fresh process: no write restores the initial value of cuDNN's precisions."""
    found = [
        subprocess.run(
            [sys.executable, "-c", f"changes = {changes}\n{FRESH}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.split()
        for changes in (False, True)
    ]
    assert found[1] == found[0]
    if torch.version.cuda is None:  # torch 2.11 for CUDA differs here, with and without a change
        assert found[0] == ["tf32", "tf32", "ieee", "ieee", "ieee"]


@pytest.mark.parametrize("policy", ["auto", "minimal"])
@pytest.mark.parametrize("setting", [*PRECISIONS, *FLAGS], ids=_names)
def test_a_recompute_runs_under_the_numerics_of_its_forward(
    setting: Setting, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is double:
        pytest.skip("weights of another dtype than the data")
    recomputed: list[Any] = []
    evaluate = recompute_module.evaluate

    def recording(*given: Any) -> Tensor:
        recomputed.append(current_numerics())
        return evaluate(*given)

    monkeypatch.setattr(recompute_module, "evaluate", recording)
    model, x = gated_model(), torch.randn(4, WIDTH, requires_grad=True)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*"):
        for _ in range(2):
            setting()
            numerics = current_numerics()
            loss = model(x).square().sum()
            _reset()
            recomputed.clear()
            shown = _shown()
            loss.backward()
            assert _shown() == shown
            if policy == "auto":  # minimal checkpoints blocks
                assert recomputed
            assert all(found == numerics for found in recomputed)


@pytest.mark.parametrize("setting", [*PRECISIONS, *FLAGS], ids=_names)
def test_a_checkpointed_block_runs_under_the_numerics_of_its_forward(setting: Setting) -> None:
    if setting is double:
        pytest.skip("weights of another dtype than the data")
    runs: list[Any] = []
    noted = SimpleNamespace(runs=runs)  # a list that the forward names itself would be found

    def forward(s: Any, x: Tensor) -> Tensor:
        noted.runs.append(current_numerics())
        return x + s.b(s.a(x).cumprod(-1).cummax(-1).values)

    model = Model(lambda: Part(forward, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)))
    x = torch.randn(4, WIDTH, requires_grad=True)
    with ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0, blocks="layers.*"):
        for step in range(3):
            setting()
            numerics = current_numerics()
            loss = model(x).square().sum()
            _reset()
            runs.clear()
            shown = _shown()
            loss.backward()
            assert _shown() == shown
            assert runs or not step
            assert all(found == numerics for found in runs)


def convolution(s: Any, x: Tensor) -> Tensor:
    return x + s.b(nn.functional.silu(s.a(nn.functional.silu(x))))


@needs_current_precisions
@pytest.mark.parametrize("policy", ["auto", "minimal", "offload"])
@pytest.mark.parametrize("where", ["the forward", "the backward"])
def test_convolutions_under_another_precision_on_one_side(policy: str, where: str) -> None:
    """Bits differ only on machines with bfloat16 units."""

    def precise(value: str) -> None:
        torch.backends.mkldnn.conv.fp32_precision = value

    def steps(model: nn.Module, given: Tensor) -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = []
        for _ in range(6):
            model.zero_grad()
            precise("bf16" if where == "the forward" else "ieee")
            loss = model(given).square().mean()
            precise("ieee" if where == "the forward" else "bf16")
            loss.backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return found

    model = Model(lambda: Part(convolution, a=nn.Conv2d(16, 16, 3, padding=1), b=nn.Conv2d(16, 16, 3, padding=1)))
    x = torch.randn(2, 16, 8, 8)
    expected = steps(model, x)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*"):
        for one, other in zip(expected, steps(model, x), strict=True):
            assert differing(one, other) == []


def faint(s: Any, x: Tensor) -> Tensor:
    return x + s.b(nn.functional.silu(s.a(x) * 1e-38) * 1e38)


@pytest.mark.parametrize("policy", ["auto", "minimal", "offload"])
@pytest.mark.parametrize("where", ["the forward", "the backward"])
def test_denormal_numbers_that_are_zero_on_one_side(policy: str, where: str) -> None:
    def steps(model: nn.Module) -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = []
        for _ in range(6):
            model.zero_grad()
            torch.set_flush_denormal(where == "the forward")
            loss = model(x).square().mean()
            torch.set_flush_denormal(where == "the backward")
            loss.backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return found

    model, x = Model(lambda: Part(faint, a=nn.Linear(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH))), torch.randn(4, WIDTH)
    expected = steps(model)
    with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, blocks="layers.*"):
        for one, other in zip(expected, steps(model), strict=True):
            assert differing(one, other) == []


@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="Python traces the instructions of code from its second call on"
)
def test_an_interrupt_leaves_nothing_changed() -> None:
    warn_only()
    numerics = current_numerics()

    def user() -> None:
        _set("fp32_precision", "tf32")()
        _set("cudnn.fp32_precision", "tf32")()
        torch.backends.cudnn.benchmark = True

    def recompute() -> None:
        exactly("cpu", numerics, lambda: torch.zeros(()))

    expected = _seen_afterwards(user, nothing)
    counting = Fuse(KeyboardInterrupt)
    _reset()
    user()
    counting.burn(recompute)
    assert counting.count > 100
    for when in range(1, counting.count + 1):
        places: list[str] = []

        def struck() -> None:
            fuse = Fuse(KeyboardInterrupt, when)
            with pytest.raises(KeyboardInterrupt):
                fuse.burn(recompute)
            places.append(fuse.where)

        assert _seen_afterwards(user, struck) == expected, places

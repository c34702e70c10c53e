"""The texts of the errors that ``enable_activation_offloading`` and the step after it raise, word for word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ebbtide import Auto, register_recompute
from ebbtide import enable_activation_offloading as enable
from ebbtide.base import errors
from ebbtide.base.errors import EbbtideError
from tests.helpers.models import Tiny, build
from tests.helpers.oracle import differences

SIZES = "; expected a size above zero, such as '40GiB', '40 GB', '512MiB' or a number of bytes\nhint: "
UNITS = "KB, MB, GB count in thousands; KiB, MiB, GiB (and K, M, G) in 1024s"
NO_PART = "there is no part of a byte and no size below one: give a larger size, or leave it out"


def _twice(tiny: Tiny) -> None:
    with enable(tiny.model):
        enable(tiny.model)


def _after_close(tiny: Tiny) -> None:
    handle = enable(tiny.model)
    handle.close()
    handle.enable()


def _under_other_hooks(tiny: Tiny) -> None:
    with enable(tiny.model), torch.autograd.graph.save_on_cpu():
        tiny.model(tiny.inputs["x"])


def _changed_in_place(tiny: Tiny) -> None:
    # Where something is recomputed from x, the text depends on whether x was on disk before it was changed.
    with enable(tiny.model, policy="offload", min_bytes=0):
        x = tiny.inputs["x"] * 1
        y = tiny.model(x)
        x.add_(1)
        y.sum().backward()


CASES: dict[str, tuple[Callable[[Tiny], Any], str, str]] = {
    "unknown strategy": (
        lambda tiny: enable(tiny.model, "fsdp3"),
        "ConfigError",
        "strategy is 'fsdp3'; expected one of auto, single, ddp, fsdp, fsdp2\n"
        "hint: did you mean 'fsdp', 'fsdp2', 'ddp'?",
    ),
    "not wrapped so": (
        lambda tiny: enable(tiny.model, "fsdp2"),
        "StrategyError",
        "strategy is 'fsdp2' and the model is wrapped as 'single'; "
        "expected a model wrapped by torch.distributed.fsdp.fully_shard(model)\n"
        "hint: wrap the model first, or pass strategy='auto'",
    ),
    "no blocks": (
        lambda tiny: enable(nn.Identity()),
        "BlocksError",
        "Identity has no parameters; expected a model that is trained\n"
        "hint: use `with ebbtide.offload_saved_tensors():` around the forward",
    ),
    "glob that matches nothing": (
        lambda tiny: enable(tiny.model, blocks=["layer.*"]),
        "BlocksError",
        "blocks='layer.*' matches no module of Stack; "
        "expected a path from model.named_modules(), where * matches anything\n"
        "hint: did you mean 'layers', 'layers.2', 'layers.1'?",
    ),
    "unknown policy": (
        lambda tiny: enable(tiny.model, policy="minmal"),
        "ConfigError",
        "policy is 'minmal'; expected one of keep, offload, inputs, minimal, auto\nhint: did you mean 'minimal'?",
    ),
    "checkpointing and a policy": (
        lambda tiny: enable(tiny.model, enable_ckpt=True, policy="auto"),
        "ConfigError",
        "enable_ckpt=True and policy='auto'; expected one of the two\nhint: enable_ckpt means policy=Minimal()",
    ),
    "no module": (
        lambda tiny: enable(print),  # type: ignore[arg-type]
        "ConfigError",
        "model is a builtin_function_or_method; expected a torch.nn.Module\nhint: pass the model itself",
    ),
    "unknown target": (
        lambda tiny: enable(tiny.model, target="hots"),
        "ConfigError",
        "target is 'hots'; expected one of auto, host, disk\nhint: did you mean 'host'?",
    ),
    "no window": (lambda tiny: enable(tiny.model, window=0), "ConfigError", "window is 0" + SIZES + NO_PART),
    "no host budget": (
        lambda tiny: enable(tiny.model, host_budget="x"),
        "ConfigError",
        "host_budget is 'x'" + SIZES + UNITS,
    ),
    "unknown unit": (
        lambda tiny: enable(tiny.model, window="40 GBi"),
        "ConfigError",
        "window is '40 GBi'" + SIZES + "did you mean 'GB', 'GiB', 'B'?",
    ),
    "part of a byte": (
        lambda tiny: enable(tiny.model, min_bytes=1.5),  # type: ignore[arg-type]
        "ConfigError",
        "min_bytes is 1.5" + SIZES + NO_PART,
    ),
    "true is no size": (
        lambda tiny: enable(tiny.model, min_bytes=True),
        "ConfigError",
        "min_bytes is True" + SIZES + UNITS,
    ),
    "no size at all": (
        lambda tiny: enable(tiny.model, host_budget=[1]),  # type: ignore[arg-type]
        "ConfigError",
        "host_budget is [1]" + SIZES + UNITS,
    ),
    "no strategy": (
        lambda tiny: enable(tiny.model, None),  # type: ignore[arg-type]
        "ConfigError",
        "strategy is None; expected one of auto, single, ddp, fsdp, fsdp2\n"
        "hint: 'auto' takes the model as it is wrapped",
    ),
    "checkpointing in quotes": (
        lambda tiny: enable(tiny.model, enable_ckpt="false"),  # type: ignore[arg-type]
        "ConfigError",
        "enable_ckpt is 'false'; expected true or false\nhint: pass the value itself, without quotes",
    ),
    "checkpointing by number": (
        lambda tiny: enable(tiny.model, enable_ckpt=1),  # type: ignore[arg-type]
        "ConfigError",
        "enable_ckpt is 1; expected true or false\nhint: pass True or False",
    ),
    "policy of another kind": (
        lambda tiny: enable(tiny.model, policy=["auto"]),  # type: ignore[arg-type]
        "ConfigError",
        "policy is ['auto']; expected Auto(...), Offload(), Inputs(), Minimal(), Keep(), a name, or a plan that was "
        "made or saved\n"
        "hint: such as policy='minimal'",
    ),
    "verify in quotes": (
        lambda tiny: enable(tiny.model, verify="yes"),  # type: ignore[arg-type]
        "ConfigError",
        "verify is 'yes'; expected true or false\nhint: pass the value itself, without quotes",
    ),
    "policy that nothing resembles": (
        lambda tiny: enable(tiny.model, policy="zzz"),
        "ConfigError",
        "policy is 'zzz'; expected one of keep, offload, inputs, minimal, auto\n"
        "hint: 'auto' is the policy where none is named",
    ),
    "slowdown that is no number": (
        lambda tiny: Auto(max_slowdown="x"),  # type: ignore[arg-type]
        "ConfigError",
        "max_slowdown is 'x'; expected a number\nhint: 0.05 allows a step that is 5 % slower",
    ),
    "blocks by number": (
        lambda tiny: enable(tiny.model, blocks=[1]),  # type: ignore[list-item]
        "ConfigError",
        "blocks is [1]; expected a list of paths from model.named_modules(), as text\n"
        "hint: such as blocks=['encoder', 'decoder.*']; leave it out to find them by structure",
    ),
    "no blocks named": (
        lambda tiny: enable(tiny.model, blocks=[]),
        "ConfigError",
        "blocks is []; expected a list of paths from model.named_modules(), as text\n"
        "hint: such as blocks=['encoder', 'decoder.*']; leave it out to find them by structure",
    ),
    "filter that is no function": (
        lambda tiny: enable(tiny.model, tensor_filter=3),  # type: ignore[arg-type]
        "ConfigError",
        "tensor_filter is 3; expected a function of a tensor that returns true or false\n"
        "hint: such as tensor_filter=lambda t: t.numel() > 1000",
    ),
    "keep filter that is no function": (
        lambda tiny: enable(tiny.model, keep_filter="x"),  # type: ignore[arg-type]
        "ConfigError",
        "keep_filter is 'x'; expected a function of a tensor that returns true or false\n"
        "hint: such as keep_filter=lambda t: t.numel() > 1000",
    ),
    "class in place of a model": (
        lambda tiny: enable(nn.Linear),  # type: ignore[arg-type]
        "ConfigError",
        "model is the class Linear; expected a torch.nn.Module\nhint: pass the model itself",
    ),
    "empty directory": (
        lambda tiny: enable(tiny.model, disk_path=""),
        "ConfigError",
        "disk_path is ''; expected a path\nhint: such as disk_path='some/folder'",
    ),
    "directory that is no path": (
        lambda tiny: enable(tiny.model, disk_path=5),  # type: ignore[arg-type]
        "ConfigError",
        "disk_path is 5; expected a path\nhint: such as disk_path='some/folder'",
    ),
    "target that is no text": (
        lambda tiny: enable(tiny.model, target=None),  # type: ignore[arg-type]
        "ConfigError",
        "target is None; expected one of auto, host, disk\n"
        "hint: 'auto' takes host memory with an accelerator, disk without",
    ),
    "node without a name": (
        lambda tiny: register_recompute(" ", lambda node: None),
        "ConfigError",
        "name is empty; expected an autograd node's\n"
        "hint: tensor.grad_fn.name() tells it; docs/guides/custom-operators.md shows a rule",
    ),
    "rule that is no function": (
        lambda tiny: register_recompute("XBackward", "y"),  # type: ignore[arg-type]
        "ConfigError",
        "rule is a str; expected a function of a NodeView\nhint: docs/guides/custom-operators.md shows a rule",
    ),
    "negative min_bytes": (
        lambda tiny: enable(tiny.model, min_bytes=-1),
        "ConfigError",
        "min_bytes is -1; expected 0 or more\nhint: 0 moves everything, 65536 is a good size",
    ),
    "no such directory": (
        lambda tiny: enable(tiny.model, target="disk", disk_path="/no/such/place"),
        "DiskError",
        "disk path '/no/such/place' does not exist; expected an existing directory\n"
        "hint: give a directory on a local disk with disk_path=...",
    ),
    "two handles": (
        _twice,
        "ConflictError",
        "block 'layers.0' is already offloaded by another handle; expected one offloader on a model\n"
        "hint: call close() on the first handle, or keep using it",
    ),
    "closed handle": (
        _after_close,
        "ConfigError",
        "this handle is closed; expected an open handle\nhint: call enable_activation_offloading again",
    ),
    "under other hooks": (
        _under_other_hooks,
        "ConflictError",
        "block 'layers.0' runs under other saved-tensor hooks "
        "(torch.autograd.graph.save_on_cpu.__init__.<locals>.pack_to_cpu); expected one offloader on a model\n"
        "hint: leave that context, or unset its flag (TRL and torchtune: activation_offloading, "
        "enable_activation_offloading; transformers: gradient_checkpointing_kwargs['offload'])",
    ),
    "changed in place": (
        _changed_in_place,
        "ModifiedInPlaceError",
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        "[float32 [2, 12, 48]] saved at Mlp/norm/input#0 is at version 1; expected version 0 instead\n"
        "while restoring Mlp/norm/input#0 of block 'layers.0' (offload)\n"
        "hint: the same step fails without ebbtide; torch.autograd.set_detect_anomaly(True) names the operation",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_says_exactly_this(name: str) -> None:
    raises, kind, text = CASES[name]
    with pytest.raises(EbbtideError) as caught:
        raises(build("mlp"))
    assert type(caught.value) is getattr(errors, kind)
    assert str(caught.value) == text


def test_after_an_error_the_model_trains_as_if_nothing_had_been() -> None:
    tiny = build("mlp")
    for error in (_twice, _under_other_hooks, _changed_in_place):
        with pytest.raises(EbbtideError):
            error(tiny)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in tiny.model.modules())
    assert differences(build("mlp").step(), tiny.step()) == []

"""The texts of the errors that ``enable_activation_offloading`` and the step after it raise: type, facts and a hint."""

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
from tests.helpers.texts import lacks


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
    # If something is recomputed from x, the text depends on whether x was on disk before it was changed.
    with enable(tiny.model, policy="offload", min_bytes=0):
        x = tiny.inputs["x"] * 1
        y = tiny.model(x)
        x.add_(1)
        y.sum().backward()


CASES: dict[str, tuple[Callable[[Tiny], Any], str, tuple[str, ...]]] = {
    "unknown strategy": (
        lambda tiny: enable(tiny.model, "fsdp3"),
        "ConfigError",
        (
            "'fsdp3'",
            "'fsdp'",
            "'fsdp2'",
            "'ddp'",
        ),
    ),
    "not wrapped so": (
        lambda tiny: enable(tiny.model, "fsdp2"),
        "StrategyError",
        (
            "'fsdp2'",
            "'single'",
            "fully_shard",
            "'auto'",
        ),
    ),
    "no blocks": (
        lambda tiny: enable(nn.Identity()),
        "BlocksError",
        ("`with ebbtide.offload_saved_tensors():`",),
    ),
    "glob that matches nothing": (
        lambda tiny: enable(tiny.model, blocks=["layer.*"]),
        "BlocksError",
        (
            "'layer.*'",
            "named_modules",
            "'layers'",
            "'layers.2'",
            "'layers.1'",
        ),
    ),
    "unknown policy": (
        lambda tiny: enable(tiny.model, policy="minmal"),
        "ConfigError",
        (
            "'minmal'",
            "'minimal'",
        ),
    ),
    "checkpointing and a policy": (
        lambda tiny: enable(tiny.model, enable_ckpt=True, policy="auto"),
        "ConfigError",
        (
            "enable_ckpt",
            "'auto'",
        ),
    ),
    "no module": (
        lambda tiny: enable(print),  # type: ignore[arg-type]
        "ConfigError",
        ("builtin_function_or_method",),
    ),
    "unknown target": (
        lambda tiny: enable(tiny.model, target="hots"),
        "ConfigError",
        (
            "'hots'",
            "'host'",
        ),
    ),
    "no window": (
        lambda tiny: enable(tiny.model, window=0),
        "ConfigError",
        (
            "0",
            "'40GiB'",
            "'40 GB'",
            "'512MiB'",
        ),
    ),
    "no host budget": (
        lambda tiny: enable(tiny.model, host_budget="x"),
        "ConfigError",
        (
            "host_budget",
            "'x'",
            "'40GiB'",
            "'40 GB'",
            "'512MiB'",
        ),
    ),
    "unknown unit": (
        lambda tiny: enable(tiny.model, window="40 GBi"),
        "ConfigError",
        (
            "'40 GBi'",
            "'40GiB'",
            "'40 GB'",
            "'512MiB'",
            "'GB'",
            "'GiB'",
            "'B'",
        ),
    ),
    "part of a byte": (
        lambda tiny: enable(tiny.model, min_bytes=1.5),  # type: ignore[arg-type]
        "ConfigError",
        (
            "min_bytes",
            "1.5",
            "'40GiB'",
            "'40 GB'",
            "'512MiB'",
        ),
    ),
    "true is no size": (
        lambda tiny: enable(tiny.model, min_bytes=True),
        "ConfigError",
        (
            "min_bytes",
            "'40GiB'",
            "'40 GB'",
            "'512MiB'",
        ),
    ),
    "no size at all": (
        lambda tiny: enable(tiny.model, host_budget=[1]),  # type: ignore[arg-type]
        "ConfigError",
        (
            "host_budget",
            "[1]",
            "'40GiB'",
            "'40 GB'",
            "'512MiB'",
        ),
    ),
    "no strategy": (
        lambda tiny: enable(tiny.model, None),  # type: ignore[arg-type]
        "ConfigError",
        ("'auto'",),
    ),
    "checkpointing in quotes": (
        lambda tiny: enable(tiny.model, enable_ckpt="false"),  # type: ignore[arg-type]
        "ConfigError",
        (
            "enable_ckpt",
            "'false'",
        ),
    ),
    "checkpointing by number": (
        lambda tiny: enable(tiny.model, enable_ckpt=1),  # type: ignore[arg-type]
        "ConfigError",
        (
            "enable_ckpt",
            "1",
        ),
    ),
    "policy of another kind": (
        lambda tiny: enable(tiny.model, policy=["auto"]),  # type: ignore[arg-type]
        "ConfigError",
        (
            "['auto']",
            "'minimal'",
        ),
    ),
    "verify in quotes": (
        lambda tiny: enable(tiny.model, verify="yes"),  # type: ignore[arg-type]
        "ConfigError",
        ("'yes'",),
    ),
    "policy that nothing resembles": (
        lambda tiny: enable(tiny.model, policy="zzz"),
        "ConfigError",
        (
            "'zzz'",
            "'auto'",
        ),
    ),
    "slowdown that is no number": (
        lambda tiny: Auto(max_slowdown="x"),  # type: ignore[arg-type]
        "ConfigError",
        (
            "max_slowdown",
            "'x'",
            "0.05",
            "5 %",
        ),
    ),
    "slowdown in percent": (lambda tiny: Auto(max_slowdown=5), "ConfigError", ("5", "between 0 and 1", "0.05")),
    "blocks by number": (
        lambda tiny: enable(tiny.model, blocks=[1]),  # type: ignore[list-item]
        "ConfigError",
        (
            "[1]",
            "named_modules",
            "['encoder', 'decoder.*']",
        ),
    ),
    "no blocks named": (
        lambda tiny: enable(tiny.model, blocks=[]),
        "ConfigError",
        (
            "named_modules",
            "['encoder', 'decoder.*']",
        ),
    ),
    "filter that is no function": (
        lambda tiny: enable(tiny.model, tensor_filter=3),  # type: ignore[arg-type]
        "ConfigError",
        (
            "tensor_filter",
            "3",
            "1000",
        ),
    ),
    "keep filter that is no function": (
        lambda tiny: enable(tiny.model, keep_filter="x"),  # type: ignore[arg-type]
        "ConfigError",
        (
            "keep_filter",
            "'x'",
            "1000",
        ),
    ),
    "class in place of a model": (
        lambda tiny: enable(nn.Linear),  # type: ignore[arg-type]
        "ConfigError",
        ("model is the class Linear",),
    ),
    "empty directory": (
        lambda tiny: enable(tiny.model, disk_path=""),
        "ConfigError",
        (
            "disk_path",
            "'some/folder'",
        ),
    ),
    "directory that is no path": (
        lambda tiny: enable(tiny.model, disk_path=5),  # type: ignore[arg-type]
        "ConfigError",
        (
            "disk_path",
            "5",
            "'some/folder'",
        ),
    ),
    "target that is no text": (
        lambda tiny: enable(tiny.model, target=None),  # type: ignore[arg-type]
        "ConfigError",
        ("'auto'",),
    ),
    "node without a name": (
        lambda tiny: register_recompute(" ", lambda node: None),
        "ConfigError",
        ("grad_fn",),
    ),
    "rule that is no function": (
        lambda tiny: register_recompute("XBackward", "y"),  # type: ignore[arg-type]
        "ConfigError",
        ("rule is a str",),
    ),
    "negative min_bytes": (
        lambda tiny: enable(tiny.model, min_bytes=-1),
        "ConfigError",
        (
            "min_bytes",
            "-1",
            "0",
        ),
    ),
    "no such directory": (
        lambda tiny: enable(tiny.model, target="disk", disk_path="/no/such/place"),
        "DiskPathError",
        (
            "'/no/such/place'",
            "disk_path",
        ),
    ),
    "two handles": (
        _twice,
        "ConflictError",
        ("'layers.0'",),
    ),
    "closed handle": (
        _after_close,
        "ConfigError",
        ("enable_activation_offloading",),
    ),
    "under other hooks": (
        _under_other_hooks,
        "ConflictError",
        (
            "'layers.0'",
            "save_on_cpu",
            "pack_to_cpu",
            "torch's save_on_cpu offloads activations",
            "activation_checkpointing_kwargs",
            "['offload']",
        ),
    ),
    "changed in place": (
        _changed_in_place,
        "ModifiedInPlaceError",
        (
            "float32 [2, 12, 48]",
            "modified by an inplace operation",
            "Mlp/norm/input#0",
            "'layers.0'",
            "set_detect_anomaly",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_has_the_facts_and_a_hint(name: str) -> None:
    raises, kind, facts = CASES[name]
    with pytest.raises(EbbtideError) as caught:
        raises(build("mlp"))
    assert type(caught.value) is getattr(errors, kind)
    assert lacks(str(caught.value), facts) == []


def test_after_an_error_the_model_trains_as_if_nothing_had_been() -> None:
    tiny = build("mlp")
    for error in (_twice, _under_other_hooks, _changed_in_place):
        with pytest.raises(EbbtideError):
            error(tiny)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in tiny.model.modules())
    assert differences(build("mlp").step(), tiny.step()) == []

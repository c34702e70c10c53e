"""A step that an error or an interrupt ends, with late copies: the next ones are bitwise ordinary training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ebbtide
from tests.gpu.test_first_light import _batch, _model, _same, _step
from tests.simdev.device import configured

STEPS = 2
AFTER = (0, 5, 17)
"""How many calls go well before the one that does not."""


class Planted(Exception):
    """The exception that a test raises."""


def failing(call: Callable[..., Any], after: int, error: type[BaseException]) -> Callable[..., Any]:
    """Return ``call``, which raises once, at the given number of calls."""
    calls = iter(range(10**6))

    def instead(*given: Any, **named: Any) -> Any:
        if next(calls) == after:
            raise error
        return call(*given, **named)

    return instead


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("name", ["copy_all", "record", "wait", "allocate", "query"])
@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_an_interrupt_at_a_call_of_the_device(
    policy: str, name: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _model(width=64, depth=3), _batch(width=64, tokens=64)
    plain = _step(model, x)
    with (
        ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1B") as handle,
        configured(copy_delay_us=300, kernel_delay_us=20),
    ):
        assert _same(plain, _step(model, x))
        tier: Any = handle._engine.tier
        device = getattr(tier, "host", tier).device
        monkeypatch.setattr(device, name, failing(getattr(device, name), after, KeyboardInterrupt))
        struck = True
        with contextlib.suppress(KeyboardInterrupt):
            _step(model, x)
            struck = False
        monkeypatch.undo()
        assert struck or after or (policy, name) == ("auto", "query")
        for _ in range(STEPS):
            assert _same(plain, _step(model, x))
        assert handle.stats().live_tickets == handle.stats().store_bytes == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("policy", ["offload", "minimal", "auto"])
def test_an_error_in_a_block(policy: str, where: str) -> None:
    model, x = _model(width=64, depth=3), _batch(width=64, tokens=64)
    plain = _step(model, x)

    def fail(*_: object) -> None:
        raise Planted

    with (
        ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0, window="1B") as handle,
        configured(copy_delay_us=300),
    ):
        assert _same(plain, _step(model, x))
        hook = (
            model[1].down.register_forward_hook(fail)
            if where == "forward"
            else model[1].down.register_full_backward_hook(fail)
        )
        with pytest.raises(Planted):
            _step(model, x)
        hook.remove()
        for _ in range(STEPS):
            assert _same(plain, _step(model, x))
        torch.accelerator.synchronize()
        assert handle.stats().live_tickets == handle.stats().store_bytes == 0

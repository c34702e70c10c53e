"""The outermost calls of modules, from several threads and under a script's own patches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from ebbtide.script.calls import OutermostCalls

SECONDS = 20.0


class Calling(nn.Module):
    """Calls its parts, and functions between them."""

    def __init__(self, *between: Callable[[], object]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Identity()) for _ in range(1 + len(between)))
        self._between = (*between, lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, function in zip(self.parts, self._between, strict=True):
            x = part(x)
            function()
        return x


@pytest.fixture
def calls() -> Generator[tuple[OutermostCalls, list[nn.Module]], None, None]:
    """Report calls; torch's own are restored."""
    own = {name: vars(nn.Module)[name] for name in ("__call__", "_call_impl")}
    reported: list[nn.Module] = []
    found = OutermostCalls(lambda module, *_: reported.append(module), lambda: None)
    yield found, reported
    for name, call in own.items():
        setattr(nn.Module, name, call)


def test_a_layer_is_no_model_while_another_threads_model_returns(calls) -> None:
    looking, reported = calls
    began, seen = threading.Event(), threading.Event()
    x = torch.ones(1)
    first = Calling(lambda: (began.set(), seen.wait(SECONDS)))
    other = threading.Thread(target=lambda: first(x))
    second = Calling(lambda: (seen.set(), other.join(SECONDS)))
    looking.look()
    other.start()
    assert began.wait(SECONDS)
    second(x)  # it begins while the first one runs, whose layers call torch's own, and goes on after its end
    assert not other.is_alive() and reported == [first]
    second(x)
    assert reported == [first, second]


@pytest.mark.parametrize("around", ["there", "torch"])
def test_a_patch_that_lasts_for_a_step_hides_no_model(calls, around: str) -> None:
    """One around torch's own is found from the second step on, inside of it."""
    looking, reported = calls
    model, own = Calling(), nn.Module.__call__
    implementation = vars(nn.Module)["_call_impl"]

    @contextmanager
    def patched() -> Generator[None, None, None]:
        before = nn.Module.__call__
        inner = before if around == "there" else own
        nn.Module.__call__ = lambda module, *args, **kwargs: inner(module, *args, **kwargs)
        try:
            yield
        finally:
            nn.Module.__call__ = before

    looking.look()
    steps: list[int] = []
    for _ in range(4):
        with patched():
            model(torch.ones(1))
        looking.rest()
        steps.append(len(reported))
    assert steps == ([1, 1, 1, 1] if around == "there" else [0, 1, 1, 1])
    assert set(reported) == {model}
    assert nn.Module.__call__ is own and vars(nn.Module)["_call_impl"] is implementation

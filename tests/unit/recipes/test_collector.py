"""Python's garbage collector during a recipe's training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from ebbtide_recipes.skeleton.collector import frozen_heap


class Trainer:
    """Runs steps, and the callbacks at the end of each."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callbacks.remove(callback)

    def step(self) -> None:
        for callback in self.callbacks:
            callback.on_step_end(None, None, None)


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()  # importing may have frozen something
    yield
    gc.unfreeze()


def test_what_is_alive_after_the_first_step_is_not_searched_until_the_training_is_over() -> None:
    trainer = Trainer()
    with frozen_heap(trainer):  # type: ignore[arg-type]
        assert not gc.get_freeze_count()
        trainer.step()
        frozen = gc.get_freeze_count()
        assert frozen > 10_000
        later = [[number] for number in range(1000)]
        trainer.step()
        assert gc.get_freeze_count() <= frozen, "what later steps make is searched"
        assert any(each is later[0] for each in gc.get_objects())
    assert not gc.get_freeze_count() and not trainer.callbacks


def test_what_python_itself_has_frozen_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # as Python 3.12 begins
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    trainer = Trainer()
    with frozen_heap(trainer):  # type: ignore[arg-type]
        trainer.step()
        trainer.step()
    assert frozen == [1]


def test_it_ends_when_the_training_fails() -> None:
    trainer = Trainer()
    with pytest.raises(KeyError), frozen_heap(trainer):  # type: ignore[arg-type]
        trainer.step()
        raise KeyError
    assert not gc.get_freeze_count() and not trainer.callbacks


def test_what_somebody_else_has_frozen_stays() -> None:
    trainer = Trainer()
    gc.freeze()
    count = gc.get_freeze_count()
    with frozen_heap(trainer):  # type: ignore[arg-type]
        trainer.step()
        assert gc.get_freeze_count() <= count
    assert gc.get_freeze_count() > 0


def test_garbage_of_the_first_step_is_freed_before() -> None:
    class Node:
        pass

    trainer, node = Trainer(), Node()
    node.itself = node  # type: ignore[attr-defined]
    with frozen_heap(trainer):  # type: ignore[arg-type]
        del node
        trainer.step()
        gc.unfreeze()
        assert not any(type(each) is Node for each in gc.get_objects())

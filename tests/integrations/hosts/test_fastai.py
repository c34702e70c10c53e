"""A fastai Learner: one line before ``fit``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.hosts import STEPS, Trained, batch, check_bitwise, enabled, encoder_layers, seeded, trained

learner = pytest.importorskip("fastai.learner", reason="needs fastai: pip install fastai")

# fastai's and fastcore's own, at import and in their loaders.
pytestmark = pytest.mark.filterwarnings("ignore")


class Losses(learner.Callback):
    def before_fit(self) -> None:
        self.seen: list[torch.Tensor] = []

    def after_loss(self) -> None:
        self.seen.append(self.learn.loss_grad.detach().clone())


def train(options: dict[str, Any] | None) -> Trained:
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.optimizer import Adam

    seeded()
    model = encoder_layers()
    rows = [(batch(i, 8, 32), batch(100 + i, 8, 32)) for i in range(4 * STEPS)]
    loaders = DataLoaders(DataLoader(rows, bs=4), DataLoader(rows[:4], bs=4), device=torch.device("cpu"))
    losses = Losses()
    learn = learner.Learner(loaders, model, loss_func=nn.MSELoss(), opt_func=Adam, lr=1e-3, cbs=[losses])
    handle = enabled(learn.model, options)
    learn.remove_cb(learner.Recorder)  # it prints
    learn.fit(1)
    if handle is not None:
        handle.close()
    return trained(losses.seen, model, handle)


def test_a_learner_is_bitwise_the_same() -> None:
    check_bitwise(train)

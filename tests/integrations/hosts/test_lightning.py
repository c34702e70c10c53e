"""Lightning's Trainer with the callback, and Fabric with one line."""

from __future__ import annotations

import inspect
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ebbtide
from tests.helpers.hosts import STEPS, Trained, batch, check_bitwise, enabled, encoder_layers, seeded, trained

lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")

# Lightning's own, in every version installed here: none is about our calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:"),
    pytest.mark.filterwarnings("ignore:.*(isinstance|LeafSpec|pkg_resources).*:"),
    pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning"),
]


class Module(lightning.LightningModule):
    """A module whose ``training_step`` calls a part of it, never ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.losses = encoder_layers(), []

    def training_step(self, x: Tensor, index: int) -> Tensor:
        loss = self.layers(x).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, x: Tensor, index: int) -> None:
        self.layers(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rows(micro_batches: int) -> DataLoader[Tensor]:
    return DataLoader([batch(i, 8, 32) for i in range(4 * micro_batches)], batch_size=4)  # type: ignore[arg-type]


def fit(options: dict[str, Any] | None, folder: Path, **settings: Any) -> Trained:
    from ebbtide.integrations.lightning import OffloadCallback

    seeded()
    module = Module()
    callbacks = [] if options is None else [OffloadCallback(**options)]
    micro_batches = STEPS * settings.get("accumulate_grad_batches", 1)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=callbacks,
        enable_model_summary=False, default_root_dir=tempfile.mkdtemp(dir=folder),
        **{"enable_checkpointing": False, **settings},
    )  # fmt: skip
    trainer.fit(module, rows(micro_batches), rows(1))
    handle = callbacks[0].handle if callbacks else None
    assert handle is None or not handle.enabled
    return trained(module.losses, module, handle)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "precision": "bf16-mixed",
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            "enable_checkpointing": True,
        },
        pytest.param({"strategy": "ddp"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "mixed", "ddp"],
)  # fmt: skip
def test_the_trainer_is_bitwise_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    check_bitwise(lambda options: fit(options, tmp_path, **settings))


def test_the_callback_takes_the_wrapped_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ebbtide")
    fit({}, tmp_path, strategy="ddp")
    assert "Enabling activation offloading for DDP strategy" in caplog.messages


def test_an_error_closes_the_handle(tmp_path: Path) -> None:
    from ebbtide.integrations.lightning import OffloadCallback

    class Failing(Module):
        def training_step(self, x: Tensor, index: int) -> Tensor:
            raise OSError("the disk is gone")

    callback = OffloadCallback()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback], default_root_dir=tmp_path, enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(Failing(), rows(1), rows(1))
    assert callback.handle is not None and not callback.handle.enabled


def test_the_callback_has_the_parameters_of_the_public_function() -> None:
    from ebbtide.integrations.lightning import OffloadCallback

    public = inspect.signature(ebbtide.enable_activation_offloading).parameters
    own = inspect.signature(OffloadCallback).parameters
    assert {name: p.default for name, p in own.items()} == {n: p.default for n, p in public.items() if n != "model"}
    with pytest.raises(ebbtide.ConfigError, match="target"):
        OffloadCallback(target="hots")  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("when", ["before setup", "after setup", "on the inner module"])
def test_fabric_is_bitwise_the_same(precision: str, when: str) -> None:
    def train(options: dict[str, Any] | None) -> Trained:
        seeded()
        fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        inner: nn.Module = encoder_layers()
        handle = enabled(inner, options) if when == "before setup" else None
        model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), lr=1e-3))
        if when != "before setup":
            handle = enabled(model if when == "after setup" else model.module, options)
        losses = []
        for step in range(STEPS):
            loss = model(batch(step, 4, 8, 32)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        if handle is not None:
            handle.close()
        return trained(losses, inner, handle)

    check_bitwise(train)

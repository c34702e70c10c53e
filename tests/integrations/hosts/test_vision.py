"""timm and torchvision: their models in a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.hosts import batch, check_bitwise, loop


def loss_of(model: nn.Module, step: int) -> Tensor:
    images, labels = batch(step, 2, 3, 64, 64), torch.arange(2)
    return nn.functional.cross_entropy(model(images), labels)


def timm_model(name: str, **options: object) -> Callable[[], nn.Module]:
    timm = pytest.importorskip("timm", reason="needs timm: pip install timm")
    return lambda: timm.create_model(name, num_classes=4, **options)


def torchvision_model(name: str, **options: object) -> Callable[[], nn.Module]:
    models = pytest.importorskip("torchvision.models", reason="needs torchvision: pip install torchvision")
    return lambda: models.get_model(name, num_classes=4, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"img_size": 64, "depth": 3, "drop_path_rate": 0.2}),
        ("convnext_atto", {"drop_path_rate": 0.2}),
        pytest.param("resnet10t", {}, marks=pytest.mark.slow),
    ],
)
def test_timm_is_bitwise_the_same(name: str, options: dict[str, object]) -> None:
    check_bitwise(loop(timm_model(name, **options), loss_of))


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet18", {}), pytest.param("mobilenet_v3_small", {}, marks=pytest.mark.slow)],
)
def test_torchvision_is_bitwise_the_same(name: str, options: dict[str, object]) -> None:
    check_bitwise(loop(torchvision_model(name, **options), loss_of))

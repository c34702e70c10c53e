"""Trains a model over two simulated devices of one process under every policy; run by ``test_device``.

No values are compared: the simulated device does not order copies from one device to another.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ebbtide


class Spread(nn.Module):
    """Six blocks, three on each device."""

    def __init__(self, devices: tuple[torch.device, torch.device]) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(6)]
        self.layers = nn.ModuleList(block.to(devices[number // 3]) for number, block in enumerate(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).device))
        return x


def main() -> None:
    """Train some steps under every policy."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    devices = torch.device(kind.type, 0), torch.device(kind.type, 1)
    for policy in ("keep", "offload", "inputs", "minimal", "auto"):
        model, x = Spread(devices), torch.randn(8, 16, device=devices[0])
        with ebbtide.enable_activation_offloading(model, policy=policy, min_bytes=0):
            for _ in range(7):
                model(x).square().mean().backward()
    print("trained")


if __name__ == "__main__":
    main()

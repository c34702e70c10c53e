"""Loading onto a real device: the file's values, in the memory of the shard and one staging buffer.

Skipped, with the reason, where there is no accelerator.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ebbtide

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 1024, 8


def _meta() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    values = {k: torch.randn(v.shape, dtype=v.dtype) for k, v in _meta().state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_weights_come_to_the_device_without_a_second_copy(path: Path, dtype: torch.dtype) -> None:
    plain = ebbtide.load_sharded(_meta(), path, dtype=dtype, device="cpu")
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    model = ebbtide.load_sharded(_meta(), path, dtype=dtype)
    torch.accelerator.synchronize()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert all(p.device.type == torch.accelerator.current_accelerator().type for p in model.parameters())  # type: ignore[union-attr]
    assert all(torch.equal(p.cpu(), q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    # Each thread may hold a chunk in the dtype of the file, in addition to the shard, while it is converted.
    assert torch.accelerator.max_memory_allocated() - before <= 1.02 * held + (32 << 20)


def test_first_values_are_drawn_on_the_device_and_again_the_same() -> None:
    models: list[nn.Sequential] = []
    for seed in (0, 0, None):
        if seed is not None:
            torch.manual_seed(seed)
        models.append(ebbtide.load_sharded(_meta()))  # type: ignore[arg-type]
    for p, q, other in zip(*(model.parameters() for model in models), strict=True):
        assert p.device.type != "cpu" and p.std() > 0
        assert torch.equal(p, q) and not torch.equal(p, other)


def test_a_model_comes_back_from_what_was_saved(path: Path, tmp_path: Path) -> None:
    model = ebbtide.load_sharded(_meta(), path)
    ebbtide.save_sharded(model, tmp_path / "out")
    again = ebbtide.load_sharded(_meta(), tmp_path / "out")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))

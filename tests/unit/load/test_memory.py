"""Host memory of a load, in a fresh process: the parameters and staging buffers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

MIB = 1 << 20
STAGING_BYTES = 32 * MIB
"""Four threads with a buffer of 2 MiB, their stacks, and what an allocator keeps."""

CHILD = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import ebbtide.loading

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith(field + ":")).split()[1]) * 1024

path, dtype, widened = sys.argv[1:]
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(4)))
model[3].weight = model[2].weight  # the checkpoint has it under both names, and the values are compared
ebbtide.loading.load_sharded(nn.Linear(2, 2, device="meta"))  # what is imported and started once
base = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
shard = (lambda model: model.to(getattr(torch, widened))) if widened else None
ebbtide.loading.load_sharded(model, path, dtype=getattr(torch, dtype), device="cpu", shard=shard)
held = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"above": status("VmHWM") - base, "held": held}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell a process's peak")
@pytest.mark.parametrize(
    ("stored", "dtype", "widened"),
    [("bfloat16", "bfloat16", ""), ("bfloat16", "float32", ""), ("float32", "bfloat16", "float32")],
)
def test_a_load_takes_the_parameters_and_staging_buffers(tmp_path: Path, stored: str, dtype: str, widened: str) -> None:
    weights = {f"{i}.weight": torch.randn(4096, 4096, dtype=getattr(torch, stored)) for i in range(3)}
    save_file(weights | {"3.weight": weights["2.weight"].clone()}, tmp_path / "x.safetensors")
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), dtype, widened],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["held"] == 3 * 4096 * 4096 * (4 if "float32" in (dtype, widened) else 2)
    assert found["held"] * 0.9 <= found["above"] <= found["held"] + STAGING_BYTES

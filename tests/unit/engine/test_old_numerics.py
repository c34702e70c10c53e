"""Numerics in a torch without ``fp32_precision``, as torch 2.8: the older settings are read and restored."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
for name in ("_get_fp32_precision_getter", "_set_fp32_precision_setter"):
    if hasattr(torch._C, name):
        delattr(torch._C, name)
from ebbtide.engine.numerics import NumericsChange, current_numerics

torch._C._set_float32_matmul_precision("medium")
forward = current_numerics()
torch._C._set_float32_matmul_precision("highest")
torch._C._set_cudnn_allow_tf32(not torch._C._get_cudnn_allow_tf32())
found = current_numerics()
assert found != forward
change = NumericsChange()
change.apply(forward)
assert current_numerics() == forward and torch._C._get_float32_matmul_precision() == "medium"
change.undo()
assert current_numerics() == found and torch._C._get_float32_matmul_precision() == "highest"
"""


def test_the_older_settings_are_applied_and_restored() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

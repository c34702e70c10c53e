"""Runs a module in a process that has the simulated device: python -m tests.simdev.run MODULE [ARGUMENTS]"""

from __future__ import annotations

import runpy
import sys

from tests.simdev import device
from tests.simdev.build import build

if __name__ == "__main__":
    device.load(build())
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

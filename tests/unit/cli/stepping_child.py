"""A run that records with ``RunFile``, writes when its steps begin and end, and gets slower from step to step.

stepping_child.py FOLDER LOG FACTOR [STEPS [FAILING_STEP]]
"""

import os
import sys
import time
from pathlib import Path

from ebbtide.base.events import BUS
from ebbtide.track.runfile import RunFile

FOLDER, LOG, FACTOR = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
STEPS = int(sys.argv[4]) if len(sys.argv) > 4 else 4
FAILING = int(sys.argv[5]) if len(sys.argv) > 5 else 0


def log(*words):
    with LOG.open("a") as file:
        file.write(" ".join(map(str, (FOLDER.name, *words))) + "\n")


log("pid", os.getpid())
with RunFile(FOLDER, model="none", mode=FOLDER.name) as run:
    for step in range(1, STEPS + 1):
        if step == FAILING:
            raise SystemExit(3)
        log("begin", step)
        with run.phase("forward", step=step):
            time.sleep(0.03)
        log("end", step)
        run.step(step, seconds=FACTOR * step, loss=1.0)
        log("paused", *(round(paused["seconds"] * 1000) for paused in BUS.ask("paused")))

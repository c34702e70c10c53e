"""The project of a run, for the trackers that transformers reports to."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

VARIABLES = ("WANDB_PROJECT", "SWANLAB_PROJECT", "CLEARML_PROJECT", "MLFLOW_EXPERIMENT_NAME", "COMET_PROJECT_NAME")
"""Where trackers look for a project's name; trackio takes it from the trainer's arguments."""


@contextmanager
def project_named(name: str | None) -> Generator[None, None, None]:
    """Give trackers a project while they are set up and used; the environment is restored afterwards."""
    before = {variable: os.environ.get(variable) for variable in VARIABLES}
    if name is not None:
        os.environ.update(dict.fromkeys(VARIABLES, name))
    try:
        yield
    finally:  # also without a name: trackers set these themselves
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value

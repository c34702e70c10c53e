"""Random numbers that an evaluation leaves as training had them."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def draws_kept(device: torch.device) -> Generator[None]:
    """Restore, at the end, the state of every generator that training draws from.

    An iterator over batches draws a seed, and completions are sampled: dropout would follow another sequence in a run
    that evaluates than in one that does not.

    Args:
        device: The one that trains.
    """
    ours, arrays, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    module = None if device.type == "cpu" else torch.get_device_module(device)
    state = None if module is None else module.get_rng_state()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(arrays)
        torch.set_rng_state(host)
        if module is not None:
            module.set_rng_state(state)

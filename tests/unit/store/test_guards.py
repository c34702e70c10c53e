"""The last users of host memory: an interrupt between requesting a copy and recording its event loses no copy."""

from __future__ import annotations

import torch

from ebbtide.store.guards import Guard
from tests.helpers.fakedevice import FakeDevice

CPU = torch.device("cpu")


def test_a_copy_that_was_claimed_stands_before_the_one_that_ended() -> None:
    device = FakeDevice(1.0, 1.0)
    guard, out, into = Guard(), device.side_stream(CPU, "out"), device.side_stream(CPU, "in")
    guard.claim(out)
    guard.finish(ended := device.record(out))
    assert guard.events(device) == [ended]
    guard.claim(into)  # and its event was never recorded
    assert guard.events(device) != [ended]

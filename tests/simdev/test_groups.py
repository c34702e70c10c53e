"""Copies that are requested together: each storage has its own place, memory and end. See [Note: groups]."""

from __future__ import annotations

import random
import time

import pytest
import torch

from ebbtide.base.errors import CapError
from ebbtide.store.accelerator import AcceleratorDevice
from ebbtide.store.host import HostTier
from ebbtide.store.hostslot import HostSlot
from tests.helpers.slots import copy_out
from tests.simdev.device import configured, held, violations
from tests.simdev.test_ordering import DELAYS, DEVICE, MIB, SIZES, Trial, is_pattern, pattern

ROUNDS = 8


class GroupTrial(Trial):
    """Copies out tensors that another stream has just made, several at a time, and copies several in at a time."""

    def copy_out(self) -> None:
        made_on = self.random.choice(self.streams)
        with made_on:
            numbers = range(self.count + 1, self.count + 1 + self.random.randint(1, 5))
            sources = [pattern(self.random.choice(SIZES), number) for number in numbers]
        self.count = numbers[-1]
        for slot, number in zip(self.tier.copy_out_all(sources, compute=made_on), numbers, strict=True):
            if isinstance(slot, HostSlot):
                if self.random.random() < 0.5:
                    self.tier.wait_copied_out([slot])
                self.slots.append((slot, number))
            else:
                assert isinstance(slot, CapError)
        del sources

    def prefetch(self) -> None:
        chosen = self.random.sample(self.slots, min(len(self.slots), self.random.randint(1, 6)))
        assert self.tier.prefetch([slot for slot, _ in chosen]) == 0


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("number", range(ROUNDS))
def test_any_sequence_of_groups_gives_the_bytes_that_went_in(number: int, streams: int, seed: int) -> None:
    rng = random.Random(f"{seed} {number} {streams}")
    tier = HostTier(AcceleratorDevice(), budget_bytes=rng.choice([None, 16 * MIB]))
    current = torch.accelerator.current_stream()
    trial = GroupTrial(tier, rng, [current, *(torch.Stream(device=DEVICE) for _ in range(streams - 1))])
    with configured(**DELAYS):
        trial.run(50)
        assert all(map(bool, trial.checks)) and trial.checks and violations() == []
        assert tier.used_bytes == 0
        tier.close()


def test_a_device_with_room_for_some_brings_in_the_first() -> None:
    tier = HostTier(AcceleratorDevice())
    slots = tier.copy_out_all([pattern(MIB, number) for number in range(6)])
    assert all(isinstance(slot, HostSlot) for slot in slots)
    torch.accelerator.synchronize()
    found = [slot for slot in slots if isinstance(slot, HostSlot)]
    for slot in found:
        tier.wait_copied_out([slot])
    torch.accelerator.empty_cache()
    with configured(capacity=torch.accelerator.memory_reserved() + 3 * MIB):
        refused = tier.prefetch(found)
        assert 0 < refused < 6
        assert [slot.ahead is not None for slot in found] == [True] * (6 - refused) + [False] * refused
    checks = [is_pattern(slot.take(), number) for number, slot in enumerate(found)]
    assert all(map(bool, checks)) and violations() == []
    del slots, found, slot
    tier.close()


def test_a_place_that_the_host_filled_is_used_again_after_its_copy_in() -> None:
    tier = HostTier(AcceleratorDevice(), budget_bytes=2 * MIB)
    copy_out(tier, pattern(2 * MIB, 1)).free()  # makes streams and host memory
    torch.accelerator.synchronize()
    filled = tier.fill(torch.full((2 * MIB,), 9, dtype=torch.uint8, device="cpu"), DEVICE)
    source = pattern(2 * MIB, 3)
    torch.accelerator.synchronize()
    _, into = tier.copies._side_streams(DEVICE)
    with held(into):
        assert tier.prefetch([filled]) == 0
        ahead = filled.ahead
        assert ahead is not None
        filled.ahead = None  # or its compute stream would wait, and the next copy-out after it
        filled.free()
        slot = copy_out(tier, source)
        time.sleep(0.05)  # a copy-out that does not wait would be done
    torch.accelerator.synchronize()
    assert is_pattern(ahead.target, 9)
    slot.free()
    tier.close()

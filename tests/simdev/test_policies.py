"""Every policy on the simulated device, with copies or kernels late: each bit, each byte, no race.

The bytes in ``stats()`` are compared with the device's own count of copies. A selection of families always runs;
the others of the zoo are marked slow.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

import ebbtide
from tests.helpers.accelerator import on_device
from tests.helpers.models import NAMES, PRECISIONS, build
from tests.helpers.oracle import Outcome, differences
from tests.simdev.device import configured, counters
from tests.zoo.cases import POLICIES, check_bytes

LATE = {
    "copies": {"copy_delay_us": 300, "jitter_us": 100},
    "kernels": {"kernel_delay_us": 30, "jitter_us": 10},
}
CASES = list(product(NAMES, ("fp32", "bf16"), POLICIES, LATE))
ALWAYS = [
    case
    for case in CASES
    if case[0] in ("qwen3_moe_eager", "mamba", "conv", "dropout", "bart", "sd3")
    and (case[1], case[3]) in (("fp32", "copies"), ("bf16", "kernels"))
]
NAMES_OF_A_CASE = ("name", "precision", "policy", "late")


def moved() -> tuple[int, int]:
    """Bytes that asynchronous copies have moved out and in, as the device counts them.

    Only copies into the store's memory count: answers to comparisons go into torch's pinned memory.
    """
    found = counters()
    return found.get("registered_bytes_out", 0), found.get("bytes_in", 0)


def plain(name: str, precision: str) -> Outcome:
    """Return what ordinary training computes on the device; skip if it fails or does not repeat itself."""
    tiny = on_device(build(name, **PRECISIONS[precision]))
    try:
        outcome = tiny.step()
        again = tiny.step()
        torch.accelerator.synchronize()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"plain training: {str(error).splitlines()[0]:.200}")
    if differences(outcome, again):
        pytest.skip("plain training does not repeat itself")
    return outcome


def check(name: str, precision: str, policy: str, late: str) -> None:
    expected = plain(name, precision)
    tiny = on_device(build(name, **PRECISIONS[precision]))
    with (
        ebbtide.enable_activation_offloading(tiny.model, policy=policy, min_bytes=0, window=1) as handle,
        configured(**LATE[late]),
    ):
        for step in range(3):
            stats, before = handle.stats(), moved()
            found = tiny.step()
            torch.accelerator.synchronize()
            now, after = handle.stats(), moved()
            assert differences(expected, found) == [], step
            assert now.total_copy_out_bytes - stats.total_copy_out_bytes == after[0] - before[0], step
            assert now.total_copy_in_bytes - stats.total_copy_in_bytes == after[1] - before[1], step
            assert now.live_tickets == now.store_bytes == 0, step
            if step == 1:  # in the third, a block of each kind runs without hooks if the policy measures
                check_bytes(name, policy, now)


@pytest.mark.parametrize(NAMES_OF_A_CASE, ALWAYS)
def test_each_bit_and_each_byte(name: str, precision: str, policy: str, late: str) -> None:
    check(name, precision, policy, late)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES_OF_A_CASE, [case for case in CASES if case not in ALWAYS])
def test_each_bit_and_each_byte_of_all_families(name: str, precision: str, policy: str, late: str) -> None:
    check(name, precision, policy, late)

"""Profiles of steps: of a known model and machine, or drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from ebbtide.base.actions import Candidate, Site
from ebbtide.planner.profile import BlockProfile, Profile, Rates, Unit
from ebbtide.planner.solve import Search, Solution

GEMM, ATTENTION = 790e12, 616e12
"""FLOP a second of an H200 in bfloat16."""

LIGHT = 0.42e-12
"""Seconds per byte of an element-wise pass there."""


def unit(
    name: str,
    nbytes: int,
    recompute: float | None = None,
    *,
    given: bool = False,
    movable: bool = True,
    narrow: bool = False,
) -> Unit:
    """Return a unit at a site of that name."""
    site = Site("Layer", name, "Node", 0)
    half = nbytes // 2 if narrow else None
    return Unit(
        site=site, nbytes=nbytes, recompute_seconds=recompute, block_input=given, movable=movable, narrow_bytes=half
    )  # fmt: skip


def candidate(
    name: str, *, block: str = "layers.1", kind: str = "Layer", nbytes: int = 100, flops: float | None = None,
    kept: int = 0,
) -> Candidate:  # fmt: skip
    """Return a storage of a site of that name that is about to be saved."""
    return Candidate(
        site=Site(kind, name, "Node", 0), block_name=block, block=1, nbytes=nbytes, block_input=False,
        recompute_flops=flops, kept_bytes=kept,
    )  # fmt: skip


def alike(
    count: int, units: tuple[Unit, ...], rates: Rates, *, forward: float = 1.0, beside: int = 0, **step: float
) -> Profile:
    """Return a step of ``count`` equal blocks; a backward takes twice its forward.

    Args:
        count: Number of blocks.
        units: The saved units of each block.
        rates: The costs of moving.
        forward: Seconds of a forward.
        beside: Further bytes in use in each of them, besides the saved ones.
        step: Further fields of the profile.
    """
    blocks = tuple(
        BlockProfile(
            name=f"layers.{i}", kind="Layer", forward_seconds=forward, backward_seconds=2 * forward, units=units,
            forward_base_bytes=beside, backward_base_bytes=beside,
        )
        for i in range(count)
    )  # fmt: skip
    return Profile(blocks=blocks, rates=rates, **step)  # type: ignore[arg-type]


def fit(profile: Profile, budget_bytes: int) -> Solution:
    """Return the fastest plan within a budget."""
    return Search(profile).fit(budget_bytes)


def shrink(profile: Profile, max_slowdown: float) -> Solution:
    """Return the plan with the least memory within a slowdown, if hooks cost nothing."""
    return Search(profile).least_memory(max_slowdown * profile.step_seconds * (1 + 1e-9))


def qwen3_8b(tokens: int, *, out: float = 52.8e9, back: float = 55e9, layers: int = 36) -> Profile:
    """Return a step of a Qwen3-8B on one H200 at peak rates, with the saved tensors of fused kernels.

    Args:
        tokens: Length of the sequence.
        out: Bytes a second to the host.
        back: Bytes a second to the device.
        layers: Number of blocks.
    """
    hidden, inner, queries, keys = 4096, 12288, 4096, 1024
    linear = 2 * tokens * hidden * (2 * queries + 2 * keys + 3 * inner) / GEMM
    attention = 2 * tokens * tokens * queries / ATTENTION

    def made(name: str, width: int, flop_per_byte: float, rate: float = GEMM) -> Unit:
        return unit(name, 2 * width * tokens, flop_per_byte * 2 * width * tokens / rate)

    def light(name: str, width: int) -> Unit:
        return unit(name, 2 * width * tokens, LIGHT * 2 * width * tokens)

    units = (
        unit("", 2 * hidden * tokens, given=True), light("norm1", hidden),
        made("q", queries, hidden), made("k", keys, hidden), made("v", keys, hidden),
        light("q_norm", queries), light("k_norm", keys), made("attention", queries, tokens, ATTENTION),
        made("o", hidden, queries), light("norm2", hidden), made("gate", inner, hidden), made("up", inner, hidden),
        light("act", inner),
    )  # fmt: skip
    blocks = tuple(
        BlockProfile(
            name=f"layers.{i}", kind="Layer", forward_seconds=linear + attention,
            backward_seconds=2 * linear + 2.5 * attention, units=units,
        )
        for i in range(layers)
    )  # fmt: skip
    rates = Rates(out_bytes_per_second=out, in_bytes_per_second=back)
    return Profile(blocks=blocks, rates=rates, head_seconds=6 * tokens * hidden * 151_936 / GEMM)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Draw a small step: blocks of different sizes, units of every kind, slow and fast links."""
    seconds, nbytes = st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([1, 10, 64, 1000])
    blocks: list[BlockProfile] = []
    for place in range(draw(st.integers(1, 4))):
        units = tuple(
            unit(
                f"m{number}", draw(nbytes), draw(st.none() | seconds), given=not number, movable=draw(st.booleans()),
                narrow=draw(st.booleans()),
            )
            for number in range(draw(st.integers(0, 4)))
        )  # fmt: skip
        blocks.append(
            BlockProfile(
                name=f"b{place}", kind="B", forward_seconds=draw(seconds), backward_seconds=draw(seconds), units=units,
                forward_base_bytes=draw(nbytes), backward_base_bytes=draw(nbytes),
            )
        )  # fmt: skip
    rate = st.sampled_from([1.0, 20.0, 500.0])
    return Profile(
        blocks=tuple(blocks),
        rates=Rates(out_bytes_per_second=draw(rate), in_bytes_per_second=draw(rate)),
        head_seconds=draw(seconds), head_base_bytes=draw(nbytes),
        window_bytes=draw(st.none() | st.sampled_from([1, 64, 10**6])),
    )  # fmt: skip

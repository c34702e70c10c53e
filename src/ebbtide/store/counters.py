"""What a tier has moved, and how long its workers were busy with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TierCounters:
    """Running totals of one tier.

    Attributes:
        out_bytes: Bytes copied out.
        out_seconds: Time spent copying out; ``out_bytes / out_seconds`` is the rate.
        in_bytes: Bytes copied in.
        in_seconds: Time spent copying in.
        stall_seconds: Time compute waited for either.
    """

    out_bytes: int = 0
    out_seconds: float = 0.0
    in_bytes: int = 0
    in_seconds: float = 0.0
    stall_seconds: float = 0.0

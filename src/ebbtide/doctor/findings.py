"""Derive findings from facts: problems, notes, and their remedies.

[Note: a code's life]
Codes are stable, because people search for them and scripts match them; the number of a removed rule is not reused.
Tens are topics: 00 versions and devices, 10 the disk, 20 host memory and limits, 30 the link, 40 the environment. A
*problem* keeps offloading from working, or makes it useless; a *note* is worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ebbtide.doctor import device_rules, place_rules
from ebbtide.doctor.facts import Facts
from ebbtide.doctor.place_rules import Advice

Severity = Literal["problem", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem or a note.

    Attributes:
        code: Such as ``"EBB010"``. See [Note: a code's life].
        severity: ``"problem"`` or ``"note"``.
        what: The observation.
        hint: The remedy.
    """

    code: str
    severity: Severity
    what: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A check for one finding.

    Attributes:
        code: See [Note: a code's life].
        severity: Severity of its finding.
        about: Description on the page of codes.
        check: Facts → observation and remedy; ``None``: no finding.
    """

    code: str
    severity: Severity
    about: str
    check: Callable[[Facts], Advice | None]


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings: problems first, then by code.

    Args:
        facts: The facts about a machine.
    """
    found: list[Finding] = []
    for rule in RULES:
        texts = rule.check(facts)
        if texts is not None:
            found.append(Finding(code=rule.code, severity=rule.severity, what=texts[0], hint=texts[1]))
    return tuple(sorted(found, key=lambda finding: (finding.severity != "problem", finding.code)))


def _unmeasured(facts: Facts) -> Advice | None:
    explained = facts.target == "disk" and any(
        rule(facts) is not None for rule in (place_rules.in_ram, place_rules.no_disk, place_rules.full_disk)
    )
    if facts.unmeasured is None or explained:
        return None
    return f"this machine could not be measured: {facts.unmeasured}", facts.advice or "see the other findings"


RULES = (
    Rule(
        code="EBB001", severity="problem", about="torch is older than the tested versions", check=device_rules.old_torch
    ),
    Rule(code="EBB002", severity="problem", about="the machine could not be measured", check=_unmeasured),
    Rule(code="EBB003", severity="note", about="the device has no native bfloat16", check=device_rules.no_bfloat16),
    Rule(
        code="EBB004",
        severity="note",
        about="other processes use a tenth of the device's memory",
        check=device_rules.device_in_use,
    ),
    Rule(code="EBB005", severity="note", about="disk target with an accelerator", check=device_rules.disk_with_device),
    Rule(code="EBB006", severity="problem", about="more ranks on the node than devices", check=device_rules.more_ranks),
    Rule(code="EBB007", severity="note", about="other work runs on the CPUs", check=device_rules.busy),
    Rule(code="EBB010", severity="problem", about="the disk path is in RAM", check=place_rules.in_ram),
    Rule(code="EBB011", severity="problem", about="the disk path is unusable", check=place_rules.no_disk),
    Rule(code="EBB012", severity="note", about="no disk behind host memory", check=place_rules.nothing_behind),
    Rule(code="EBB013", severity="problem", about="less than 1 GiB free on the disk", check=place_rules.full_disk),
    Rule(
        code="EBB014",
        severity="note",
        about="less free on the disk than the machine's memory",
        check=place_rules.small_disk,
    ),
    Rule(code="EBB015", severity="note", about="the disk path is on a network", check=place_rules.network_disk),
    Rule(
        code="EBB016",
        severity="note",
        about="the disk path is in a container's layer",
        check=place_rules.layered_disk,
    ),
    Rule(code="EBB017", severity="note", about="direct I/O is refused", check=place_rules.buffered),
    Rule(code="EBB018", severity="note", about="the disk moves less than 200 MB/s", check=place_rules.slow_disk),
    Rule(
        code="EBB020",
        severity="note",
        about="a control group limits memory below the machine's",
        check=place_rules.grouped,
    ),
    Rule(
        code="EBB021",
        severity="problem",
        about="less than 1 GiB of host memory for a rank",
        check=place_rules.little_share,
    ),
    Rule(
        code="EBB022",
        severity="note",
        about="less than 1 GiB of memory free, on a CPU",
        check=place_rules.little_memory,
    ),
    Rule(code="EBB023", severity="note", about="the system swaps", check=place_rules.swapping),
    Rule(code="EBB024", severity="problem", about="host memory cannot be pinned", check=place_rules.not_pinned),
    Rule(code="EBB025", severity="note", about="the device's copies are synchronous", check=place_rules.halting),
    Rule(code="EBB026", severity="note", about="fewer than 1024 open files", check=place_rules.few_files),
    Rule(code="EBB027", severity="note", about="the C library is not glibc, on a CPU", check=place_rules.other_libc),
    Rule(
        code="EBB030",
        severity="note",
        about="the PCIe link has fewer lanes than the device",
        check=device_rules.fewer_lanes,
    ),
    Rule(
        code="EBB031", severity="note", about="the PCIe link is slower than the device", check=device_rules.slower_lanes
    ),
    Rule(code="EBB032", severity="note", about="the link moves less than 6 GB/s", check=device_rules.slow_link),
    Rule(code="EBB033", severity="note", about="copies both ways slow each other", check=device_rules.one_link),
    Rule(
        code="EBB034",
        severity="note",
        about="the process is not bound to the device's node",
        check=device_rules.far_node,
    ),
    Rule(code="EBB035", severity="note", about="host memory cannot feed all links", check=device_rules.thin_host),
    Rule(code="EBB040", severity="note", about="variables of other offloaders", check=device_rules.other_offloaders),
    Rule(
        code="EBB041", severity="note", about="variables that serialize copies and compute", check=device_rules.blocking
    ),
    Rule(
        code="EBB042",
        severity="note",
        about="usual variables of the allocator or of torch_npu are not set",
        check=device_rules.unset,
    ),
)
"""All rules, by code."""

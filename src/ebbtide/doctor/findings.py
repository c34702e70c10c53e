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


@dataclass(frozen=True, slots=True)
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
    Rule("EBB001", "problem", "torch is older than the tested versions", device_rules.old_torch),
    Rule("EBB002", "problem", "the machine could not be measured", _unmeasured),
    Rule("EBB003", "note", "the device has no native bfloat16", device_rules.no_bfloat16),
    Rule("EBB004", "note", "other processes use a tenth of the device's memory", device_rules.device_in_use),
    Rule("EBB005", "note", "disk target with an accelerator", device_rules.disk_with_device),
    Rule("EBB006", "problem", "more ranks on the node than devices", device_rules.more_ranks),
    Rule("EBB007", "note", "other work runs on the CPUs", device_rules.busy),
    Rule("EBB010", "problem", "the disk path is in RAM", place_rules.in_ram),
    Rule("EBB011", "problem", "the disk path is unusable", place_rules.no_disk),
    Rule("EBB012", "note", "no disk behind host memory", place_rules.nothing_behind),
    Rule("EBB013", "problem", "less than 1 GiB free on the disk", place_rules.full_disk),
    Rule("EBB014", "note", "less free on the disk than the machine's memory", place_rules.small_disk),
    Rule("EBB015", "note", "the disk path is on a network", place_rules.network_disk),
    Rule("EBB016", "note", "the disk path is in a container's layer", place_rules.layered_disk),
    Rule("EBB017", "note", "direct I/O is refused", place_rules.buffered),
    Rule("EBB018", "note", "the disk moves less than 200 MB/s", place_rules.slow_disk),
    Rule("EBB020", "note", "a control group limits memory below the machine's", place_rules.grouped),
    Rule("EBB021", "problem", "less than 1 GiB of host memory for a rank", place_rules.little_share),
    Rule("EBB022", "note", "less than 1 GiB of memory free, on a CPU", place_rules.little_memory),
    Rule("EBB023", "note", "the system swaps", place_rules.swapping),
    Rule("EBB024", "problem", "host memory cannot be pinned", place_rules.not_pinned),
    Rule("EBB025", "note", "the device's copies are synchronous", place_rules.halting),
    Rule("EBB026", "note", "fewer than 1024 open files", place_rules.few_files),
    Rule("EBB027", "note", "the C library is not glibc, on a CPU", place_rules.other_libc),
    Rule("EBB030", "note", "the PCIe link has fewer lanes than the device", device_rules.fewer_lanes),
    Rule("EBB031", "note", "the PCIe link is slower than the device", device_rules.slower_lanes),
    Rule("EBB032", "note", "the link moves less than 6 GB/s", device_rules.slow_link),
    Rule("EBB034", "note", "the process is not bound to the device's node", device_rules.far_node),
    Rule("EBB035", "note", "host memory cannot feed all links", device_rules.thin_host),
    Rule("EBB040", "note", "variables of other offloaders", device_rules.other_offloaders),
    Rule("EBB041", "note", "variables that serialize copies and compute", device_rules.blocking),
    Rule("EBB042", "note", "usual variables of the allocator or of torch_npu are not set", device_rules.unset),
)
"""All rules, by code."""

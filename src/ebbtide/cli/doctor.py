"""``ebbtide doctor``: benchmark this machine and diagnose problems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.base.files import check_replaceable
from ebbtide.base.pages import with_addresses
from ebbtide.cli import versions
from ebbtide.cli.parsing import Parser, choice, named_folder
from ebbtide.config import TARGETS

if TYPE_CHECKING:
    from ebbtide.doctor import Examination

EXIT_PROBLEM = 1


def run(argv: Sequence[str]) -> int:
    """Examine this machine: ``ebbtide doctor [--disk_path DIR] [--target T] [--out FILE] [--json] [--versions]``.

    Returns:
        1 if there is a problem, else 0; notes are not problems.

    Raises:
        ConfigError: An argument that cannot be read.
        DataError: The file cannot be written, or holds something else.
    """
    parser = Parser(
        prog="ebbtide doctor",
        description="Benchmark this machine and diagnose problems: rates, memory, disk, limits. Takes seconds.",
    )
    parser.add_argument("--disk_path", "--disk-path", metavar="DIR", help="directory for offloaded bytes on disk")
    targets = f"one of {', '.join(TARGETS)} (default: %(default)s)"
    parser.add_argument("--target", metavar="NAME", default="auto", help=targets)
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the machine, for `ebbtide plan --gpu FILE`")
    words = "print all results as JSON, and nothing else"
    parser.add_argument("--json", nargs="?", const="true", default="false", metavar="true", help=words)
    parser.add_argument("--versions", action="store_true", help="print only versions and device, for bug reports")
    own = parser.read(argv)
    target = choice("--target", own.target, TARGETS)
    as_json = choice("--json", own.json, ("true", "false")) == "true"  # `ebbtide plan` takes both forms, too
    if own.versions:
        print("\n".join(versions.lines()))
        return 0
    disk_path = None if own.disk_path is None else str(named_folder("--disk_path", own.disk_path))
    if own.out is not None:
        hint = "such as --out machine.json, in a folder that you may write to"
        check_replaceable(own.out, f"--out {str(own.out)!r}", {"memory_bytes", "flop_per_second"}, hint=hint)
    from ebbtide.doctor import examine  # torch, and with it the seconds of its import

    found = examine(target, disk_path)
    machine = found.facts.machine
    if own.out is not None and machine is not None:
        machine.save(own.out)
    if as_json:
        print(json.dumps(as_values(found), indent=1, allow_nan=False))
    else:
        print("\n".join(lines(found)))
        if own.out is not None:
            print(f"\n{own.out}" if machine is not None else f"\n{own.out} was not written: there are no measurements")
    return 0 if found.healthy else EXIT_PROBLEM


def lines(found: Examination) -> list[str]:
    """Format the table and the findings."""
    from ebbtide.doctor.table import table
    from ebbtide.report.text import grid

    rows = grid(table(found.facts))
    for finding in found.findings:
        rows += ["", f"{finding.code} {finding.severity}: {finding.what}", f"hint: {with_addresses(finding.hint)}"]
    if not found.findings:
        rows += ["", "no problems found"]
    return rows


def as_values(found: Examination) -> dict[str, Any]:
    """Return an examination as JSON values; ``None``: not known."""
    facts = asdict(found.facts)
    host = facts["host"]
    host["nodes"] = {str(node): sorted(cpus) for node, cpus in host["nodes"].items()}
    host["cpus"] = sorted(host["cpus"])
    return {
        "healthy": found.healthy,
        "machine": facts.pop("machine"),
        "findings": [asdict(finding) for finding in found.findings],
        "facts": facts,
    }

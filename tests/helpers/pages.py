"""Facts that the system reports about this process's pages."""

from __future__ import annotations

import re
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:(.*?)$", re.MULTILINE | re.DOTALL)


def asked_for_huge_pages(begin: int, end: int) -> bool:
    """Whether huge pages were requested for all memory between two addresses."""
    asked_bytes = 0
    for first, last, flags in _MAPPING.findall(Path("/proc/self/smaps").read_text()):
        if "hg" in flags.split():
            asked_bytes += max(0, min(end, int(last, 16)) - max(begin, int(first, 16)))
    return asked_bytes == end - begin

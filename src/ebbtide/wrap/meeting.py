"""Compare texts between ranks without a collective, through the store that started the process group.

[Note: meetings]
A group meets about a topic: every rank posts a text and reads those of the others. The n-th meeting of one rank is the
n-th of the others. After the store's timeout (``init_process_group(timeout=...)``), missing ranks are named in an
error. A rank whose wait timed out removes its text, so that a later rank does not count it as present. Texts are
compared by digest and read only if they differ, because ranks mostly agree.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ebbtide.base.errors import ConfigError, spelled

logger = logging.getLogger("ebbtide.wrap")

PATIENCE_SECONDS = 30.0
"""After so many seconds a rank logs for whom it waits."""
LONGEST_PAUSE_SECONDS = 0.2
"""Seconds between two checks whether another rank has arrived."""


class Meeting:
    """One meeting, as a context manager: post the text first, then attend. See [Note: meetings].

    Args:
        ranks: The group, in order; this rank is one of them.
        about: The topic, in words that finish "rank 1 did not ...".
        text: The text of this rank.
    """

    def __init__(self, ranks: Sequence[int], about: str, text: str) -> None:
        name = hashlib.sha256(f"{about} {tuple(ranks)}".encode()).hexdigest()
        default: Any = dist.distributed_c10d._get_default_store()
        self.ranks, self._about, self._me = ranks, about, dist.get_rank()
        self._store: Any = dist.distributed_c10d.PrefixStore(f"ebbtide/{name}", default)
        self._limit_seconds: float = default.timeout.total_seconds()
        number = self._store.add(f"meetings of {self._me}", 1)
        self._keys = {rank: f"{number} from {rank}" for rank in ranks}
        self._in_vain = False
        self._store.set(_in_full(self._keys[self._me]), text)
        self._store.set(self._keys[self._me], hashlib.sha256(text.encode()).hexdigest())

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        early = self._in_vain or (kind is not None and not issubclass(kind, ConfigError))
        if early and not self._store.check([*self._keys.values()]):  # else the others have met this rank
            self._store.delete_key(self._keys[self._me])
            self._store.add(f"meetings of {self._me}", -1)

    def attend(self) -> dict[int, str]:
        """Wait for all; return the text of each rank, or of this one alone if all are equal.

        Raises:
            ConfigError: A rank did not arrive in time.
        """
        self._wait()
        keys = list(self._keys.values())
        found = self._store.multi_get(keys) if self._store.has_extended_api() else [self._store.get(k) for k in keys]
        differ = len(set(found)) > 1
        return {r: self._store.get(_in_full(k)).decode() for r, k in self._keys.items() if differ or r == self._me}

    def _wait(self) -> None:
        first_seconds = min(PATIENCE_SECONDS, self._limit_seconds)
        absent = _absent(self._store, self._keys, first_seconds)
        if absent and self._limit_seconds > first_seconds:
            logger.warning("waiting for %s to %s too", spelled(absent), self._about)
            absent = _absent(self._store, self._keys, self._limit_seconds - first_seconds)
        if absent:
            self._in_vain = True
            raise ConfigError(
                f"{spelled(absent)} did not {self._about} within {self._limit_seconds:g} s",
                expected=f"the same calls on {spelled(self.ranks)}, which train the same part of the model",
                hint="check the log of that rank; the time limit is that of init_process_group",
            )


def _in_full(key: str) -> str:
    return key + " in full"


def _absent(store: Any, keys: Mapping[int, str], seconds: float) -> list[int]:
    """Wait; return the ranks whose key is missing then.

    By polling: no signal, such as Ctrl-C, would end a store's own wait.
    """
    end, pause_seconds, left = time.monotonic() + seconds, 0.001, list(keys.values())
    while left and not store.check(left):
        while not store.check(left[:1]):  # of many ranks, one alone
            if time.monotonic() >= end:
                return [rank for rank, key in keys.items() if not store.check([key])]
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)
        del left[0]
    return []

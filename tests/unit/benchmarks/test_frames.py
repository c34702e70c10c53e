from __future__ import annotations

from collections import Counter

from benchmarks.frames import innermost, ours

RAW = """\
thread (7): MainThread;train (train.py:3);pack (/site/ebbtide/engine/run.py:44) 3
thread (7): MainThread;train (train.py:3);pack (ebbtide/engine/run.py:44) 1
thread (7): MainThread;train (/home/user/train.py:4) 2
thread (9): ebbtide-disk_0;write (ebbtide/store/diskwork.py:12) 50
"""


def test_samples_are_of_the_main_threads_innermost_lines() -> None:
    assert innermost(RAW) == Counter({"ebbtide/engine/run.py:44 pack": 4, "train.py:4 train": 2})
    assert ours(innermost(RAW)) == 4 / 6 and ours(Counter()) == 0.0

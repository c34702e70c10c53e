"""The schedule: when copies begin, when sources are released, how far copy-in runs ahead.

It handles bytes and their order, no tensors. The engine carries it out with the slots of a store
(``ebbtide.engine.mover``), the planner with seconds (``ebbtide.planner.simulate``), so a plan is simulated with the
schedule that it will have.

[Note: window]
Copy-out: a source stays until its copy is done. When the bytes still waiting exceed the window, compute waits for the
oldest copy; that is a stall, and is counted. Copy-in: from the first sign of backward in a block on, the next bytes are
prefetched, never more ahead of their reader than the window, however many blocks that spans. Unless the user gives
a window it follows the model: two of its largest block's offloaded bytes on the way out (one being made, one being
copied), one of them on the way in. Of a forward that is one block, a part stands for a block. A device without room for
a prefetch makes that window smaller.

[Note: start of backward]
What is saved last is read first. So the last bytes of a pass, as many as its largest block offloads, are *held back*:
the pass before shows how many bytes a pass offers, and whether its last block offers any. (If not, the backward of that
block hides the first copy-ins, and nothing is held back.) A pass that turns out longer begins the oldest of them when
more would be held; a shorter one holds less. Bytes held back count as bytes in the window, so memory is the same
whether the forecast was right or not; in backward they count as bytes ahead of their reader, as if they had been copied
in. Copies that have not begun when backward begins are cancelled where the store can do that (a disk; a copy queued on
a stream runs), and the bytes are served from the source.

[Note: groups of copies]
Beginning a copy costs the host tens of microseconds, on a stream as with a thread that writes a disk, and a block saves
dozens of tensors. So sources are *gathered*, and their copies begin together: when they are a quarter of the window,
when the window is full, or when their block's forward ends, whichever comes first. On the way in the window is filled
again when a quarter of it is free, by a quarter at a time; on a stream, a reader waits for its group. What is gathered
counts as in flight.
"""

from __future__ import annotations

from ebbtide.schedule.copyin import CopyIn
from ebbtide.schedule.copyout import CopyOut
from ebbtide.schedule.live import LiveBytes, LiveCount
from ebbtide.schedule.mover import Outcome
from ebbtide.schedule.window import Window

__all__ = ["CopyIn", "CopyOut", "LiveBytes", "LiveCount", "Outcome", "Window"]

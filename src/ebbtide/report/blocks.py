"""The picture of each block's bytes by action, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.base.runs import Event
from ebbtide.base.units import format_size
from ebbtide.report import style
from ebbtide.report.run import Run

_WIDTH, _LEFT, _RIGHT, _TOP, _PLOT = 960.0, 92.0, 24.0, 44.0, 170.0


def block_bytes(event: Event) -> dict[str, int]:
    """Return a block's bytes by action.

    A checkpointed block's own bytes are those of its input; the tensors inside are recomputed.
    """
    by_action = {action: int(event.get(f"{action}_bytes") or 0) for action in style.ACTIONS[:3]}
    if event.get("action") == "checkpoint":
        return {"kept": 0, "offloaded": 0, "recomputed": 0, "checkpointed": sum(by_action.values())}
    return {**by_action, "checkpointed": 0}


def blocks_svg(run: Run, step: object) -> str | None:
    """Draw one column per block of a step's last forward, stacked by action, in execution order.

    Returns:
        A stand-alone SVG; ``None`` if the run has no blocks in that step.
    """
    blocks = run.blocks(step)
    columns = [block_bytes(event) for event in blocks]
    if not columns or not any(sum(column.values()) for column in columns):
        return None
    sizes = style.ticks(max(sum(column.values()) for column in columns), count=4, base=2)
    bottom, pitch = _TOP + _PLOT, (_WIDTH - _LEFT - _RIGHT) / len(columns)
    begin = _WIDTH - _RIGHT - sum(map(style.swatch_width, style.ACTIONS))
    legend, _ = style.swatches(dict(zip(style.ACTIONS, style.ACTIONS, strict=True)), begin, 22, _WIDTH)
    pieces = [style.text(_LEFT, 22, f"{run.name}: bytes of each block, by action", "strong"), *legend]
    for size in sizes:
        y = bottom - _PLOT * size / sizes[-1]
        pieces.append(style.line(_LEFT, y, _WIDTH - _RIGHT, y))
        pieces.append(style.text(_LEFT - 10, y + 4, format_size(size), "soft", "num", "end"))
    width = min(pitch * 0.78, 46.0)
    every = max(1, -(-len(columns) // 32))
    for position, (event, column) in enumerate(zip(blocks, columns, strict=True)):
        x = _LEFT + pitch * (position + 0.5)
        pieces += _column(x - width / 2, width, bottom, _PLOT / sizes[-1], event, column)
        if position % every == 0:
            pieces.append(style.text(x, bottom + 16, str(event.get("index")), "soft", "num", "mid"))
    pieces.append(style.text(_WIDTH - _RIGHT, bottom + 34, "block, in execution order", "soft", "end"))
    return style.svg(_WIDTH, bottom + 44, pieces, label=f"Bytes of each block by action in {run.name}")


def _column(x: float, width: float, bottom: float, scale: float, event: Event, column: dict[str, int]) -> Sequence[str]:
    pieces: list[str] = []
    y = bottom
    for action, size in column.items():
        if size:
            y -= size * scale
            title = f"{event.get('name')}: {action} {format_size(size)}"
            pieces.append(style.rect(x, y, width, size * scale, action, title=title))
    return pieces

"""The progress bar: loss, memory, saved bytes and speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide_recipes.skeleton.logging import console, interactive

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

GIB = 1024**3


class StepBar:
    """A progress bar over the steps; nothing off a terminal.

    Args:
        shown: False in processes other than the main one.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> StepBar:
        if self._shown and interactive():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            text = TextColumn("{task.fields[text]}")
            self._progress = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                text,
                TimeRemainingColumn(),
                console=console(),
                transient=True,
                auto_refresh=False,
            )
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(
        self, step: int, steps: int, *, loss: float, memory_bytes: int, saved_bytes: int | None, seconds: float
    ) -> None:
        """Show a finished step."""
        if self._progress is None:
            return
        saved = f"  saved {saved_bytes / GIB:.2f} GiB" if saved_bytes is not None else ""
        text = f"loss {loss:.4f}  memory {memory_bytes / GIB:.2f} GiB{saved}  {seconds:.2f} s/it"
        if self._task is None:
            self._task = self._progress.add_task("", total=steps, text=text)
        # Refreshed only here: a redrawing thread would take time from training.
        self._progress.update(self._task, completed=step, total=steps, text=text, refresh=True)

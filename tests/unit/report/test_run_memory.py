"""The report's part on the run: contents of memory, phases outside of steps, contact sheets."""

from __future__ import annotations

import base64
from pathlib import Path

from ebbtide.report import load_run, page, run_memory
from ebbtide.track import write_summary
from tests.unit.report.runs import MIB, write_run
from tests.unit.track.events import begin, event, write_events

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def written(folder: Path, samples: int = 2) -> Path:
    events = [begin(0.0, mode="plain")]
    for t, name, height in ((1.0, "text_encoder", 300), (2.0, "vae", 700), (8.0, "vae", 500)):
        events.append(event(t, "phase", name=name, edge="begin", step=None))
        events.append(event(t + 0.2, "memory", rss_bytes=height * MIB, device_bytes=None))
        events.append(event(t + 0.5, "phase", name=name, edge="end", step=None))
    parts = {"transformer": 10 * MIB, "teacher": 20 * MIB}
    held = {"gradient_bytes": 10 * MIB, "optimizer_bytes": 40 * MIB, "average_bytes": 0}
    events.append(event(4.0, "parts", step=1, weights=parts, **held))
    for number in range(samples):
        sheet = f"samples/{number}.png"
        events.append(event(5.0 + number / 10, "sample", step=number, sheet=sheet, captions=[], decoded=number > 0))
        (folder / "samples").mkdir(exist_ok=True)
        (folder / sheet).write_bytes(PNG)
    events.append(event(9.0, "run_end", status="ok", error=None))
    write_events(folder / "run.jsonl", sorted(events, key=lambda one: one["t"]))
    write_summary(folder)
    return folder


def test_models_gradients_and_optimizer_are_listed(tmp_path: Path) -> None:
    rows = run_memory.holdings([load_run(written(tmp_path))]).rows
    assert [(row[1], row[2]) for row in rows] == [
        ("weights: transformer", "10.0 MiB"),
        ("weights: teacher", "20.0 MiB"),
        ("gradients", "10.0 MiB"),
        ("optimizer", "40.0 MiB"),
        ("activations, measured", "–"),
    ]


def test_each_phase_has_its_highest_memory(tmp_path: Path) -> None:
    rows = run_memory.phases([load_run(written(tmp_path))]).rows
    assert [row[1:] for row in rows] == [
        ("text_encoder", "1", "0.50 s", "300.0 MiB"),
        ("vae", "2", "1.00 s", "700.0 MiB"),
    ]
    (tmp_path / "steps").mkdir()
    assert run_memory.phases([load_run(write_run(tmp_path / "steps"))]).rows == ()


def test_sheets_stand_in_the_page_itself(tmp_path: Path) -> None:
    run = load_run(written(tmp_path))
    shown = page([run])
    assert shown.count("data:image/png;base64," + base64.b64encode(PNG).decode()) == 2
    assert "before training" in shown and "Three channels of the latents" in shown
    (tmp_path / "samples" / "1.png").unlink()
    assert "is not in the run folder any more" in page([run])


def test_of_many_sheets_the_first_and_the_last_are_shown(tmp_path: Path) -> None:
    titles = [sheet.title for sheet in run_memory.sheets(load_run(written(tmp_path, samples=40)))]
    assert len(titles) == 6 and titles[0] == "plain: before training" and titles[-1] == "plain: after 39 steps"

"""Run folders with a known shape: memory rises through the forward, falls through the backward."""

from ebbtide.track import write_summary
from tests.unit.track.events import begin, event, write_events

MIB = 1024**2
BLOCKS = 8
PLAN = "Minimal: everything that can be made again is; inputs of blocks are kept."


def write_run(folder, mode="plain", *, steps=3, height=800 * MIB, slow=1.0, start=100.0, engine=False, stall=0.25):
    """Write a run folder of a mode whose activations are ``height`` bytes high."""
    fields = {"torch": "2.13.0", "ebbtide": "0.1.0", "model": "tiny-llama", "unix_time": 1_790_000_000.0}
    events = [begin(start, mode=mode, pid=4321, config={"max_steps": steps}, **fields)]
    outside, t = [], start + 0.5
    if engine:
        events.append(event(t, "plan", name="minimal", text=PLAN))
    for step in range(1, steps + 1):
        t += 0.1
        forward, backward, optimizer = 1.0, 2.0 * slow, 0.3
        events.append(event(t, "phase", name="forward", edge="begin", step=step))
        for block in range(BLOCKS) if engine else ():
            events.append(block_event(t + 0.1 * (block + 1), block))
        if engine:
            events.append(pass_end_event(t + 0.95))
        events.append(event(t + forward, "phase", name="forward", edge="end", step=step))
        events.append(event(t + forward, "phase", name="backward", edge="begin", step=step))
        for block in reversed(range(BLOCKS)) if engine else ():
            began = t + forward + backward * (BLOCKS - 1 - block) / BLOCKS + 0.01
            events.append(event(began, "block_backward", index=block, name=f"layers.{block}"))
        if engine and stall:
            events.append(event(t + 2.0, "stall", where="backward", block="layers.4", seconds=stall, bytes=4 * MIB))
        end = t + forward + backward
        events.append(event(end, "phase", name="backward", edge="end", step=step))
        events.append(event(end, "phase", name="optimizer", edge="begin", step=step))
        done = end + optimizer
        events.append(event(done, "phase", name="optimizer", edge="end", step=step))
        events.append(event(done, "step", step=step, loss=3.0 / step, seconds=done - t, tokens=512))
        outside += _curve(t, forward, backward, optimizer, height)
        t = done
    events.append(event(t + 0.5, "run_end", status="ok", error=None))
    write_events(folder / "run.jsonl", events)
    write_events(folder / "outside.jsonl", outside)
    write_summary(folder)
    return folder


def block_event(t, block):
    sizes = {"kept_bytes": 4 * MIB, "offloaded_bytes": block * MIB, "recomputed_bytes": 9 * MIB}
    total = sum(sizes.values())
    return event(
        t, "block", index=block, name=f"layers.{block}", kind="LlamaDecoderLayer", edge="forward_end", action="mixed",
        saved_bytes=2 * total, unique_bytes=total, **sizes,
    )  # fmt: skip


def pass_end_event(t):
    blocks = [block_event(t, block) for block in range(BLOCKS)]
    names = ("saved_bytes", "unique_bytes", "kept_bytes", "offloaded_bytes", "recomputed_bytes")
    return event(t, "pass_end", packs=80, checkpointed=0, **{name: sum(b[name] for b in blocks) for name in names})


def _curve(t, forward, backward, optimizer, height):
    """Sample every 10 ms: 1 GiB, plus a ramp up to ``height``, plus 64 MiB of gradients at the begin of backward."""
    samples = []
    for tick in range(-5, int((forward + backward + optimizer) * 100)):
        now = tick / 100
        if now < forward:
            share = max(now, 0) / forward
        else:
            share = max(1 - (now - forward) / backward, 0)
        spike = 64 * MIB if forward < now < forward + 0.2 else 0
        samples.append(event(t + now, "memory", rss_bytes=int(1024 * MIB + share * height) + spike))
    return samples

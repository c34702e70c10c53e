"""Hand-made run files: every number is chosen, so every summary can be computed by hand."""

import json


def write_events(path, events):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def event(t, name_, /, **fields):
    return {"t": t, "event": name_, **fields}


def begin(t=0.0, **fields):
    return event(
        t, "run_begin", **{"schema": 1, "device": "cpu", "world_size": 1, "model": "tiny", "mode": "plain", **fields}
    )


def phases(step, start, *, forward=1.0, backward=2.0, optimizer=0.5):
    """The six phase events of a step that begins at ``start``, and its step event."""
    edges, t = [], start
    for name, seconds in (("forward", forward), ("backward", backward), ("optimizer", optimizer)):
        edges.append(event(t, "phase", name=name, edge="begin", step=step))
        t += seconds
        edges.append(event(t, "phase", name=name, edge="end", step=step))
    return [*edges, event(t, "step", step=step, loss=4.0 - step, seconds=t - start, tokens=70)]


def pass_end(t, *, unique, kept, offloaded=0, recomputed=0):
    return event(
        t,
        "pass_end",
        saved_bytes=2 * unique,
        unique_bytes=unique,
        kept_bytes=kept,
        offloaded_bytes=offloaded,
        recomputed_bytes=recomputed,
        packs=9,
    )

"""A made-up engine in a process of its own that publishes as a real one does: python synthetic_publisher.py FOLDER '{"pages": 20000}'.

Options: "scenario" and "hz" besides those of SyntheticEngine. It runs until its stdin is closed, and grants any ceiling above the least.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from synthetic_engine import SyntheticEngine

from rimuru_cli.engine.telemetry import segment as words
from rimuru_cli.engine.telemetry.places import private_folder, process_space, process_start
from rimuru_cli.engine.telemetry.segment import SUFFIX, Segment, beat_now
from rimuru_cli.engine.telemetry.wire import HeadWriter, array_items, pieces_of


def main(folder: Path, options: dict[str, object]) -> None:
    """Publish until nobody holds stdin open any more."""
    scenario, hz = str(options.pop("scenario", "decode")), float(options.pop("hz", 10.0))  # type: ignore[arg-type]
    engine = SyntheticEngine(**options)  # type: ignore[arg-type]
    for _ in range(4):
        engine.next("long context")
    engine.identity = replace(engine.identity, pid=os.getpid(), started=time.time())
    card = {
        "engine_id": engine.identity.engine_id,
        "role": "chat",
        "model": engine.identity.model,
        "device": "cuda:0",
        "started": time.time(),
    }
    own = {words.PID: os.getpid(), words.PID_SPACE: process_space(), words.PROCESS_START: process_start(os.getpid())}
    path = private_folder(folder) / f"{os.getpid()}-{engine.identity.engine_id}-1{SUFFIX}"
    segment, heads = Segment.create(path, 8 << 20, card, own), HeadWriter()
    gone = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), gone.set()), daemon=True).start()
    token = 0
    while not gone.is_set():
        began = time.monotonic()
        if (asked := segment.asked(token)) is not None:
            token = asked[0]
            engine.request_ceiling(asked[1])
            answer = replace(engine._answer, time=time.time()) if engine._answer else None
            engine._answer = answer
            if answer is not None and answer.ok:
                engine.identity = replace(engine.identity, ceiling_bytes=answer.bytes_asked)
        engine.next(scenario)  # type: ignore[arg-type]
        head = replace(engine.head(scenario != "idle"), time=time.time(), number=segment.get(words.FRAME) + 1)
        segment.write(*pieces_of(heads.json(head), array_items(engine.tables())))
        segment.set(words.BEAT, beat_now())
        gone.wait(max(0.0, began + 1.0 / hz - time.monotonic()))
    segment.set(words.STATE, words.CLOSED)
    segment.close()
    with contextlib.suppress(OSError):
        path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

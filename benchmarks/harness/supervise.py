"""Runs a suite in a process of its own, and goes on after a crash or a hang without the contender that caused it.

A kernel that reads out of bounds ends the CUDA context of its process, and one that waits for ever ends nothing: in
both cases the other rows of a long run would be lost. The worker writes what it is about to do into a marker file.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

STARTUP_S, STEP_S = 180.0, 60.0  # importing torch and starting CUDA; one contender's first runs, or one timed group


class Marker:
    """The worker's side: which work item and contender come next."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._state: dict[str, object] = {"index": 0, "contender": "", "message": ""}

    def set(self, index: int, contender: str) -> None:
        """Work item `index` goes on with `contender`; "": with nobody in particular."""
        self._state = {"index": index, "contender": contender, "message": ""}
        self._write()

    def beat(self) -> None:
        """The process is alive, and waits."""
        self._write()

    def accuse(self, message: str) -> None:
        """The process is about to end because of what the contender did."""
        self._state["message"] = message
        self._write()

    def hand_over(self, index: int) -> bool:
        """Whether another process goes on with work item `index` when this one ends, which it should then do."""
        self._state = {"index": index, "contender": "", "message": "", "hands_over": True}
        self._write()
        return self._path is not None

    def _write(self) -> None:
        if self._path is None:
            return
        temporary = self._path.with_suffix(".next")
        temporary.write_text(json.dumps(self._state))
        os.replace(temporary, self._path)


def supervise(
    command: Callable[[int, dict[str, str]], list[str]],
    marker: Path,
    describe: Callable[[int], str],
    say: Callable[[str], None],
    step_s: float = STEP_S,
    startup_s: float = STARTUP_S,
) -> tuple[dict[str, str], list[str]]:
    """Starts `command(first work item, banned)` until one ends with code 0; returns (banned, failed).

    banned: contender -> what it did; it is not run again. failed: work items given up, where no contender was to blame.
    Raises RuntimeError if a worker ends before it has begun any work.
    """
    index, banned, failed = 0, dict[str, str](), list[str]()
    while True:
        marker.unlink(missing_ok=True)
        ended = _watch(command(index, banned), marker, step_s, startup_s)
        state = json.loads(marker.read_text()) if marker.exists() else {}
        if ended == "" and state.get("hands_over"):
            index = state["index"]
            continue
        if ended == "":
            marker.unlink(missing_ok=True)
            return banned, failed
        if not state:
            raise RuntimeError(f"the bench's worker {ended} before it began")
        index, contender = state["index"], state["contender"]
        why = state["message"] or ended
        if contender and contender not in banned:
            banned[contender] = f"not run: at {describe(index)} the process {why}"
        else:
            failed.append(f"{describe(index)}: {why}")
            index += 1
        say(f"{contender or 'the timed run'}: {why}; going on at {describe(index)} without it")


def _watch(command: list[str], marker: Path, step_s: float, startup_s: float) -> str:
    """Runs a worker; "" if it ended well, else what happened to it."""
    worker = subprocess.Popen(command)
    last, limit = time.time(), startup_s
    try:
        while worker.poll() is None:
            time.sleep(0.2)
            if marker.exists():
                last, limit = marker.stat().st_mtime, step_s
            if time.time() - last > limit:
                return f"hung for more than {limit:.0f} s"
    finally:
        if worker.poll() is None:
            worker.kill()
        worker.wait()
    return "" if worker.returncode == 0 else f"ended with code {worker.returncode}"

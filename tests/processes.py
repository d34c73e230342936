"""Python programs in processes of their own, which begin with torch imported: importing it takes longer than all that
most of them do. They are forked from one process that has done that and nothing else; `fastconv` they import anew."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch"])


def _execute(
    code: str, arguments: list[str], environment: dict[str, str], cwd: str, path: list[str], said: str
) -> None:
    if said:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{said}/{name}", os.O_CREAT | os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:], sys.argv[:] = path, ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


class Forked:
    """As `subprocess.Popen([sys.executable, "-c", code, *arguments])`, with Python's path as it is here."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] = os.environ, cwd: str = "", said: str = "",
        path: Sequence[str] = (),
    ) -> None:  # fmt: skip
        python, option, code, *arguments = command
        assert (python, option) == (sys.executable, "-c")
        given = (code, arguments, dict(environment), cwd or os.getcwd(), list(path or sys.path), said)
        self._process = FORKS.Process(target=_execute, args=given)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode


def run(
    code: str, *arguments: str, environment: Mapping[str, str] = os.environ, cwd: Path | str = "",
    path: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """What a program says and ends with; an exception ends it with 1."""
    with tempfile.TemporaryDirectory() as said:
        command = [sys.executable, "-c", code, *arguments]
        code_of_end = Forked(command, environment, str(cwd), said, path).wait()
        texts = [Path(said, name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(command, code_of_end or 0, *texts)

"""The megakernel's scheduler on threads, under ThreadSanitizer: tests/native/megakernel.cpp, compiled here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX", "g++")
SOURCES = [
    "tests/native/megakernel.cpp",
    "csrc/algos/winograd_megakernel/cpu.cpp",
    "csrc/winograd/task_map.cpp",
    "csrc/core/device_info.cpp",
    "csrc/core/problem.cpp",
]
FLAGS = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{ROOT}/csrc"]


def run(*command: str | Path, **arguments) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **arguments)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("megakernel")
    trivial = folder / "trivial.cpp"
    trivial.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
    try:
        done = run(CXX, *FLAGS, trivial, "-o", folder / "trivial")
        if done.returncode == 0:
            done = run(folder / "trivial")
    except OSError as error:
        pytest.skip(f"no C++ compiler: {error}")
    if done.returncode != 0:
        pytest.skip(f"{CXX} or this machine has no ThreadSanitizer: {done.stderr.strip().splitlines()[-1:]}")
    built = run(CXX, *FLAGS, *SOURCES, "-o", folder / "megakernel", cwd=ROOT)
    assert built.returncode == 0, built.stderr
    return folder / "megakernel"


@pytest.mark.parametrize("mode", ["stages", "stress", "expire", "throw"])
def test_threads_under_the_sanitizer(program, mode):
    done = run(program, mode, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr


def test_the_sanitizer_is_at_work(program):
    # On a busy machine one thread may do all that two would race for.
    for _ in range(20):
        done = run(program, "race", timeout=300)
        if done.returncode != 0:
            break
    assert done.returncode != 0
    assert "data race" in done.stderr

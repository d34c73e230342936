"""Arithmetic that CPU and GPU have in common, by programs that are compiled here: tests/native."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX", "g++")


@pytest.mark.parametrize(
    ("name", "optimised"),
    [
        ("scales", "-O0"),  # power-of-two scales of finite values alone
        ("scales", "-O3"),
        ("group_norm", "-O1"),  # how images are divided among clusters
        ("gates", "-O2"),  # the gated activations' formulas: all halves, floats of every size, NaN and infinities
    ],
)
def test_program(tmp_path, name, optimised):
    command = [CXX, "-std=c++20", optimised, f"-I{ROOT}/csrc", str(ROOT / f"tests/native/{name}.cpp"), "-o", name]
    try:
        built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no C++ compiler: {error}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

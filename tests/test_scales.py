"""The arithmetic of the power-of-two scales: tests/native/scales.cpp, compiled here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX", "g++")


@pytest.mark.parametrize("optimised", ["-O0", "-O3"])
def test_scales_of_finite_values_alone(tmp_path, optimised):
    command = [CXX, "-std=c++20", optimised, f"-I{ROOT}/csrc", str(ROOT / "tests/native/scales.cpp"), "-o", "scales"]
    try:
        built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no C++ compiler: {error}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "scales"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

"""The project's own checks must catch what they are there for."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "build")]
import check_includes  # noqa: E402
import check_sass  # noqa: E402
import sanitize  # noqa: E402
import toolchain  # noqa: E402
import winograd_norms  # noqa: E402

from fastconv import _C, built  # noqa: E402


def test_this_tree_keeps_the_rules():
    assert check_includes.check_tree(ROOT) == []


def test_the_oldest_torch_is_that_of_the_package():
    show = "show: ; @echo $(OLDEST_TORCH)"
    said = subprocess.run(
        ["make", "--silent", "--no-print-directory", "--eval", show, "show"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == ".".join(map(str, built.OLDEST_TORCH))


@pytest.mark.parametrize(
    ("path", "line", "reason"),
    [
        ("csrc/core/problem.h", "#include <torch/csrc/stable/tensor.h>", "only csrc/ops knows torch"),
        ("csrc/plan/registry.cpp", "#include <ATen/ATen.h>", "only csrc/ops knows torch"),
        ("csrc/plan/registry.cpp", "#include <cuda_runtime.h>", "need no CUDA"),
        ("csrc/core/problem.h", '#include "plan/registry.h"', "ground floor"),
        ("csrc/algos/direct/algo.cpp", "#include <cuda_fp16.h>", "need no CUDA"),
        ("csrc/algos/direct/cpu.cpp", "#include <cuda_runtime.h>", "need no CUDA"),
        ("csrc/algos/direct/cpu.cpp", "#include <torch/csrc/stable/ops.h>", "only csrc/ops knows torch"),
        ("csrc/algos/direct/launch.cu", "#include <torch/types.h>", "only csrc/ops knows torch"),
        ("csrc/algos/direct/kernel.cuh", "#  include  <c10/util/Half.h>", "only csrc/ops knows torch"),
        ("csrc/algos/direct/launch.cu", '#include "algos/winograd_staged/plan.h"', "its own folder"),
        ("csrc/algos/direct/launch.cu", '#include "../winograd/plan.h"', "paths start at csrc/"),
        ("csrc/algos/direct/launch.cu", '#include "ops/stable.h"', "do not know the operators"),
        ("csrc/device/epilogue.h", '#include "algos/direct/plan.h"', "shared by all kernels"),
        ("csrc/bindings/module.cpp", "#include <torch/torch.h>", "only csrc/ops knows torch"),
        ("csrc/hopper/ptx/tma.cuh", '#include "algos/direct/plan.h"', "shared by algorithms"),
        ("csrc/winograd/limits.cpp", '#include "algos/winograd_fused/plan.h"', "through the registry"),
        ("csrc/algos/implicit_gemm/wgrad/plan.h", "#include <cuda_fp16.h>", "need no CUDA"),
        ("csrc/core/cost.h", "constexpr int most_tiles = 8;", "the usual word is max_"),
        ("csrc/ops/operators.cpp", "#include <pybind11/pybind11.h>", "only csrc/bindings knows Python"),
        ("fastconv/nn.py", "y = torch.ops.fastconv.conv2d(x)", "fastconv/ops/__init__.py alone"),
        ("fastconv/nn.py", "pays = x.shape[1] >= 64", "csrc/plan has the choices"),
        ("fastconv/nn.py", 'ops = getattr(torch.ops, "fastconv")', "fastconv/ops/__init__.py alone"),
    ],
)
def test_a_broken_rule_is_caught(tmp_path, path, line, reason):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(f"\n{line}\n")
    (found,) = check_includes.check_tree(tmp_path)
    assert found.startswith(f"{path}:2: ")
    assert reason in found


def test_what_is_allowed_passes(tmp_path):
    for path, line in [
        ("csrc/ops/operators.cpp", "#include <torch/csrc/stable/library.h>"),
        ("csrc/ops/runtime_cuda.cpp", "#include <cuda_runtime.h>"),
        ("csrc/algos/direct/launch.cu", '#include "device/cuda_check.h"'),
        ("csrc/algos/direct/launch.cu", '#include "algos/direct/plan.h"'),
        ("csrc/algos/direct/plan.h", "int work_tiles, almost_full;  // at most_"),
        ("csrc/algos/direct/cpu.cpp", '#include "core/kernels.h"  // not <torch/torch.h>'),
        ("fastconv/ops/__init__.py", "torch.ops.fastconv.conv2d"),
        ("tests/harness.py", "torch.ops.fastconv.conv2d"),
    ]:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(line + "\n" * 499)
    assert check_includes.check_tree(tmp_path) == []


@pytest.mark.parametrize("path", ["csrc/core/problem.cpp", "tests/test_nn.py"])
def test_a_long_file_is_caught(tmp_path, path):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text("\n" * 501)
    assert check_includes.check_tree(tmp_path) == [f"{path}: 501 lines; at most 500"]


ALGORITHMS = {
    "csrc/plan/algorithms.def": "// one a line\nFASTCONV_PLAIN(direct)\nFASTCONV_PACKED(winograd_f2)\n",
    "csrc/algos/direct/algo.cpp": 'namespace fastconv::algos::direct {\n    .name = "direct",\n',
    "csrc/algos/direct/resident/plan.h": "namespace fastconv {\nnamespace algos::direct::resident {\n",
    "csrc/algos/winograd_staged/plan.h": "namespace fastconv::algos::winograd_staged {\n",
    "csrc/algos/winograd_staged/algo.cpp": 'namespace algos::winograd_f2 {\n    .name = "winograd_f2",\n',
    "csrc/algos/direct/affine_fp16.cu": "", "csrc/algos/direct/affine_bf16.cu": "",
    "csrc/algos/direct/affine_fp32.cu": "", "csrc/algos/direct/few_loads.cuh": "", "csrc/algos/direct/few_loads.h": "",
    "csrc/algos/direct/few_stores.cuh": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("csrc/algos/direct/cpu.cpp", "namespace fastconv::algos::direct {\n", []),
        ("csrc/algos/direct/cpu.cpp", "namespace fastconv::algos::straight {\n",
         ["csrc/algos/direct/cpu.cpp: namespace algos::straight: its folder is direct"]),
        ("csrc/algos/direct/resident/kernel.cuh", "namespace fastconv::algos::direct::tiled {\n",
         ["csrc/algos/direct/resident/kernel.cuh: namespace algos::direct::tiled is not its folder's"]),
        ("csrc/algos/direct/algo.cpp", 'namespace fastconv::algos::direct {\n    .name = "straight",\n',
         ["csrc/algos/direct/algo.cpp: the name 'straight' is no namespace of the file"]),
        ("csrc/algos/lost/plan.h", "namespace fastconv::algos::lost {\n",
         ["csrc/algos/lost: is not in algorithms.def"]),
        ("csrc/plan/algorithms.def", "FASTCONV_PLAIN(direct)\nFASTCONV_PACKED(winograd_f2)\nFASTCONV_PLAIN(gone)\n",
         ["csrc/plan/algorithms.def: gone has no namespace in csrc/algos"]),
        ("csrc/algos/direct/few_filters.cuh", "",
         ["csrc/algos/direct: 3 files begin with few_: make it a folder"]),
    ],
)  # fmt: skip
def test_a_wrong_name_is_caught(tmp_path, path, text, expected):
    for file, content in (ALGORITHMS | {path: text}).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    assert check_includes.check_tree(tmp_path) == expected


def test_check_includes_as_a_program(tmp_path):
    (tmp_path / "fastconv").mkdir()
    (tmp_path / "fastconv" / "nn.py").write_text("torch.ops.fastconv\n")
    command = [sys.executable, str(ROOT / "tools" / "check_includes.py")]
    assert subprocess.run([*command, str(tmp_path)], capture_output=True).returncode == 1
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_setup_plans_a_build_for_the_cpu_alone(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setenv("FASTCONV_CUDA", "0")
    plan = runpy.run_path(str(ROOT / "setup.py"))["ninja_file"]("_C.so", "libfastconv.so")
    assert "build _C.so: link" in plan
    assert "runtime.cpp" in plan
    assert "runtime_cuda.cpp" not in plan
    assert ": nvcc" not in plan


USAGE = """
Fatbin elf code:
================
arch = sm_90a
code version = [1,8]
host = linux
compile_size = 64bit

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN4fast5cleanEv:
  REG:40 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:912 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _ZN4fast5spillEv:
  REG:255 STACK:24 SHARED:0 LOCAL:0 CONSTANT[0]:912 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_check_sass_reads_what_cuobjdump_prints(capsys):
    clean, spilling = check_sass.parse(USAGE)
    assert clean == check_sass.Kernel("sm_90a", "_ZN4fast5cleanEv", 40, 0, 1024, 0)
    assert (spilling.registers, spilling.stack, spilling.spills) == (255, 24, True)
    (found,) = check_sass.report([clean, spilling], verbose=False)
    assert "255 registers" in found
    assert "clean" not in capsys.readouterr().out


def test_check_sass_sees_products_that_are_missing_or_serialised(capsys):
    good, serialised, missing = (f"_ZN14winograd_fused5split8convolveILi{i}EEEvv" for i in range(3))
    other = "_ZN6direct8convolveILi3EEEvv"
    product, wait = (
        "  /*0010*/  HGMMA.64x64x16.F32 R24, R4, gdesc[UR8] ;",
        "  /*0020*/  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;",
    )
    text = [f"  Function : {good}", product, product, wait, f"  Function : {serialised}", product, wait, product, wait,
            f"  Function : {missing}", wait, f"  Function : {other}", wait]  # fmt: skip
    kernels = check_sass.parse_sass(text)
    assert [(kernel.products, kernel.waits) for kernel in kernels] == [(2, 1), (2, 2), (0, 1), (0, 1)]
    faults = check_sass.report_products(kernels)
    assert [fault.split("  ")[0] for fault in faults] == ["serialised: 2 waits for 2 HGMMA", "no HGMMA"]
    assert "no HGMMA" in capsys.readouterr().out


def test_check_sass_sees_constants_loaded_before_the_kernel_before_has_ended(capsys):
    wait, constant, other = (
        "  /*0010*/  ACQBULK ;",
        "  /*0020*/  @!P1 LDG.E.CONSTANT R25, desc[UR8][R2.64] ;",
        "  /*0030*/  LDG.E.64 R24, desc[UR8][R4.64] ;",
    )
    text = ["  Function : _ZN6behindEv", other, wait, constant, constant, "  Function : _ZN5aloneEv", constant,
            "  Function : _ZN5earlyEv", constant, other, wait, constant, wait]  # fmt: skip
    kernels = check_sass.parse_sass(text)
    assert [(kernel.in_series, kernel.early_constants) for kernel in kernels] == [(True, 0), (False, 0), (True, 1)]
    (fault,) = check_sass.report_loads(kernels)
    assert fault.startswith("1 loads of constants before its wait")
    assert "early" in fault
    assert fault in capsys.readouterr().out


def test_check_sass_sees_loads_behind_the_products_of_a_loop(capsys):
    load, product = "LDG.E.128.CONSTANT R100, desc[UR8][R2.64]", "HGMMA.64x64x16.F32 R24, R4, gdesc[UR8]"
    poll, done = ["SYNCS.PHASECHK.TRANS64 P0, [UR4]", "@!P0 BRA 0x10"], "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    loops = {
        "_Z3one": [load, *poll, product, load, load, done, "@P0 BRA 0x0", load],
        "_Z3two": [load, *poll, product, done, load, load, "@P0 BRA 0x0", load, "BRA 0x0"],
        "_Z5under": [load, *poll, product, done, product, "WARPGROUP.DEPBAR.LE gsb0, 0x1", load, "@P0 BRA 0x0"],
    }
    text = []
    for name, code in loops.items():
        text += [f"  Function : {name}", *(f"  /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(code))]
    kernels = check_sass.parse_sass(text)
    assert [kernel.late_loads for kernel in kernels] == [0, 2, 0]
    (fault,) = check_sass.report_loads(kernels)
    assert fault.startswith("2 loads behind the products of a loop  ")
    assert fault in capsys.readouterr().out


@pytest.mark.parametrize("name", winograd_norms.POINTS)
def test_winograd_matrices_compute_a_correlation(name):
    m, points = winograd_norms.POINTS[name]
    transforms = winograd_norms.matrices(m, points)
    assert winograd_norms.check_identity(transforms) < 1e-12
    d, g = np.random.default_rng(0).normal(size=m + 2), np.random.default_rng(1).normal(size=3)
    expected = [float(d[j : j + 3] @ g) for j in range(m)]
    np.testing.assert_allclose(transforms.at @ ((transforms.g @ g) * (transforms.bt @ d)), expected, atol=1e-12)


def test_noise_gain_is_the_noise_of_a_simulation():
    m, points = winograd_norms.POINTS["F(4,3) 0 +-sqrt2/2 +-sqrt2"]
    t = winograd_norms.matrices(m, points)
    random = np.random.default_rng(2)
    d, g = random.normal(size=(20000, m + 2)), random.normal(size=(20000, 3))
    products = (g @ t.g.T) * (d @ t.bt.T)
    noise = (products * random.normal(size=products.shape)) @ t.at.T
    ratio = noise.var() / (products @ t.at.T).var()
    assert ratio == pytest.approx(winograd_norms.noise_gain(t), rel=0.1)
    uneven = noise.var(axis=0).max() / noise.var(axis=0).mean()
    assert uneven == pytest.approx(winograd_norms.noisiest_output(t), rel=0.1)


@pytest.mark.parametrize(
    "row", [row for row in _C.algorithms() if row["family"] == "winograd"], ids=lambda r: r["name"]
)
def test_an_algorithm_records_the_noise_of_its_matrices(row):
    """Of one dimension the root of what two have."""
    rows, columns = row["tile"]
    m, points = next(value for value in winograd_norms.POINTS.values() if value[0] == columns)
    t = winograd_norms.matrices(m, points)
    for name in ("noise_gain", "noisiest_output", "noisiest_pixel"):
        expected = getattr(winograd_norms, name)(t) ** (1.0 if rows > 1 else 0.5)
        assert row[name] == pytest.approx(expected, rel=0.005), name


def test_documented_numbers_are_the_computed_ones():
    text = (ROOT / "docs" / "concepts" / "numerics.md").read_text()
    for m, points in winograd_norms.POINTS.values():
        t = winograd_norms.matrices(m, points)
        for number in ("gain", "worst_case", "noise_gain", "noisiest_output", "noisiest_pixel"):
            value = getattr(winograd_norms, number)(t) ** (2 if number == "worst_case" else 1)
            assert f"{value:.3g}" in text, (number, value)


def test_architectures_become_flags_of_nvcc():
    assert toolchain.architecture_flags("90a; 80+PTX;") == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert toolchain.architecture_flags("compute_90a") == ["-gencode=arch=compute_90a,code=compute_90a"]


@pytest.mark.parametrize("text", ["", "hopper", "90a;sm_80", "80+ptx", "90aa", "90a;;80", "compute_"])
def test_a_wrong_architecture_is_named(text):
    with pytest.raises(SystemExit, match="FASTCONV_CUDA_ARCHS has"):
        toolchain.architecture_flags(text)


def test_nvcc_is_found_with_its_headers_and_runtime_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    package = tmp_path / "nvidia" / "cu13"
    for file in ("bin/nvcc", "include/cuda_runtime.h", "lib/libcudart_static.a"):
        (package / file).parent.mkdir(parents=True)
        (package / file).touch()
    monkeypatch.setattr(
        toolchain, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[package.parent])
    )
    monkeypatch.setattr(toolchain, "SYSTEM_NVCC", tmp_path / "no" / "nvcc")
    assert toolchain.find_nvcc() == package / "bin" / "nvcc"
    assert toolchain.cudart_static(package / "bin" / "nvcc") == package / "lib"
    monkeypatch.setenv("CUDA_HOME", "")
    assert toolchain.find_nvcc() == package / "bin" / "nvcc"
    (package / "lib" / "libcudart_static.a").unlink()
    assert toolchain.find_nvcc() is None


def test_cuda_home_is_taken_or_named(tmp_path, monkeypatch):
    home = tmp_path / "cuda"
    monkeypatch.setenv("CUDA_HOME", str(home))
    for missing, file in (
        ("does not exist", "include/cuda_runtime.h"),
        ("has no bin/nvcc", "bin/nvcc"),
        ("lacks cuda_runtime.h or libcudart_static.a", "lib64/libcudart_static.a"),
    ):
        with pytest.raises(SystemExit, match=f"CUDA_HOME is '{home}', which {missing}"):
            toolchain.find_nvcc()
        (home / file).parent.mkdir(parents=True)
        (home / file).touch()
    assert toolchain.find_nvcc() == home / "bin" / "nvcc"


RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at 0x1 in a.cuh:3:void fastconv::k<int>()
=========     and Read access at 0x2 in a.cuh:4:void fastconv::k<int>() [4 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
2 passed in 3s"""


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (0, "2 passed in 3s", "clean"),
        (0, "2 skipped in 3s", "failed"),
        (1, "1 failed, 1 passed", "failed"),
        (None, "1 passed", "timeout"),
        (sanitize.REPORTED, RACE, "errors"),
        (sanitize.REPORTED, "2 passed", "errors"),
        (0, RACE, "errors"),
    ],
)
def test_sanitize_judges_a_run(code, output, status):
    assert sanitize.judge("racecheck", code, output).status == status


def test_sanitize_says_where_a_known_report_ended_kernels(monkeypatch):
    monkeypatch.setattr(
        sanitize, "KNOWN", {("synccheck", r"a\.cuh:4:"): "a reason", ("racecheck", r"a\.cuh:4:"): "one"}
    )
    assert sanitize.judge("synccheck", 1, RACE).status == "aborted"
    assert sanitize.judge("synccheck", sanitize.REPORTED, RACE + "\n1 failed").status == "aborted"
    assert sanitize.judge("racecheck", 1, RACE).status == "failed"  # which ends no kernel
    assert sanitize.judge("synccheck", 1, RACE.replace("a.cuh", "b.cuh")).status == "failed"
    assert sanitize.judge("synccheck", 1, "1 failed").status == "failed"


def test_sanitize_takes_no_empty_line_for_a_report():
    spaced = RACE.replace("=========\n", "========= \n")
    assert spaced != RACE
    assert sanitize.reports_of(spaced) == sanitize.reports_of(RACE)
    assert len(sanitize.reports_of(RACE)) == 1


def test_sanitize_names_tests_that_exist(monkeypatch):
    runs = sanitize.runs(["memcheck"], [])
    files = sorted({run.test.split("::")[0] for run in runs})
    listed: list[str] = []

    class Listing:
        def pytest_collection_finish(self, session):
            listed.extend(item.nodeid for item in session.items)

    options = ["--collect-only", "-q", "-m", "sanitize", "-o", "addopts=", "--rootdir", str(ROOT)]
    monkeypatch.chdir(ROOT)
    assert pytest.main([*options, *files], [Listing()]) == 0
    for run in runs:
        parts = run.keyword.split(" and ")
        assert any(line.startswith(run.test) and all(part in line for part in parts) for line in listed), run


def test_sanitize_lets_pass_what_is_listed_and_that_alone(monkeypatch):
    monkeypatch.setattr(sanitize, "KNOWN", {("racecheck", r"Read access .* a\.cuh:4:"): "a reason"})
    outcome = sanitize.judge("racecheck", sanitize.REPORTED, RACE)
    assert (outcome.status, outcome.known, outcome.reports) == ("known", 1, [])
    other = RACE.replace(
        "========= RACECHECK", "========= Error: Race reported between Write access at b.cu:1\n========= RACECHECK"
    )
    outcome = sanitize.judge("racecheck", sanitize.REPORTED, other)
    assert (outcome.status, outcome.known, len(outcome.reports)) == ("errors", 1, 1)
    assert sanitize.judge("memcheck", sanitize.REPORTED, RACE).status == "errors"


def test_sanitize_runs_every_algorithm_under_every_tool():
    runs = sanitize.runs(sanitize.TOOLS, [])
    assert len(runs) == len(set(runs)) == 4 * len({run.group for run in runs})
    assert {"winograd_f4", "implicit_gemm", "winograd_megakernel", "weight_gradient_fp32"} <= {
        run.group for run in runs
    }
    outcomes = {run: sanitize.judge(run.tool, 0, "1 passed") for run in runs}
    outcomes[runs[0]] = sanitize.judge("memcheck", sanitize.REPORTED, RACE)
    assert "1 errors" in sanitize.table(outcomes)
    with pytest.raises(SystemExit, match="nobody"):
        sanitize.runs(sanitize.TOOLS, ["nobody"])

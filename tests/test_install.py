"""What somebody reads for whom the build or the import fails."""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch

from fastconv import built

ROOT = Path(__file__).resolve().parent.parent
PLANNER = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
LIBRARIES = (PLANNER, "libfastconv.so", "build.json")


def package(folder: Path, *libraries: str) -> Path:
    """A copy of the package with some of its libraries."""
    target = folder / "fastconv"
    shutil.copytree(built.FOLDER, target, ignore=shutil.ignore_patterns("*.so", "build.json", "__pycache__"))
    for name in libraries:
        (target / name).symlink_to(built.FOLDER / name)
    return target


def import_error(cwd: Path, *path: Path) -> str:
    """What `python -c "import fastconv"` ends with there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "FASTCONV_CACHE_DIR": ""}
    command = [sys.executable, "-c", "import fastconv"]
    return error_of(subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True))


def error_of(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), run.stderr
    return last


def test_a_source_tree_that_hides_the_installed_package_says_so(tmp_path: Path) -> None:
    tree, installed = package(tmp_path / "clone"), package(tmp_path / "site", *LIBRARIES)
    said = import_error(tree.parent, installed.parent)
    assert f"imported from {tree}, a source tree that is not built" in said
    assert f"hides the fastconv installed in {installed}" in said
    assert f"Run Python from another folder than {tree.parent}" in said
    assert "setup.py build_ext --inplace" in said


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_library_says_how_to_build(tmp_path: Path, missing: int) -> None:
    folder = package(tmp_path, *(name for i, name in enumerate(LIBRARIES) if i != missing))
    said = import_error(tmp_path)
    assert f"{folder / LIBRARIES[missing]} does not exist" in said
    assert "pip install ." in said
    assert "setup.py build_ext --inplace" in said


def test_a_planner_for_another_python_is_named(tmp_path: Path) -> None:
    folder = package(tmp_path, *LIBRARIES[1:])
    (folder / "_C.cpython-27-x86_64-linux-gnu.so").touch()
    said = import_error(tmp_path)
    assert "built for another Python (_C.cpython-27-x86_64-linux-gnu.so)" in said
    assert PLANNER in said


def test_a_torch_that_is_too_old_is_named(tmp_path: Path) -> None:
    package(tmp_path / "site", *LIBRARIES)
    stub = tmp_path / "old" / "torch" / "__init__.py"
    stub.parent.mkdir(parents=True)
    stub.write_text('__version__ = "2.9.1+cpu"\n')
    said = import_error(tmp_path, tmp_path / "old", tmp_path / "site")
    assert "fastconv needs torch 2.10 or later; this is torch 2.9.1+cpu" in said
    assert str(stub.parent) in said
    assert f"built with torch {built.built_with()['torch']}" in said


# What the dynamic loader looks up by name, spoilt: a symbol of torch, and a version of the C library.
SPOILT = {
    "libfastconv.so": (b"aoti_torch_library_def\0", b"aoti_torch_library_deg\0", "undefined symbol"),
    PLANNER: (b"GLIBC_2.2.5\0", b"GLIBC_9.9.9\0", "GLIBC_9.9.9' not found"),
}


@pytest.mark.parametrize("library", SPOILT)
def test_a_library_that_cannot_be_loaded_names_both_sides(tmp_path: Path, library: str) -> None:
    folder = package(tmp_path, *(name for name in LIBRARIES if name not in (library, "build.json")))
    (folder / "build.json").write_text(json.dumps({"torch": "2.77.0", "libc": "glibc 9.9"}))
    good, bad, reason = SPOILT[library]
    code = (built.FOLDER / library).read_bytes()
    assert good in code
    (folder / library).write_bytes(code.replace(good, bad))
    said = error_of(processes.run("import fastconv", cwd=tmp_path, path=[str(tmp_path), *sys.path]))
    assert str(folder / library) in said or str(folder / "_C") in said
    assert reason in said
    assert "built with torch 2.77.0 on glibc 9.9" in said
    assert f"running are torch {torch.__version__} on glibc" in said
    assert "Build it again here" in said


def run_installed(folder: Path, cwd: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` as an installed script: Python looks for packages in its folder and in `folder`, not in `cwd`."""
    environment = {name: value for name, value in os.environ.items() if name != "FASTCONV_COMMIT"}
    elsewhere = (each for each in sys.path if each and not (Path(each) / "benchmarks").is_dir())  # not this tree
    path = [str(folder / "bin"), str(folder), *elsewhere]
    return processes.run(code, environment=environment | {"PYTHONPATH": str(folder)}, cwd=cwd, path=path)


# Each of them in a process of its own would spend its time importing torch.
COMMANDS = """
import sys
from fastconv.cli import main
for arguments in (["layers", "--help"], ["--help"], []):
    sys.argv[1:] = ["bench", *arguments]
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


def test_bench_without_a_source_tree_says_where_the_benchmarks_are(tmp_path: Path) -> None:
    package(tmp_path, *LIBRARIES)
    run = run_installed(tmp_path, tmp_path, COMMANDS)
    assert run.stdout.split() == ["1", "1", "1"], run.stderr
    said = " ".join(run.stderr.split())
    assert said.count("error: the benchmarks are in fastconv's source tree, not in the installed package") == 3
    assert said.count(f"{tmp_path} is no such tree: run this command in a checkout") == 3


def test_bench_in_a_source_tree_measures_the_installed_package(tmp_path: Path) -> None:
    installed = package(tmp_path, *LIBRARIES)
    code = f"""
import sys
from fastconv.cli import main
sys.argv[1:] = ["bench", "layers", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
import fastconv
from benchmarks.layers import suite
assert fastconv.__file__ == {str(installed / "__init__.py")!r}
assert suite.__file__ == {str(ROOT / "benchmarks" / "layers" / "suite.py")!r}
suite.run((1,), ["fp32"], "dense4", ["direct"], 1, device="cpu", out={str(tmp_path / "l.json")!r}, isolate=True)
"""
    run = run_installed(tmp_path, ROOT, code)
    assert run.returncode == 0, run.stderr
    assert "Usage: fastconv bench layers" in run.stdout
    assert json.loads((tmp_path / "l.json").read_text())["commit"] == "unknown"  # the worker's package, of no checkout


def test_the_build_notes_what_it_was_built_with() -> None:
    noted = built.built_with()
    assert re.match(r"2\.\d+", noted["torch"])
    assert noted["libc"].startswith("glibc ")


def other_python() -> str | None:
    """A Python older than 3.10, but not so old that setup.py's imports end it."""
    candidates = [shutil.which(f"python3.{minor}") for minor in (9, 8)]
    candidates += map(str, Path.home().glob(".pyenv/versions/3.[89].*/bin/python3"))
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", "import setuptools"], capture_output=True).returncode == 0:
            return candidate
    return None


@pytest.mark.parametrize(
    ("folder", "command"),
    [(".", ["setup.py", "--version"]), ("tools/build", ["-c", "import backend"])],
    ids=["setup.py", "backend"],
)
def test_a_python_that_is_too_old_is_told_so(folder: str, command: list[str]) -> None:
    python = other_python()
    if python is None:
        pytest.skip("needs a Python before 3.10, with setuptools")
    run = subprocess.run([python, "-B", *command], cwd=ROOT / folder, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("fastconv needs Python 3.10 or later; ")
    assert re.search(r"is Python 3\.[6-9]\.\d+$", run.stderr.strip())

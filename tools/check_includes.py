"""Checks the rules between the layers of the source tree (docs/concepts/architecture.md), and the length of files.

usage: python tools/check_includes.py [root]      exit status 1 if a rule is broken, one line per violation
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

LONGEST_FILE = 500
# Shader-like sources, Python, and the build's own files; documents may be as long as they need.
SUFFIXES = {".cpp", ".h", ".cu", ".cuh", ".py"}

TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
CUDA = re.compile(
    r"(cuda|cublas|cudnn|cute/|cutlass/|cub/|thrust/|nv/|mma\.h|cooperative_groups|device_launch|driver_types)"
)
PYBIND = re.compile(r"pybind11/")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
OPERATORS = re.compile(r"\btorch\s*\.\s*ops\s*\.\s*(fastconv\b|__getattr__|load_library)|getattr\(\s*torch\.ops\s*,")


@dataclass(frozen=True)
class Rule:
    """Files whose path relative to the root matches `where` may not include what matches `what`."""

    where: re.Pattern[str]
    what: re.Pattern[str]
    reason: str


RULES = [
    Rule(re.compile(where), what if isinstance(what, re.Pattern) else re.compile(what), reason)
    for where, what, reason in (
        (r"csrc/(?!ops/)", TORCH, "only csrc/ops knows torch"),
        (
            r"csrc/(core|plan|bindings|host)/|csrc/(winograd|algos)/.*(algo|cpu[^/]*)\.(cpp|h)$",
            CUDA,
            "planning and the CPU need no CUDA",
        ),
        (r"csrc/algos/.*/(plan\.h|cpu/.*)$", CUDA, "planning and the CPU need no CUDA"),
        (r"csrc/(?!bindings/)", PYBIND, "only csrc/bindings knows Python"),
        (r"csrc/core/", r"(device|hopper|host|winograd|plan|algos|ops|bindings)/", "csrc/core is the ground floor"),
        (r"csrc/device/", r"(hopper|host|winograd|plan|algos|ops|bindings)/", "csrc/device is shared by all kernels"),
        (
            r"csrc/(hopper|host)/",
            r"(winograd|plan|algos|ops|bindings)/",
            "csrc/hopper and csrc/host are shared by algorithms",
        ),
        (r"csrc/(winograd|plan|algos|studies)/", r"(ops|bindings)/", "kernels and planner do not know the operators"),
        (r"csrc/(winograd|plan|ops|bindings|studies)/", r"algos/", "algorithms are reached through the registry"),
        (r"csrc/(?!studies/|ops/ladder)", r"studies/", "a study is no part of what it is compared with"),
    )
]


def _algorithm(path: str) -> str | None:
    match = re.match(r"(?:csrc/)?algos/([^/]+)/", path)
    return match.group(1) if match else None


def check_includes(path: str, text: str) -> list[str]:
    """Violations of one C++ or CUDA file; `path` is relative to the root, with forward slashes."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        header = match.group(1)
        for rule in RULES:
            if rule.where.match(path) and rule.what.match(header):
                found.append(f"{path}:{number}: includes {header}: {rule.reason}")
        own, other = _algorithm(path), _algorithm(header)
        if own and other and own != other:
            found.append(f"{path}:{number}: includes {header}: an algorithm uses its own folder and what all share")
        if header.startswith(("./", "../")):
            found.append(f"{path}:{number}: includes {header}: paths start at csrc/")
    return found


def check_python(path: str, text: str) -> list[str]:
    """fastconv/ops/__init__.py is the only file of the package that names torch.ops.fastconv."""
    if not path.startswith(("fastconv/", "benchmarks/")) or path == "fastconv/ops/__init__.py":
        return []
    return [
        f"{path}:{number}: names torch.ops: fastconv/ops/__init__.py alone does"
        for number, line in enumerate(text.splitlines(), 1)
        if OPERATORS.search(line.split("#")[0])
    ]


def check_tree(root: Path) -> list[str]:
    """All violations below `root`, sorted by path."""
    found = []
    for top in ("csrc", "fastconv", "tests", "benchmarks", "tools", "setup.py"):
        base = root / top
        for file in sorted([base] if base.is_file() else base.rglob("*")):
            if file.suffix not in SUFFIXES or not file.is_file():
                continue
            path, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
            lines = text.count("\n")
            if lines > LONGEST_FILE:
                found.append(f"{path}: {lines} lines; at most {LONGEST_FILE}")
            found += check_python(path, text) if file.suffix == ".py" else check_includes(path, text)
    return found


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = check_tree(root)
    print("\n".join(found) if found else "check_includes: every rule holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

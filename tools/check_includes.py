"""Checks the rules between the layers of the source tree (docs/concepts/architecture.md), the names of an algorithm's
folder, namespace and registry line, and of files, their length, and words of csrc that have usual ones.

usage: python tools/check_includes.py [root]      exit status 1 if a rule is broken, one line per violation
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST_FILE = 500
LARGEST_NUMBER = 8  # that fastconv's Python compares with: dimensions of tensors, arguments of calls
# Shader-like sources, Python, and the build's own files; documents may be as long as they need.
SUFFIXES = {".cpp", ".h", ".cu", ".cuh", ".py"}

TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
CUDA = re.compile(
    r"(cuda|cublas|cudnn|cute/|cutlass/|cub/|thrust/|nv/|mma\.h|cooperative_groups|device_launch|driver_types)"
)
PYBIND = re.compile(r"pybind11/")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
NAMESPACE = re.compile(r"^namespace (?:fastconv::)?algos::([\w:]+)", re.MULTILINE)
RECORD = re.compile(r'(?:\.name = |WeightGradient weight_gradient\{)"(\w+)"')
REGISTERED = re.compile(r"^FASTCONV_\w+\((\w+)\)", re.MULTILINE)
# What the names of csrc are not called, and what instead.
WORDS = {
    r"lean\w*": "single_tile",
    r"(?:for_each_)?(?:work_)?item": "work_tile",
    r"least_\w+": "min_",
    r"most_\w+": "max_",
    r"frequenc(?:y|ies)": "point",
    r"copy_box": "tma_load",
    r"leads_warp": "elect_one",
    r"(?:grow|shrink)_registers": "setmaxnreg_inc, setmaxnreg_dec",
    r"admit_successor": "launch_dependents",
    r"notify_block": "arrive_remote",
    r"own_product": "wgmma_gemm",
    r"rehearse|canvas": "warm_code, stacked_images",
}
CLASSES = {"ieee", "fp32", "tf32", "fp16", "bf16"}
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


def check_words(path: str, text: str) -> Iterator[str]:
    """Names of a C++ or CUDA file, not its comments, are the field's."""
    for number, line in enumerate(text.splitlines(), 1):
        for word, usual in WORDS.items():
            if match := re.search(rf"\b(?:{word})\b", line.split("//")[0]):
                yield f"{path}:{number}: {match[0]}: the usual word is {usual}"


def check_python(path: str, text: str) -> list[str]:
    """fastconv/ops/__init__.py is the only file of the package that names torch.ops.fastconv. No file of it has a
    threshold: what pays from which size on is known to csrc/plan and the cost models alone."""
    if not path.startswith(("fastconv/", "benchmarks/")):
        return []
    found = [
        f"{path}:{number}: names torch.ops: fastconv/ops/__init__.py alone does"
        for number, line in enumerate(text.splitlines(), 1)
        if OPERATORS.search(line.split("#")[0]) and path != "fastconv/ops/__init__.py"
    ]
    if path.startswith("fastconv/"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare) and any(map(_is_threshold, (node.left, *node.comparators))):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}: a threshold: csrc/plan has the choices")
    return found


def _is_threshold(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) and value.value > LARGEST_NUMBER


def check_names(root: Path) -> Iterator[str]:
    """Folder, namespace and registry name of an algorithm are one; of a folder with several instances, which have names
    of their own, the namespaces of these are. Namespaces within it are folders within it."""
    registry = root / "csrc/plan/algorithms.def"
    if not registry.exists():
        return
    registered = set(REGISTERED.findall(registry.read_text(encoding="utf-8")))
    folders = {folder.name: folder for folder in sorted((root / "csrc/algos").glob("*/"))}
    instances = registered - folders.keys()
    found: set[str] = set()
    for name, folder in folders.items():
        files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
        own = set()
        for file in files:
            text, path = file.read_text(encoding="utf-8"), file.relative_to(root).as_posix()
            namespaces = NAMESPACE.findall(text)
            for namespace in namespaces:
                first, *rest = namespace.split("::")
                own.add(first)
                if first != name and first not in instances:
                    yield f"{path}: namespace algos::{first}: its folder is {name}"
                elif not set(rest) <= set(file.relative_to(folder).parts[:-1]):
                    yield f"{path}: namespace algos::{namespace} is not its folder's"
            for record in RECORD.findall(text):
                if record not in {namespace.split("::")[0] for namespace in namespaces}:
                    yield f"{path}: the name '{record}' is no namespace of the file"
        if not own & registered:
            yield f"csrc/algos/{name}: is not in {registry.name}"
        found |= own
    for name in sorted(registered - found):
        yield f"csrc/plan/{registry.name}: {name} has no namespace in csrc/algos"


def check_prefixes(root: Path) -> Iterator[str]:
    """Three files with a common prefix are a folder; those of one kernel for each class are not."""
    for top in ("csrc", "fastconv", "benchmarks"):
        files = {path.with_suffix("") for path in (root / top).rglob("*") if path.suffix in SUFFIXES}
        counts = Counter(
            (path.parent, prefix)
            for path in files
            if (parts := path.name.partition("_"))[2] and (prefix := parts[0]) and parts[2] not in CLASSES
        )
        for (folder, prefix), count in sorted(counts.items()):
            if count > 2:
                yield f"{folder.relative_to(root).as_posix()}: {count} files begin with {prefix}_: make it a folder"


def check_tree(root: Path) -> list[str]:
    """All violations below `root`."""
    found = [*check_names(root), *check_prefixes(root)]
    for top in ("csrc", "fastconv", "tests", "benchmarks", "tools", "setup.py"):
        base = root / top
        for file in sorted([base] if base.is_file() else base.rglob("*")):
            if file.suffix not in SUFFIXES or not file.is_file():
                continue
            path, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
            lines = text.count("\n")
            if lines > LONGEST_FILE:
                found.append(f"{path}: {lines} lines; at most {LONGEST_FILE}")
            if file.suffix == ".py":
                found += check_python(path, text)
            else:
                found += [*check_includes(path, text), *check_words(path, text)]
    return found


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = check_tree(root)
    print("\n".join(found) if found else "check_includes: every rule holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

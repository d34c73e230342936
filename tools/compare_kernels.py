"""Compares the machine code of two builds of the library, kernel by kernel, whatever the kernels are called.

usage: python tools/compare_kernels.py OLD NEW       (two libfastconv.so)

A kernel is its architecture, registers, stack and shared memory, and a hash of its instructions without names. Moves
and renames leave the multiset of them as it is: exit status 0. Else the kernels of either side that the other has not
are listed, and the exit status is 1. Needs cuobjdump (check_sass.py says where it is looked for).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_sass

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);?\s*/\*")
SYMBOL = re.compile(r"\b(_Z\w+|\$\w+|\.nv\.\w+[\w.$]*)")


def hash_code(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """(architecture, mangled name, hash) of each kernel in the output of `cuobjdump -sass`."""
    architecture, name, digest = "?", "", hashlib.sha256()
    for line in lines:
        if match := re.match(r"\s*(?:Function\s*:\s*(\S+)|arch = (\S+))", line):
            if name:
                yield architecture, name, digest.hexdigest()[:16]
            name, digest = match.group(1) or "", hashlib.sha256()
            architecture = match.group(2) or architecture
        elif name and (match := INSTRUCTION.match(line)):
            digest.update(SYMBOL.sub("symbol", match.group(1)).encode())
    if name:
        yield architecture, name, digest.hexdigest()[:16]


Identity = tuple[str, int, int, int, str]  # architecture, registers, stack, shared memory, hash


def read(tool: str, library: Path) -> dict[Identity, list[str]]:
    """Mangled names by what identifies a kernel."""
    usage = subprocess.run([tool, "-res-usage", str(library)], capture_output=True, text=True, check=True)
    sizes = {(kernel.architecture, kernel.name): (kernel.registers, kernel.stack, kernel.shared)
             for kernel in check_sass.parse(usage.stdout + usage.stderr)}  # fmt: skip
    if not sizes:
        raise SystemExit(f"compare_kernels: {library} has no kernels")
    found = defaultdict(list)
    with subprocess.Popen([tool, "-sass", str(library)], stdout=subprocess.PIPE, text=True) as process:
        for architecture, name, digest in hash_code(process.stdout or ()):
            registers, stack, shared = sizes[architecture, name]
            found[architecture, registers, stack, shared, digest].append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    tool = check_sass.find_cuobjdump()
    if tool is None:
        raise SystemExit("compare_kernels: no cuobjdump in CUDA_HOME, PATH, /usr/local/cuda or the triton package")
    old, new = read(tool, arguments.old), read(tool, arguments.new)
    same = 0
    sides: dict[str, list[str]] = {"only in the old library": [], "only in the new library": []}
    for key in {**old, **new}:
        a, b = old.get(key, []), new.get(key, [])
        same += min(len(a), len(b))
        for side, names in zip(sides.values(), (a[len(b) :], b[len(a) :]), strict=True):
            side += [f"{key[0]} {key[1]:4d} registers {key[2]:4d} B stack  {name}"
                     for name in check_sass.demangle(names)]  # fmt: skip
    for title, lines in sides.items():
        print(*(f"{title}: {line}" for line in sorted(lines)), sep="\n", end="\n" if lines else "")
    print(f"compare_kernels: {same} kernels equal, {', '.join(f'{len(v)} {k}' for k, v in sides.items())}")
    return 1 if any(sides.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Registers, stack, spills and matrix products of every kernel of a built library, read back with cuobjdump.

usage: python tools/check_sass.py [library] [--verbose]
Exit status 1 if a kernel keeps a stack frame or uses local memory: that is what a register spill, or an array that was
not unrolled into registers, looks like in the finished code. And if a kernel that is written for wgmma has no HGMMA, or
waits after each one: that is what products look like that ptxas has serialised (its warnings C7510 to C7514). And if a
kernel of a series loads what counts as constant in front of its wait for the kernel before, where the compiler may put
it, whatever the source says (device/dependent_launch.cuh). And if a loop over products loads what it multiplies next
behind its wait for all of them: each turn then waits for memory, 3 to 9 % of a layer (docs/log/137-one-commit.md).
Says so and succeeds where there is no cuobjdump, or no GPU code in the library.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent / "fastconv" / "libfastconv.so"
# Kernels that may keep a stack frame, as a regular expression on the demangled name, each with its reason.
ALLOWED: dict[str, str] = {
    r"implicit_gemm::persistent::convolve<fastconv::algos::implicit_gemm::persistent::Shape<float, "
    r"\(fastconv::algos::implicit_gemm::Mode\)1, (128|96), 2, \(fastconv::algos::implicit_gemm::persistent::Source\)": (
        "class tf32: counters of the loop over tiles parked, none within the loop over steps"
    ),
    r"implicit_gemm::persistent::convolve<fastconv::algos::implicit_gemm::persistent::Shape<(__half|__nv_bfloat16), "
    r"\(fastconv::algos::implicit_gemm::Mode\)[23], (128, 2|32, 1), ": (
        "one or two values of the loop over tiles parked, none within the loop over steps"
    ),
    r"implicit_gemm::few_channels::convolve<fastconv::algos::implicit_gemm::few_channels::Shape<float, 3, [468]>": (
        "a few values of the loop over tiles parked, stored in front of the loop over steps and loaded behind it"
    ),
    r"winograd_fused::split::convolve<.*Variant\{1, (true|false), \(fastconv::StoreMode\)0, 1, [12], 1, false\}": (
        "residuals, leaky ReLU, SiLU: three of the transforming warps' 48 registers parked, a load and a store for a "
        "row of tiles; the kernel of plain epilogues has none"
    ),
    r"winograd_fused::single::convolve<(float|__half|__nv_bfloat16), 1, ": (
        "narrow work tiles, 168 sums beside 36 registers of filters: values of the loop over work tiles parked, none "
        "within the loops over products or over the tiles of a row"
    ),
    r"winograd_fused::single::convolve<(__half|__nv_bfloat16), 3, ": (
        "packed columns: values of the loop over work tiles parked, none within the loops over products or tiles"
    ),
    r"winograd_staged::input_transform_nhwc<(__half|__nv_bfloat16), [24], "
    r"\(fastconv::algos::winograd_staged::Mode\)[23], 1>": (
        "odd numbers of channels on sm_80: ptxas parks one or two values, outside the inner loop, for a third block; "
        "a bound on the blocks instead would cost the sm_90a kernels occupancy"
    ),
    r"winograd_staged::input_transform_nhwc<float, 2, \(fastconv::algos::winograd_staged::Mode\)1, 1>": (
        "one value parked in the sm_90a code, which Hopper leaves to input_transform_groups"
    ),
    r"winograd_megakernel::ffma::convolve<": (
        "sm_80 alone: one or two values parked beside the products; sm_90a has none, and is the one that was measured"
    ),
    r"(implicit_gemm::wgrad::convert_tiles<float, 2>|winograd_staged::filter_transform<float, 4, "
    r"\(fastconv::algos::winograd_staged::Mode\)1>)": (
        "sm_80 alone: conversions and packing beside the products, not the products"
    ),
    r"direct_tiled::depthwise::pairs::convolve<(float, 3, 2|(float|__half|__nv_bfloat16), [57], )": (
        "one to six words of a strip (addresses, which columns are inside) parked, loaded once for a row of outputs, "
        "in front of its products or behind them"
    ),
    r"direct_tiled::few_filters::convolve_nhwc<(float|__half|__nv_bfloat16), 3, [34]>": (
        "sm_80 alone: five words of a task, for the writing of its outputs, parked around the loop over channels, none "
        "within it; sm_90a, which was measured, has none"
    ),
    r"(implicit_gemm::persistent::pack_filters<float, \(fastconv::algos::implicit_gemm::Mode\)0>"
    r"|winograd_megakernel::wgmma::pack_filters<float>)": (
        "one value that waits for a loop's end (the filter's exponent; how many elements are compared by fours): a "
        "store and a load in a thread's life, outside of every loop"
    ),
    r"direct_tiled::wgrad::.*sum_nhwc<": (
        "sm_80 alone: one or two values of the loop over strips parked; sm_90a, which was measured, has none"
    ),
    r"implicit_gemm::portable::convolve<fastconv::algos::implicit_gemm::portable::Shape<float, 3, 8, false>": (
        "the portable kernel where channels are no vectors: four to eight values parked, beside element-wise loads"
    ),
}


# Kernels that are written for wgmma, as a regular expression on the demangled name.
WGMMA = (
    r"(implicit_gemm::(persistent|single_tile)|winograd_fused::(split|single)|winograd_megakernel::wgmma)::convolve<"
    r"|wgrad::multiply_pixels<|multiply_pointwise<|winograd_staged::gemm::.*multiply<"
)


# Those whose loops may load behind their products: in NCHW, and where rows are no whole vectors, the end decides.
LATE = r"winograd_fused::split::convolve<.*Variant\{1, (true|false), \(fastconv::StoreMode\)[12], "


@dataclass(frozen=True)
class Kernel:
    architecture: str  # sm_90a
    name: str  # mangled
    registers: int
    stack: int  # bytes per thread
    shared: int  # bytes per block, static
    local: int  # bytes per thread

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0


def parse(text: str) -> list[Kernel]:
    """Reads the output of `cuobjdump -res-usage`."""
    kernels = []
    architecture, name = "?", ""
    for line in text.splitlines():
        if match := re.search(r"\barch\s*=\s*(\S+)", line):
            architecture = match.group(1)
        elif match := re.match(r"\s*Function\s+(.+?):\s*$", line):
            name = match.group(1)
        elif "REG:" in line and name:
            values = {key: int(value) for key, value in re.findall(r"(\w+(?:\[\d+\])?):(\d+)", line)}
            kernels.append(Kernel(architecture, name, values.get("REG", 0), values.get("STACK", 0),
                                  values.get("SHARED", 0), values.get("LOCAL", 0)))  # fmt: skip
            name = ""
    return kernels


@dataclass
class Code:
    """What a kernel's machine code says of its warpgroup matrix products, and of its wait for the kernel before."""

    name: str  # mangled
    products: int = 0  # HGMMA
    waits: int = 0
    constants: int = 0  # loads of them so far: LDG.CONSTANT
    early_constants: int = 0  # in front of the first wait for the kernel before: ACQBULK
    in_series: bool = False
    late_loads: int = 0  # of loops over products, behind the wait for all of these
    events: list[tuple[int, str]] = field(
        default_factory=list
    )  # (address, kind) of products, of such waits, and of loads

    def add(self, address: int, instruction: str) -> None:
        if " HGMMA" in instruction:
            self.products += 1
            self.events.append((address, "p"))
        elif "WARPGROUP.DEPBAR" in instruction:
            self.waits += 1
            if "gsb0, 0x0" in instruction:
                self.events.append((address, "w"))
        elif " LDG" in instruction:
            self.constants += ".CONSTANT" in instruction
            self.events.append((address, "l"))
        elif " ACQBULK" in instruction and not self.in_series:
            self.in_series, self.early_constants = True, self.constants
        elif (match := re.search(r" BRA\S* .*?(0x[0-9a-f]+)", instruction)) and int(match.group(1), 16) <= address:
            self.end_loop(int(match.group(1), 16))

    def end_loop(self, begin: int) -> None:
        """The innermost loop with products counts: what is known of it is forgotten then."""
        kinds = "".join(kind for address, kind in self.events if address >= begin)
        if "p" in kinds:
            products, _, behind = kinds.rpartition("w")
            self.late_loads += 0 if "p" in behind or "p" not in products else behind.count("l")
            self.events.clear()

    def fault(self) -> str | None:
        if self.products == 0:
            return "no HGMMA"
        return f"serialised: {self.waits} waits for {self.products} HGMMA" if self.waits >= self.products else None


def parse_sass(lines: Iterable[str]) -> list[Code]:
    """Reads the output of `cuobjdump -sass`."""
    kernels: list[Code] = []
    for line in lines:
        if match := re.match(r"\s*Function\s*:\s*(\S+)", line):
            kernels.append(Code(match.group(1)))
        elif kernels and (match := re.match(r"\s*/\*([0-9a-f]+)\*/(.*)", line)):
            kernels[-1].add(int(match.group(1), 16), match.group(2))
    return kernels


def report_products(kernels: list[Code]) -> list[str]:
    """Prints and returns a line per kernel for wgmma whose products are missing or serialised."""
    named = zip(kernels, demangle([kernel.name for kernel in kernels]), strict=True)
    faults = [f"{fault}  {name}" for kernel, name in named if re.search(WGMMA, name) and (fault := kernel.fault())]
    for fault in faults:
        print(fault)
    return faults


def report_loads(kernels: list[Code]) -> list[str]:
    """Prints and returns a line per kernel that loads constants before it waits for the kernel before, or what it
    multiplies next behind its wait for products."""
    wrong = [kernel for kernel in kernels if kernel.early_constants or kernel.late_loads]
    faults = []
    for kernel, name in zip(wrong, demangle([kernel.name for kernel in wrong]), strict=True):
        if kernel.early_constants:
            faults.append(f"{kernel.early_constants} loads of constants before its wait  {name}")
        if kernel.late_loads and not re.search(LATE, name):
            faults.append(f"{kernel.late_loads} loads behind the products of a loop  {name}")
    for fault in faults:
        print(fault)
    return faults


def find_cuobjdump() -> str | None:
    """That of CUDA_HOME, the PATH, /usr/local/cuda, or of the triton package that comes with torch."""
    home = os.environ.get("CUDA_HOME")
    triton = find_spec("triton")
    folders = triton.submodule_search_locations if triton else None
    candidates = [
        f"{home}/bin/cuobjdump" if home else "",
        "cuobjdump",
        "/usr/local/cuda/bin/cuobjdump",
        *(f"{folder}/backends/nvidia/bin/cuobjdump" for folder in folders or []),
    ]
    return next((path for path in map(shutil.which, filter(None, candidates)) if path), None)


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    result = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def report(kernels: list[Kernel], verbose: bool) -> list[str]:
    """Prints the table; returns a line per kernel that spills and is not allowed to."""
    found = []
    for kernel, name in sorted(zip(kernels, demangle([kernel.name for kernel in kernels]), strict=True),
                               key=lambda pair: (pair[1], pair[0].architecture)):  # fmt: skip
        excused = any(re.search(pattern, name) for pattern in ALLOWED)
        line = (f"{kernel.architecture:>8} {kernel.registers:4d} registers {kernel.stack:5d} B stack "
                f"{kernel.local:5d} B local {kernel.shared:6d} B shared  {name}")  # fmt: skip
        if kernel.spills and not excused:
            found.append(line)
        if verbose or kernel.spills:
            print(line)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", nargs="?", type=Path, default=LIBRARY)
    parser.add_argument("--verbose", action="store_true", help="list every kernel, not only those that spill")
    arguments = parser.parse_args()
    tool = find_cuobjdump()
    if tool is None:
        print("check_sass: skipped, no cuobjdump in CUDA_HOME, PATH, /usr/local/cuda or the triton package")
        return 0
    if not arguments.library.is_file():
        print(f"check_sass: {arguments.library} does not exist; build first")
        return 1
    result = subprocess.run([tool, "-res-usage", str(arguments.library)], capture_output=True, text=True, check=False)
    if result.returncode != 0 or "does not contain device code" in result.stdout + result.stderr:
        print(f"check_sass: skipped, no GPU code in {arguments.library}: {result.stderr.strip()}")
        return 0
    kernels = parse(result.stdout + result.stderr)
    if not kernels:
        print(f"check_sass: cuobjdump named no kernel of {arguments.library}")
        return 1
    found = report(kernels, arguments.verbose)
    most = max(kernel.registers for kernel in kernels)
    print(f"check_sass: {len(kernels)} kernels, at most {most} registers, {len(found)} with a stack or local memory")
    if any(kernel.architecture == "sm_90a" for kernel in kernels):
        command = [tool, "-sass", "-arch", "sm_90a", str(arguments.library)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            code = parse_sass(process.stdout or ())
        faults, loads = report_products(code), report_loads(code)
        users, series = sum(kernel.products > 0 for kernel in code), sum(kernel.in_series for kernel in code)
        print(f"check_sass: {users} kernels with HGMMA, {len(faults)} without theirs or serialised")
        print(f"check_sass: {series} kernels wait for the one before; {len(loads)} load too early or too late")
        found += faults + loads
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

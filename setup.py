"""Builds two libraries with ninja, incrementally, in build/ninja:

fastconv/libfastconv.so   the operators and kernels; LibTorch's stable ABI, so one file serves torch 2.10 and later
fastconv/_C.*.so          the planner (pybind11); knows neither torch nor CUDA

and notes in fastconv/build.json the versions that they were built with, and the digest of the operators' library.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "tools" / "build"))
import python_version  # noqa: E402, F401  (ends a build for a Python that is too old)
from toolchain import DEFAULT_ARCHITECTURES, architecture_flags, cudart_static, find_nvcc, wants_cuda  # noqa: E402

CSRC = "../../csrc"  # from build/ninja: a checkout that is moved or copied stays built
OPERATORS, VERSIONS = "libfastconv.so", "build.json"  # beside the planner
PLANNER = [
    path for part in ("core/*", "plan/*", "winograd/*", "algos/**/algo") for path in ROOT.glob(f"csrc/{part}.cpp")
]
CUDA_LAYERS = ("algos", "device", "studies")
BINDINGS = sorted(ROOT.glob("csrc/bindings/*.cpp"))
CXX = os.environ.get("CXX", "g++")
CXX_FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas"
NVCC_FLAGS = "-std=c++20 -O3 -Xcompiler=-fPIC,-fvisibility=hidden --expt-relaxed-constexpr --threads=1"
RULES = """
rule cxx
  description = c++ $out
  command = {cxx} -MMD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule nvcc
  description = nvcc $out
  command = {nvcc} -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  description = link $out
  command = {cxx} -shared $in -o $out $flags
"""


def ninja_file(module: str, operators: str) -> str:
    torch = find_torch()
    import pybind11

    if shutil.which(CXX.split()[0]) is None:
        raise SystemExit(f"the C++ compiler {CXX!r} was not found; install g++ (11 or later), or name another in CXX")
    nvcc = find_nvcc() if wants_cuda() else None
    if nvcc is None and os.environ.get("FASTCONV_CUDA") == "1":
        raise SystemExit(
            "FASTCONV_CUDA is 1, but no nvcc was found in CUDA_HOME, PATH, /usr/local/cuda or site-packages"
        )
    architectures = os.environ.get("FASTCONV_CUDA_ARCHS", DEFAULT_ARCHITECTURES) if nvcc else ""
    sources = sorted({*PLANNER, *ROOT.glob("csrc/algos/**/*.cpp"), *ROOT.glob("csrc/ops/*.cpp")})
    if nvcc:
        sources += sorted(path for part in CUDA_LAYERS for path in ROOT.glob(f"csrc/{part}/**/*.cu"))
    else:
        sources = [path for path in sources if not path.stem.endswith("_cuda")]
    common = f"{CXX_FLAGS} -I{CSRC}"
    if nvcc:
        common += f" -isystem {nvcc.parent.parent}/include -DFASTCONV_WITH_CUDA"
    flags_of_layer = {
        # -O1: nothing but glue, and a quarter less to compile.
        "bindings": f"{common} -O1 -isystem {pybind11.get_include()} -isystem {sysconfig.get_path('include')} "
        f"-DFASTCONV_CUDA_ARCHITECTURES='\"{architectures}\"' -DFASTCONV_CUDA_COMPILER='\"{version_of(nvcc)}\"'",
        "ops": f"{common} -isystem {torch}/include -isystem {torch}/include/torch/csrc/api/include "
        f"-DTORCH_TARGET_VERSION=0x020a000000000000 -DUSE_CUDA -DFASTCONV_CUDA_ARCHITECTURES='\"{architectures}\"'",
    }
    nvcc_flags = f"{NVCC_FLAGS} {' '.join(architecture_flags(architectures)) if nvcc else ''} -I{CSRC}"
    # A CUDA torch's libtorch.so pulls in the CUDA symbols, but only if the linker keeps it.
    link_torch = f"{link_cxx_runtime()} -L{torch}/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -Wl,--as-needed -ldl"
    if nvcc:
        link_torch += f" -L{cudart_static(nvcc)} -lcudart_static -lrt -lpthread"
    lines = [RULES.format(cxx=CXX, nvcc=nvcc or "nvcc")]
    objects = {}
    # Ninja starts them in this order. Those that take long come first, so that cores have work until the end.
    for source in sorted([*sources, *BINDINGS], key=lambda path: (path.suffix != ".cu", path not in BINDINGS)):
        name = source.relative_to(ROOT / "csrc").with_suffix(source.suffix + ".o")
        objects[source] = f"obj/{name}"
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        flags = nvcc_flags if rule == "nvcc" else flags_of_layer.get(name.parts[0], f"{CXX_FLAGS} -I{CSRC}")
        lines.append(f"build obj/{name}: {rule} {CSRC}/{source.relative_to(ROOT / 'csrc')}\n  flags = {flags}")
    planner = " ".join(objects[source] for source in [*PLANNER, *BINDINGS])
    lines.append(f"build {module}: link {planner}")
    lines.append(f"build {operators}: link {' '.join(objects[s] for s in sources)}\n  flags = {link_torch}")
    return "\n".join(lines) + f"\ndefault {module} {operators}\n"


def find_torch() -> Path:
    """Its folder. Found, not imported: only headers and libraries are needed."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"torch is not installed for {sys.executable}, and its headers are needed to build; `pip install .` "
            "without --no-build-isolation brings it"
        )
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 10):
        raise SystemExit(f"torch is {version('torch')}; fastconv is built with the stable C++ headers of 2.10 or later")
    return Path(spec.submodule_search_locations[0])


def link_cxx_runtime() -> str:
    """Flags that link libstdc++.so: torch's exceptions pass through our frames and ours through torch's, and a copy of
    the library inside ours would read the process's locales as its own. Where a compiler finds the archive alone, its
    shared library is named by its file."""
    compiler = CXX.split()
    find = lambda name: subprocess.run(  # noqa: E731
        [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if Path(find("libstdc++.so")).is_absolute() or not Path(find("libstdc++.a")).is_absolute():
        return "-shared-libgcc"
    runtime = Path(find("libstdc++.so.6"))
    if not runtime.is_absolute():
        cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
        found = [
            line.split("=>")[1].strip() for line in cache.splitlines() if line.strip().startswith("libstdc++.so.6 ")
        ]
        if not found:
            raise SystemExit(f"{CXX} links libstdc++ as an archive alone; its shared library is needed: libstdc++.so.6")
        runtime = Path(found[0])
    return f"-nostdlib++ -shared-libgcc {runtime}"


def require_shared_runtime(library: Path) -> None:
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    if "libstdc++.so.6" not in needed:
        raise SystemExit(
            f"{library} has a libstdc++ of its own, with which PyTorch's exceptions end the process: link the shared "
            f"one (CXX={CXX!r}, LDFLAGS and the compiler's specs must not ask for -static-libstdc++)"
        )


def version_of(nvcc: Path | None) -> str:
    if nvcc is None:
        return ""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return text.strip().splitlines()[-1]


class NinjaBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        module = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = ROOT / "build" / "ninja"
        build.mkdir(parents=True, exist_ok=True)
        text = ninja_file(module.name, OPERATORS)
        path = build / "build.ninja"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        # The same one whoever calls: two versions do not read each other's record, and each would compile everything.
        ninja = [sys.executable, "-m", "ninja"] if find_spec("ninja") else [shutil.which("ninja") or "ninja"]
        # A build that is killed can damage ninja's record of headers. What ninja then recovers of it may be wrong, and
        # leave objects as they are that need compiling: better none, and everything is compiled.
        record = subprocess.run([*ninja, "-C", str(build), "-t", "deps"], capture_output=True, text=True)
        if "recovering" in record.stderr:
            (build / ".ninja_deps").unlink(missing_ok=True)
        jobs = os.environ.get("MAX_JOBS")
        subprocess.run([*ninja, "-C", str(build), *(["-j", jobs] if jobs else [])], check=True)
        database = subprocess.run([*ninja, "-C", str(build), "-t", "compdb"], capture_output=True, check=True).stdout
        (ROOT / "compile_commands.json").write_bytes(database)
        require_shared_runtime(build / "libfastconv.so")
        # Copied: setuptools builds an editable install in a new folder each time, and ninja would link again for it.
        noted = {"torch": version("torch"), "libc": os.confstr("CS_GNU_LIBC_VERSION")}
        noted["digest"] = sha256((build / OPERATORS).read_bytes()).hexdigest()
        (build / VERSIONS).write_text(json.dumps(noted))
        for name in (module.name, OPERATORS, VERSIONS):
            replace(build / name, module.parent / name)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        for name in (OPERATORS, VERSIONS):
            replace(Path(self.build_lib) / "fastconv" / name, ROOT / "fastconv" / name)


def replace(source: Path, target: Path) -> None:
    """Copies to a new file: the old one may be mapped into a process that runs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copy2(source, target)


setup(ext_modules=[Extension("fastconv._C", sources=[])], cmdclass={"build_ext": NinjaBuild})

"""Finds nvcc and reads the build's environment variables. No dependency: the build backend imports it first."""

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

DEFAULT_ARCHITECTURES = "90a;80+PTX"
SYSTEM_NVCC = Path("/usr/local/cuda/bin/nvcc")


def wants_cuda() -> bool:
    """FASTCONV_CUDA: `auto` (the default) and `1` build the GPU code, `0` builds for the CPU alone."""
    value = os.environ.get("FASTCONV_CUDA", "auto")
    if value not in ("auto", "0", "1"):
        raise SystemExit(f"FASTCONV_CUDA is {value!r}; expected auto, 0 or 1")
    return value != "0"


def find_nvcc() -> Path | None:
    """The nvcc to use: $CUDA_HOME's; without one the PATH's, /usr/local/cuda's, or the nvidia-cuda-nvcc package's."""
    home = os.environ.get("CUDA_HOME")
    if home:
        return _nvcc_of(Path(home))
    on_path = shutil.which("nvcc")
    # What can be imported, not the interpreter's site-packages: an isolated build has its packages elsewhere.
    nvidia = find_spec("nvidia")
    folders = map(Path, (nvidia and nvidia.submodule_search_locations) or [])
    candidates = [
        *([Path(on_path).resolve()] if on_path else []),
        SYSTEM_NVCC,
        *(nvcc for folder in folders for nvcc in sorted(folder.glob("cu*/bin/nvcc"), reverse=True)),
    ]
    return next((path for path in candidates if path.is_file() and _is_complete(path)), None)


def _nvcc_of(home: Path) -> Path:
    """That of CUDA_HOME, which is an order, not a hint."""
    nvcc = home / "bin" / "nvcc"
    if not home.is_dir():
        missing = "does not exist"
    elif not nvcc.is_file():
        missing = "has no bin/nvcc"
    elif not _is_complete(nvcc):
        missing = "lacks cuda_runtime.h or libcudart_static.a"
    else:
        return nvcc
    raise SystemExit(
        f"CUDA_HOME is {str(home)!r}, which {missing}; expected a CUDA Toolkit. Unset it to take another nvcc, or set "
        "FASTCONV_CUDA=0 to build for the CPU alone"
    )


def _is_complete(nvcc: Path) -> bool:
    root = nvcc.parent.parent
    folders = ("include", "targets/x86_64-linux/include")
    headers = any((root / folder / "cuda_runtime.h").is_file() for folder in folders)
    return headers and cudart_static(nvcc) is not None


def cudart_static(nvcc: Path) -> Path | None:
    """The folder of libcudart_static.a that belongs to this nvcc."""
    root = nvcc.parent.parent
    folders = [root / name for name in ("lib64", "lib", "targets/x86_64-linux/lib", "lib/x86_64-linux-gnu")]
    return next((folder for folder in folders if (folder / "libcudart_static.a").is_file()), None)


def architecture_flags(architectures: str) -> list[str]:
    """nvcc's -gencode flags for a list like `90a;80+PTX`, or `compute_90a` for PTX without machine code."""
    flags = []
    for entry in architectures.replace(",", ";").strip("; ").split(";"):
        entry = entry.strip()
        found = re.fullmatch(r"(compute_)?([0-9]+[af]?)(\+PTX)?", entry)
        if not found:
            raise SystemExit(f"FASTCONV_CUDA_ARCHS has {entry!r}; expected entries like 90a, 80, 80+PTX or compute_90a")
        alone, number, ptx = found.groups()
        if not alone:
            flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if alone or ptx:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags

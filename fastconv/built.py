"""The two libraries of this folder: whether they are here, and why they cannot be loaded.

The package imports this module first. It loads the planner; `fastconv.ops` loads the operators in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OPERATORS = FOLDER / "libfastconv.so"
OLDEST_TORCH = (2, 10)


def version() -> str:
    """Of the package."""
    try:
        return metadata.version("fastconv")
    except metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return "0.1.0"


def built_with() -> dict[str, str]:
    """What setup.py noted beside the libraries: versions of "torch" and "libc", and the SHA-256 "digest" of the
    operators' library. Empty if it noted nothing."""
    try:
        return dict(json.loads((FOLDER / "build.json").read_text()))
    except (OSError, ValueError):
        return {}


def digest() -> str:
    """Of the operators' library. Noted when it was built: reading it takes half a second of compiled code's start."""
    return built_with().get("digest") or hashlib.sha256(OPERATORS.read_bytes()).hexdigest()


def require() -> None:
    """Raises ImportError, saying what to do, if a library is missing or torch is too old for them."""
    if not (OPERATORS.exists() and any((FOLDER / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)):
        raise ImportError(_why_missing())
    import torch

    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is not None and tuple(map(int, found.groups())) < OLDEST_TORCH:
        raise ImportError(
            f"fastconv needs torch {'.'.join(map(str, OLDEST_TORCH))} or later; this is torch {torch.__version__} in "
            f"{Path(torch.__file__).parent}, and fastconv was built with {_noted('torch')}. Install a newer torch"
        )


@contextlib.contextmanager
def loading(library: str) -> Iterator[None]:
    """An error of the dynamic loader inside becomes an ImportError that names both sides' versions and the remedy."""
    try:
        yield
    except (ImportError, OSError) as error:
        import torch

        reason: BaseException = error
        while reason.__cause__ is not None:  # torch says that it could not; the loader says why
            reason = reason.__cause__
        raise ImportError(
            f"{FOLDER / library} cannot be loaded: {reason}. It was built with {_noted('torch')} on {_noted('libc')}; "
            f"running are torch {torch.__version__} on {_libc()}. Build it again here (`pip install "
            "--no-build-isolation .` in the source tree), or install the versions that it was built with"
        ) from error


def _why_missing() -> str:
    build = f"`python setup.py build_ext --inplace` in {FOLDER.parent}"
    for other in (Path(entry or os.curdir).resolve() / FOLDER.name for entry in sys.path):
        if other != FOLDER and (other / OPERATORS.name).exists():
            return (
                f"fastconv is imported from {FOLDER}, a source tree that is not built, which hides the fastconv "
                f"installed in {other}. Run Python from another folder than {FOLDER.parent}, or build the tree: {build}"
            )
    planners = sorted(path.name for path in FOLDER.glob("_C.*.so"))
    if planners and OPERATORS.exists():
        return (
            f"fastconv in {FOLDER} is built for another Python ({', '.join(planners)}); this is "
            f"{platform.python_version()}, which would load _C{EXTENSION_SUFFIXES[0]}. Build it with {build}"
        )
    missing = OPERATORS if not OPERATORS.exists() else FOLDER / f"_C{EXTENSION_SUFFIXES[0]}"
    return (
        f"fastconv is not built: {missing} does not exist. Build it with `pip install .`, or in a checkout with {build}"
    )


def _noted(what: str) -> str:
    version = built_with().get(what)
    if version is None:
        return f"an unknown {what}"
    return version if what == "libc" else f"{what} {version}"


def _libc() -> str:
    """The C library that runs, as setup.py names the one that it builds with."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "an unknown libc"
    except (AttributeError, ValueError):
        return "an unknown libc"


require()
with loading("_C"):
    importlib.import_module("fastconv._C")

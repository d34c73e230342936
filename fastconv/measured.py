"""What `fastconv.tune` measured: the choices that `algorithm="auto"` takes, and the file that keeps them.

The file is ``choices.json`` in the folder FASTCONV_CACHE_DIR, by default the user's cache folder::

    {"schema": 1, "choices": [{"device": "NVIDIA H200, sm_90", "problem": "N64 C64 ... nhwc float32 fp32",
                               "pass": "forward", "algorithm": "winograd_fused",
                               "us": {"winograd_fused": 65.2, "torch": 209.0}, "fastconv": "0.1.0", "torch": "2.11.0"}]}

The problem is the forward convolution's in every pass; an entry without a pass is one of the forward's. The file is
read once, when fastconv is imported, and never raises there: what cannot be used is left out, with a warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fastconv import _C, built, ops, selection, settings

SCHEMA = 1
Key = tuple[str, str, str]  # device (`device_name`), problem (`repr` of the planner's), pass


@dataclass(frozen=True)
class Choice:
    """The algorithm that was the fastest, by its name in `fastconv.selection`, and the median microseconds of all that
    were measured."""

    device: str
    problem: str
    algorithm: str
    us: dict[str, float]
    pass_: str = "forward"

    @property
    def key(self) -> Key:
        return self.device, self.problem, self.pass_


_choices: dict[Key, Choice] = {}
_changing = threading.Lock()  # of them, here and at the planner's
times_forgotten = 0


def choices() -> Mapping[Key, Choice]:
    """What `auto` takes in this process, of any device."""
    return MappingProxyType(_choices)


def device_name(device: torch.device) -> str:
    """The device as choices name it: those of another CPU, thread count or GPU do not count."""
    return _C.measured_device(ops.device_info(device))


def path() -> Path | None:
    """The file; None if FASTCONV_CACHE_DIR is empty: nothing is read, and what is measured ends with the process."""
    folder = settings.cache_dir
    if folder is None:
        import platformdirs

        folder = platformdirs.user_cache_dir("fastconv", appauthor=False)
    return Path(os.path.expanduser(folder)) / "choices.json" if folder else None


def load() -> None:
    """Takes over what the file says."""
    try:
        file = path()
        if file is None:
            return
        found, complaint = _read(file)
    except FileNotFoundError:
        return
    except OSError as error:
        found, complaint = {}, f"it cannot be read ({error.strerror or error})"
    if complaint:
        warnings.warn(
            f"{file}: {complaint}; those choices are not used. `fastconv tune` measures anew", UserWarning, stacklevel=2
        )
    if found:
        _activate(found)


def add(entries: Iterable[Choice], kept: bool = True) -> None:
    """Makes these the choices for their problems, here and, unless they are not `kept`, in the file, which keeps what
    others have written meanwhile.

    Raises OSError if the file cannot be written; here they count all the same."""
    new = {entry.key: entry for entry in entries}
    with _changing:
        _activate(_choices | new)
    if new and kept:
        _edit(lambda known: known.update(new))


def forget(device: str) -> int:
    """Removes the choices of one device, here and in the file; returns how many there were."""
    global times_forgotten
    gone = {key for key in _choices if key[0] == device}

    def remove(kept: dict[Key, Choice]) -> None:
        for key in [key for key in kept if key[0] == device]:
            gone.add(key)
            del kept[key]

    file = path()
    if file is not None and file.exists():
        _edit(remove)
    with _changing:
        _activate({key: entry for key, entry in _choices.items() if key not in gone})
        times_forgotten += 1
    return len(gone)


def require_writable() -> None:
    """OSError naming the folder and FASTCONV_CACHE_DIR if the file could not be written."""
    file = path()
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise OSError(
            f"FASTCONV_CACHE_DIR is '{file.parent}'; expected a folder that can be written, or '' to keep nothing "
            f"({error.strerror or error})"
        ) from error


def _activate(entries: dict[Key, Choice]) -> None:
    global _choices
    _choices = entries
    ops.set_measured({key: entry.algorithm for key, entry in entries.items()})


def _edit(change: Callable[[dict[Key, Choice]], None]) -> None:
    """Reads, changes and replaces the file, one process at a time. What cannot be used does not survive that."""
    file = path()
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file.parent):
        kept: dict[Key, Choice] = {}
        with contextlib.suppress(FileNotFoundError):
            kept, _ = _read(file)
        change(kept)
        origin = {"fastconv": built.version(), "torch": torch.__version__}
        rows = ",\n  ".join(json.dumps(_row(entry) | origin) for entry in kept.values())
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(f'{{"schema": {SCHEMA}, "choices": [\n  {rows}\n]}}\n', encoding="utf-8")
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


def _row(entry: Choice) -> dict[str, Any]:
    return {name.rstrip("_"): value for name, value in asdict(entry).items()}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: then the later of two writers wins
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(file: Path) -> tuple[dict[Key, Choice], str]:
    """The choices that can be used, and what is wrong with the others; "" if nothing is."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return {}, f"it is not JSON ({error})"
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        return {}, f"its schema is not {SCHEMA}"
    rows = document.get("choices")
    if not isinstance(rows, list):
        return {}, "it has no list of choices"
    found: dict[Key, Choice] = {}
    wrong = Counter[str]()
    for row in rows:
        complaint = _complaint(row)
        if complaint:
            wrong[complaint] += 1
        else:
            choice = Choice(row["device"], row["problem"], row["algorithm"], row["us"], row.get("pass", "forward"))
            found[choice.key] = choice
    return found, ", ".join(f"{count} of {len(rows)} {complaint}" for complaint, count in wrong.items())


def _complaint(row: Any) -> str:
    """Why an entry of the file cannot be used; "" if it can."""
    if not isinstance(row, dict):
        return "malformed"
    texts = [row.get(name) for name in ("device", "problem", "algorithm", "fastconv")]
    if not all(isinstance(text, str) and text and text.isprintable() for text in texts):
        return "malformed"
    us = row.get("us")
    if not isinstance(us, dict) or not all(isinstance(value, (int, float)) for value in us.values()):
        return "malformed"
    if row["fastconv"] != built.version():
        return f"measured with fastconv {row['fastconv']}"
    pass_ = row.get("pass", "forward")
    if pass_ not in selection.PASSES:
        return f"of an unknown pass {pass_!r}"
    return "" if selection.is_name(pass_, row["algorithm"]) else f"of an unknown algorithm '{row['algorithm']}'"

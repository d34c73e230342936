"""Checks the documents, without network: every relative link of a document leads to a file of the checkout and, with an
anchor, to a heading; every figure is shown somewhere; every path that a comment or a document names exists, but for the
frozen log, and so does every function that a document names; README and docs/performance.md stay as short as they are
meant to be."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("csrc", "fastconv", "benchmarks", "tests", "tools", "examples")
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".def", ".md"}
MAX_README_BYTES, MAX_PERFORMANCE_LINES = 8192, 250
LINK = re.compile(r"\]\(([^()\s]+)\)")
# A path from the root of the checkout, or a pattern of paths; what begins a string is the program's, not a reader's.
CITED = re.compile(
    rf"(?<![\w./\"{{-])(?:docs|{'|'.join(SOURCES)})/[\w./*-]*(?:\.(?:md|cuh|cu|h|cpp|py|def)\b|\w\.\*|\w\*)"
)
NAMED = re.compile(r"`([\w./-]+\.(?:cuh|cu|h|cpp|py|def))`")
FUNCTION = re.compile(r"`(?:[\w.:]*[.:])?(\w+)\(\)`")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """A document without its code, in which brackets mean nothing."""
    return re.sub(r"`[^`\n]*`", "``", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def documents(root: Path) -> list[Path]:
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    return sorted(found + [path for folder in SOURCES for path in root.glob(f"{folder}/**/*.md")])


def broken_links(root: Path) -> Iterator[str]:
    for path in documents(root):
        for target in LINK.findall(prose(path.read_text())):
            file, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            at = (path.parent / file).resolve() if file else path
            if not at.exists():
                yield f"{path.relative_to(root)}: {target} does not exist"
            elif root / "docs" in path.parents and root / "docs" not in at.parents:
                yield f"{path.relative_to(root)}: {target} is outside of docs/, where the site does not have it"
            elif anchor and anchor not in anchors(at.read_text()):
                yield f"{path.relative_to(root)}: {at.relative_to(root)} has no heading #{anchor}"


def hidden_figures(root: Path) -> Iterator[str]:
    shown = {target.rpartition("/")[2] for path in documents(root) for target in LINK.findall(path.read_text())}
    for path in sorted(root.glob("docs/figures/*")):
        if path.name not in shown:
            yield f"{path.relative_to(root)} is shown by no document"


def living_documents(root: Path) -> list[Path]:
    return [path for path in documents(root) if root / "docs/log" not in path.parents and path.name != "CHANGELOG.md"]


def wrong_citations(root: Path) -> Iterator[str]:
    sources = {path for folder in SOURCES for path in root.glob(f"{folder}/**/*") if path.suffix in SUFFIXES}
    for path in sorted(sources | set(living_documents(root))):
        if path.name != "test_documents.py":
            for line, text in enumerate(path.read_text().splitlines(), 1):
                for cited in CITED.findall(LINK.sub("", text)):
                    if not any(root.glob(cited)):
                        yield f"{path.relative_to(root)}:{line}: {cited} does not exist"


def wrong_names(root: Path) -> Iterator[str]:
    """A document may also name a file by as much of the end of its path as is clear there."""
    sources = [path.relative_to(root) for folder in SOURCES for path in root.glob(f"{folder}/**/*")]
    known = {"/".join(path.parts[first:]) for path in sources for first in range(len(path.parts))}
    known |= {path.name for path in root.glob("*.py")}
    for path in living_documents(root):
        for name in NAMED.findall(FENCE.sub("", path.read_text())):
            if name not in known and not CITED.search(f"`{name}`"):
                yield f"{path.relative_to(root)}: {name} does not exist"


def wrong_functions(root: Path) -> Iterator[str]:
    sources = [path for folder in SOURCES for path in root.glob(f"{folder}/**/*") if path.suffix in SUFFIXES - {".md"}]
    known = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    for path in living_documents(root):
        for name in FUNCTION.findall(FENCE.sub("", path.read_text())):
            if name not in known:
                yield f"{path.relative_to(root)}: the function {name} does not exist"


def lengths(root: Path) -> Iterator[str]:
    if (size := (root / "README.md").stat().st_size) > MAX_README_BYTES:
        yield f"README.md has {size} bytes; at most {MAX_README_BYTES}"
    if (lines := len((root / "docs/performance.md").read_text().splitlines())) > MAX_PERFORMANCE_LINES:
        yield f"docs/performance.md has {lines} lines; at most {MAX_PERFORMANCE_LINES}"


def problems(root: Path = ROOT) -> list[str]:
    checks = (broken_links, hidden_figures, wrong_citations, wrong_names, wrong_functions, lengths)
    return [problem for check in checks for problem in check(root)]


if __name__ == "__main__":
    found = problems()
    print("\n".join(found))
    sys.exit(bool(found))

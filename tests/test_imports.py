"""The imports of the two packages: no circle, wherever in a file they stand, and the product knows nothing of the
benchmarks."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fastconv", "benchmarks")


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of both packages."""
    found = {}
    for package in PACKAGES:
        for path in [*(root / package).rglob("*.pyi"), *(root / package).rglob("*.py")]:
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of `known` that a file names in any import statement. A package that is only on the way to one of its
    modules is not meant: `from fastconv import ops` is of fastconv.ops."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {full if (full := f"{base}.{alias.name}") in known else base for alias in node.names}
    return found & known.keys()


def circle(graph: dict[str, set[str]]) -> str | None:
    """One circle of a graph, as `a -> b -> a`; None if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules(ROOT)
    return {name: imported(name, path, known) for name, path in known.items()}


def test_no_circle(graph):
    assert circle(graph) is None


def test_the_product_knows_nothing_of_the_benchmarks(graph):
    of_product = {name: names for name, names in graph.items() if name.startswith("fastconv")}
    assert len(of_product) > 20
    # The command alone, which finds them at run time, by name.
    assert [name for name, names in of_product.items() if any(each.startswith("benchmarks") for each in names)] == []


def test_a_circle_is_found_wherever_its_imports_stand(tmp_path):
    folder = tmp_path / "fastconv"
    folder.mkdir()
    (folder / "__init__.py").write_text("from fastconv.a import x\n")
    (folder / "a.py").write_text("def f():\n    from fastconv import b\n")
    (folder / "b.py").write_text("if True:\n    from .a import x\n")
    known = modules(tmp_path)
    graph = {name: imported(name, path, known) for name, path in known.items()}
    assert graph == {"fastconv": {"fastconv.a"}, "fastconv.a": {"fastconv.b"}, "fastconv.b": {"fastconv.a"}}
    assert circle(graph) in ("fastconv.a -> fastconv.b -> fastconv.a", "fastconv.b -> fastconv.a -> fastconv.b")
    (folder / "b.py").write_text("import torch\n")
    assert circle({name: imported(name, path, known) for name, path in known.items()}) is None

"""The documents: links and figures are there, README is short, and the code that users copy from them runs."""

import functools
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func as boxed

from fastconv.compiler import inductor

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXAMPLES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if CODE.search(path.read_text())]

spec = importlib.util.spec_from_file_location("check_docs", ROOT / "tools" / "check_docs.py")
assert spec is not None
assert spec.loader is not None
check_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_docs)


def test_the_documents_have_no_broken_link_hidden_figure_or_wrong_citation():
    assert check_docs.problems() == []


def test_what_is_wrong_is_found(tmp_path):
    """The check itself: it names what does not exist, and only that."""
    (tmp_path / "docs/figures").mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "docs/figures/hidden.svg").touch()
    (tmp_path / "docs/figures/shown.svg").touch()
    (tmp_path / "csrc/a.h").write_text(
        '// docs/performance.md, docs/gone.md, csrc/*.h csrc/b*.h (csrc/c.*) "csrc/d.h"\nint g();\n'
    )
    (tmp_path / "docs/performance.md").write_text("# `A` title, here\n![x](figures/shown.svg) [out](../csrc/a.h)\n")
    (tmp_path / "README.md").write_text(
        "[a](docs/performance.md#a-title-here) [b](docs/performance.md#b) [c](docs/c.md) `[d](e)` [f](https://g)\n"
        "`csrc/a.h` `a.h` `b/a.h` `csrc/e.h` `c`\n`absent()` `d::g()`\n```\n`d.h`\n```\n"
    )
    assert [line.partition(" ")[2] for line in check_docs.problems(tmp_path)] == [
        "docs/performance.md has no heading #b",
        "docs/c.md does not exist",
        "../csrc/a.h is outside of docs/, where the site does not have it",
        "is shown by no document",
        "csrc/e.h does not exist",
        "docs/gone.md does not exist",
        "csrc/b*.h does not exist",
        "csrc/c.* does not exist",
        "b/a.h does not exist",
        "the function absent does not exist",
    ]
    (tmp_path / "README.md").write_text("x" * 9000)
    assert "README.md has 9000 bytes; at most 8192" in check_docs.problems(tmp_path)


@pytest.mark.parametrize("path", EXAMPLES, ids=[str(path.relative_to(ROOT)) for path in EXAMPLES])
@pytest.mark.usefixtures("cache_folder", "times")
def test_examples_run(path, tmp_path, monkeypatch):
    """One after the other in one namespace, as a reader would type them; what they write goes elsewhere."""
    if path.name == "diffusers.md" and not torch.cuda.is_available():
        # A decoder's graph as Inductor and the rewrites leave it: its code would be of PyTorch's operators alone.
        compile_fx = functools.partial(inductor.compile_fx, inner_compile=lambda graph, *_, **__: boxed(graph.forward))
        monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    names: dict[str, object] = {"__name__": path.stem}
    for code in CODE.findall(path.read_text()):
        exec(compile(code.replace("/tmp/", f"{tmp_path}/"), str(path), "exec"), names)

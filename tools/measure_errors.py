"""Prints the errors of every algorithm against float64, beside PyTorch's, as a Markdown table: the measured columns of
docs/concepts/numerics.md. `error`: relative L2, the worst over five shapes; `times PyTorch`: the worst ratio to
PyTorch's own error (the larger of its two layouts) on the same shape; `bias`: the signed bias of largest magnitude.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from harness import ALGORITHMS, CLASSES, OWN, conv2d, expected_error, make_case, reference, refusal, yardstick  # noqa: E402
from shapes import Shape  # noqa: E402

from fastconv import testing  # noqa: E402

# Enough outputs that no error is small by luck; short and long reductions.
SHAPES = [
    Shape(2, 3, 17, 17, 16, 3, 3, padding=(1, 1)),
    Shape(1, 64, 14, 14, 64, 3, 3, padding=(1, 1)),
    Shape(1, 512, 7, 7, 32, 3, 3, padding=(1, 1)),
    Shape(1, 256, 14, 14, 32, 1, 1),
    Shape(4, 32, 14, 14, 32, 1, 1, groups=32),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", nargs="?", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    print("| algorithm | class | expected (times PyTorch) | times PyTorch | error | bias |\n|---|---|---|---|---|---|")
    for algorithm in OWN:
        for cls in ALGORITHMS[algorithm]["accuracy"]:
            ratios, errors, multiple = [], [], 0.0
            for shape in SHAPES:
                if refusal(algorithm, shape, cls, "nchw", device):
                    continue
                case = make_case(shape, cls, "nchw", device)
                expected = reference(case)
                multiple = max(multiple, expected_error(algorithm, cls, shape, device))
                errors.append(testing.errors(conv2d(case, algorithm, cls), expected))
                ratios.append(errors[-1].relative_l2 / yardstick(case, cls).peer_errors().relative_l2)
            if ratios and cls in CLASSES:
                bias = max((error.bias for error in errors), key=abs)
                print(f"| `{algorithm}` | `{cls}` | {multiple:.2g} | {max(ratios):.2f} | "
                      f"{max(error.relative_l2 for error in errors):.1e} | {bias:+.0e} |")  # fmt: skip


if __name__ == "__main__":
    main()

"""The convolutions of many networks, to fit choices on and to judge them by: `problems.json`.

`python -m benchmarks.corpus.trace` writes the file from networks of torchvision, timm, diffusers,
segmentation-models-pytorch and of `definitions`; nothing is computed, and no weights are loaded. The rest reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("problems.json")
# What a row has beside n c h w k r s where it is not as usual.
DEFAULTS = {
    "stride_h": 1, "stride_w": 1, "pad_h": 0, "pad_w": 0, "dilation_h": 1, "dilation_w": 1, "groups": 1, "layers": 1,
}  # fmt: skip


def read(path: Path = PATH) -> list[dict[str, Any]]:
    """The rows with every field: n c h w k r s, DEFAULTS' (`layers`: in all its networks together), `networks` and
    `split`, "fit" or "judge". Each stands for the three passes of that convolution."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return [DEFAULTS | row for row in document["problems"]]

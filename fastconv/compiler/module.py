"""What `fastconv.compile` returns of a module. Imported when something is compiled: Dynamo takes a second to import."""

from __future__ import annotations

from typing import Any

from torch._dynamo import OptimizedModule


class CompiledModule(OptimizedModule):
    """`torch.compile`'s module, of which copies are made as it was."""

    def __reduce__(self) -> Any:
        return self.__dict__["_made"]

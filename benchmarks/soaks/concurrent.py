"""Work on several streams at once, beside a competing kernel, as a CUDA graph: how the soaks launch, and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def capture(works: Sequence[Callable[[], None]], noise_launches: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph in which each of `works` runs on a stream of its own, beside `noise_launches` matrix products on another.

    A work launches kernels and nothing else (it is captured). What it allocates belongs to the graph.
    """
    streams = [torch.cuda.Stream(device) for _ in range(len(works) + 1)]
    noise = torch.randn(1024, 1024, device=device)
    noise = noise @ noise  # the library is initialised before the capture, which does not allow it
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        root = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(root)
        for stream, work in zip(streams, works, strict=False):
            with torch.cuda.stream(stream):
                work()
        with torch.cuda.stream(streams[-1]):
            for _ in range(noise_launches):
                noise = (noise @ noise).tanh_()
        for stream in streams:
            root.wait_stream(stream)
    return graph


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A floating-point tensor of 16 or 32 bits as integers: NaN equals itself, 0 is not -0."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)

"""Real photographs for the demo and the benchmarks: the two that ship with scikit-learn, cut into as many as needed."""

import torch
from torch import Tensor

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, per channel, as torchvision's networks expect
STD = (0.229, 0.224, 0.225)


def photographs(count: int, size: int, seed: int = 0) -> Tensor:
    """A batch of `count` different square pictures: float32 [count, 3, size, size], on the CPU, normalised.

    Picture i is a crop of photograph i % 2 whose side, place and reflection depend on (seed, i) alone, resized with
    antialiasing; the first pictures of a larger batch are therefore those of a smaller one.
    Raises ImportError if scikit-learn or pillow is missing.
    """
    try:
        from sklearn.datasets import load_sample_images

        originals = [torch.tensor(image).permute(2, 0, 1) for image in load_sample_images().images]
    except ImportError as error:
        raise ImportError("the photographs need scikit-learn and pillow: pip install 'fastconv[bench]'") from error

    pictures = torch.empty(count, 3, size, size)
    for i in range(count):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + i)
        scale, top, left, reflect = torch.rand(4, generator=generator).tolist()
        original = originals[i % len(originals)]
        height, width = original.shape[1:]
        side = int(min(height, width) * (0.4 + 0.6 * scale))
        y, x = int(top * (height - side)), int(left * (width - side))
        crop = original[:, y : y + side, x : x + side].float() / 255
        crop = torch.nn.functional.interpolate(crop[None], (size, size), mode="bilinear", antialias=True)[0]
        pictures[i] = crop.flip(-1) if reflect < 0.5 else crop
    return (pictures - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)

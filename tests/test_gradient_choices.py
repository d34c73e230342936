"""Which gradients are PyTorch's on an H100, at batch 64: of both kinds on either side of what decides between them. The
times are those of benchmarks/results (docs/log/115-gradient-choices.md)."""

import itertools

import pytest

from fastconv import _C, selection
from fastconv.models.layers import SETS

LAYERS = {layer.layer: layer for layers in SETS.values() for layer in layers}
CLASSES = {"fp32": ("float32", "fp32"), "tf32": ("float32", "tf32"), "fp16": ("float16", "fp32")}


def h100():
    device = _C.h200_device()
    device.name, device.bandwidth_bytes_per_s, device.l2_bytes = "NVIDIA H100 80GB HBM3", 3.3e12, 50 << 20
    return device


def problem(name, cls, layout="nhwc"):
    layer, (dtype, precision) = LAYERS[name], CLASSES[cls]
    return _C.ConvProblem(
        64, layer.c, layer.h, layer.w, layer.k, layer.r, layer.s, stride=(layer.stride,) * 2,
        padding=(layer.padding,) * 2, dilation=(layer.dilation,) * 2, groups=layer.groups, dtype=dtype,
        precision=precision, layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cls", "method", "algorithm"),
    [
        # Half types: flipping and packing the filter costs more than an advantage on small maps.
        ("vgg1_2", "fp16", "phases", "winograd_fused"),
        ("yolo1", "fp16", "phases", "winograd_fused"),
        ("dense2", "fp16", "phases", "winograd_fused"),
        ("res3", "fp16", "torch", None),
        ("vgg5", "fp16", "torch", None),
        ("yolo5", "fp16", "torch", None),
        # 1x1 in half types: one product with the filter as it lies (docs/log/147-gradients-as-products.md).
        ("res1_in", "fp16", "phases", "im2col_gemm"),
        ("res4_out", "fp16", "phases", "im2col_gemm"),
        # 3 channels: with a stride the phases are filters of one convolution.
        ("resnet", "fp32", "together", "implicit_gemm"),
        ("alexnet1", "fp32", "together", "implicit_gemm"),
        ("densenet", "tf32", "together", "implicit_gemm"),
        ("vgg1_1", "fp32", "phases", "direct_tiled"),
        # 5x5 in FP32: an FFT does not care for the kernel's size, but for that of the tile.
        ("inception3", "fp32", "torch", None),
        ("alexnet2", "fp32", "phases", "implicit_gemm"),
        ("inception5", "fp32", "phases", "implicit_gemm"),
        # A stride: PyTorch's in TF32 takes no more products than the forward convolution, in FP32 arithmetic more.
        ("res2_down", "tf32", "torch", None),
        ("res4_down", "tf32", "torch", None),
        ("res2_short", "tf32", "torch", None),
        ("yolo1_down", "tf32", "torch", None),
        ("res2_down", "fp16", "torch", None),
        ("res2_down", "fp32", "phases", "implicit_gemm"),
        ("res2_short", "fp32", "phases", "implicit_gemm"),
        ("yolo1_down", "fp32", "together", "implicit_gemm"),
        # Groups: as the forward convolution of the same shape.
        ("resnext1", "fp32", "phases", "direct_tiled"),
        ("resnext1", "tf32", "torch", None),
        ("convnext1", "fp32", "phases", "direct_tiled"),
        ("convnext1", "fp16", "phases", "direct_tiled"),
        ("mobile3", "fp32", "torch", None),
        ("mobile2", "fp16", "torch", None),
    ],
)
def test_an_input_gradient_is_whichever_is_estimated_to_be_faster(name, cls, method, algorithm):
    choice = _C.choose_input_gradient("auto", problem(name, cls), h100())
    assert choice["method"] == method, choice["reason"]
    if method == "torch":
        assert choice["code"] == "cost"
    else:
        assert _C.choose(choice["algorithm"], choice["convolution"], h100())["algorithm"] == algorithm
        assert choice["flips"] is (algorithm != "im2col_gemm")


@pytest.mark.parametrize(("name", "cls"), [("vgg1_2", "fp16"), ("resnet", "fp32"), ("resnext1", "fp32")])
def test_what_was_measured_in_nhwc_alone_is_pytorchs_in_nchw(name, cls):
    choice = _C.choose_input_gradient("auto", problem(name, cls, "nchw"), h100())
    assert (choice["method"], choice["code"]) == ("torch", "layout")


@pytest.mark.parametrize("name", ["res2_down", "res4_down", "res2_short"])
def test_tf32_with_a_stride_is_pytorchs_in_nchw_too(name):
    choice = _C.choose_input_gradient("auto", problem(name, "tf32", "nchw"), h100())
    assert (choice["method"], choice["code"]) == ("torch", "cost")


def test_an_input_gradient_in_another_class_than_pytorchs_is_ours_however_few_its_channels():
    for name, layout in itertools.product(("resnet", "alexnet2", "resnext1", "mobile3"), ("nhwc", "nchw")):
        assert _C.choose_input_gradient("auto", problem(name, "fp32", layout), h100(), own=True)["method"] != "torch"


@pytest.mark.parametrize(
    ("name", "cls", "algorithm"),
    [
        # 3 channels: PyTorch's on the FP32 units in both classes of float32; ours unrolls, which pays with many taps.
        ("vgg1_1", "fp32", "torch"),
        ("vgg1_1", "tf32", "torch"),
        ("resnet", "fp32", "implicit_gemm"),
        ("alexnet1", "fp32", "implicit_gemm"),
        ("densenet", "tf32", "implicit_gemm"),
        # 5x5 in FP32: PyTorch's by an FFT, but where cuDNN takes Winograd's, beyond the class.
        ("alexnet2", "fp32", "implicit_gemm"),
        ("inception3", "fp32", "torch"),
        ("inception5", "fp32", "implicit_gemm"),
        # 1x1 on tensor cores: cuBLAS's product, but where ours takes fewer tiles.
        ("res1_in", "tf32", "im2col_gemm"),
        ("dense3_next", "tf32", "implicit_gemm"),
        ("res3_in", "tf32", "im2col_gemm"),
        ("dense1_in", "tf32", "im2col_gemm"),
        ("res1_in", "fp16", "im2col_gemm"),
        ("res1_in", "fp32", "implicit_gemm"),
    ],
)
def test_a_weight_gradient_is_whichever_is_estimated_to_be_faster(name, cls, algorithm):
    assert _C.choose_weight_gradient("auto", problem(name, cls), h100())["algorithm"] == algorithm


@pytest.mark.parametrize(
    ("cls", "n", "c", "size", "least", "most"),
    [
        # Measured on an H100, 64 images: 7e-5 and 2e-3 where a direct sum errs some 5e-7.
        ("fp32", 64, 64, 224, 50.0, 250.0), ("ieee", 64, 64, 224, 50.0, 250.0), ("fp32", 64, 8, 224, 1.0, 1.0),
        ("fp32", 1, 64, 7, 1.0, 4.0), ("tf32", 64, 64, 224, 1.0, 1.0),
    ],
)  # fmt: skip
def test_pytorchs_weight_gradient_in_fp32_may_be_winograds(cls, n, c, size, least, most):
    sizes = {"n": n, "c": c, "h": size, "w": size, "k": 192, "precision": cls, "layout": "nhwc"}
    errors = {}
    for r in (3, 5):
        its = _C.ConvProblem(**sizes, r=r, s=r, padding=(r // 2, r // 2))
        (row,) = (row for row in selection.candidates("backward_weight", its, h100()) if row["algorithm"] == "torch")
        assert row["auto_eligible"] == (row["expected_error"] <= (1.5 if cls == "fp32" else 4.0))
        errors[r] = row["expected_error"]
    assert least <= errors[3] <= most
    assert errors[5] >= errors[3]


@pytest.mark.parametrize(("precision", "dtype"), [("tf32", "float32"), ("fp32", "float32"), ("fp32", "float16")])
def test_what_a_1x1_input_gradient_takes_is_cheaper_by_its_own_cost(precision, dtype):
    """A product of the filter as it lies is not the convolution of the same name with the filter flipped."""
    device, taken = _C.h200_device(), set()
    for n, c, h, k in [
        (8, 64, 130, 256),
        (32, 32, 112, 96),
        (64, 64, 56, 256),
        (8, 512, 16, 2048),
        (32, 256, 128, 512),
    ]:
        problem = _C.ConvProblem(n, c, h, h, k, 1, 1, dtype=dtype, precision=precision, layout="nhwc")
        choice = _C.choose_input_gradient("auto", problem, device)
        taken.add(choice["method"])
        if choice["method"] == "torch":
            continue
        name = _C.choose(choice["algorithm"], choice["different"][0], device)["algorithm"]
        costs = {row["algorithm"]: row["cost_us"] for row in _C.input_gradients(problem, device)}
        assert costs[f"phases {name}"] < costs["torch"], problem
    assert "phases" in taken

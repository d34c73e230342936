"""Whole models of timm, torchvision, diffusers and transformers, small and with random weights: swapped and compiled,
on every device, against the same model in float64."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from layers import DEVICES, relative_error
from rewriting import compiled, on_a_gpu
from torch import Tensor, nn

import fastconv
from fastconv import ops
from fastconv.rewrites import Asked

pytestmark = pytest.mark.usefixtures("full_precision")


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    call: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x)


def _timm(name: str, **arguments: Any) -> Case:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=7, **arguments)

    return Case(make, (2, 3, 64, 64))


def _byob(name: str) -> Case:
    """A model of timm's built of blocks: its first two stages, with two blocks at most."""

    def short(stage: Any) -> Any:
        return stage[:2] if isinstance(stage, list) else dataclasses.replace(stage, d=min(stage.d, 2))

    def make() -> nn.Module:
        import timm
        from timm.models.byobnet import model_cfgs

        blocks = tuple(map(short, model_cfgs[name].blocks[:2]))
        return timm.create_model(name, pretrained=False, num_classes=7, blocks=blocks)

    return Case(make, (2, 3, 64, 64))


def _efficientnet() -> nn.Module:
    """Of each kind of EfficientNet-B0's blocks, with and without a sum behind it."""
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.efficientnet import EfficientNet

    stages = [["ds_r1_k3_s1_e1_c16_se0.25"], ["ir_r2_k3_s2_e6_c24_se0.25"], ["ir_r2_k5_s2_e6_c40_se0.25"]]
    return EfficientNet(decode_arch_def(stages), num_classes=7, num_features=320, stem_size=32, act_layer=nn.SiLU)


def _regnet() -> nn.Module:
    from timm.models.regnet import RegNet, RegNetCfg

    return RegNet(RegNetCfg(w0=24, wa=36, wm=1.7, group_size=8, depth=5), num_classes=7)


def _mobilenet() -> nn.Module:
    """Of each kind of MobileNetV3's blocks: with squeeze-and-excitation and without, ReLU and hard swish, a sum."""
    from torchvision.models.mobilenetv3 import InvertedResidualConfig as Block
    from torchvision.models.mobilenetv3 import MobileNetV3

    settings = [
        Block(16, 3, 16, 16, True, "RE", 2, 1, 1.0), Block(16, 3, 72, 24, False, "RE", 2, 1, 1.0),
        Block(24, 3, 88, 24, False, "RE", 1, 1, 1.0), Block(24, 5, 96, 40, True, "HS", 2, 1, 1.0),
        Block(40, 5, 240, 40, True, "HS", 1, 1, 1.0),
    ]  # fmt: skip
    return MobileNetV3(settings, last_channel=64, num_classes=7)


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=16, block_config=(3, 2), num_init_features=32, num_classes=7)


def _vae() -> nn.Module:
    from diffusers import AutoencoderKL

    blocks: Any = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4, layers_per_block=1, sample_size=32, **blocks
    )


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=24, attention_head_dim=8,
    )  # fmt: skip


def _conditioned(model: Any, x: Tensor) -> Tensor:
    context = torch.linspace(-1, 1, 2 * 5 * 24, device=x.device).reshape(2, 5, 24).to(x.dtype)
    y: Tensor = model(x, torch.full((2,), 3.0, device=x.device), context).sample
    return y


def _segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return SegformerForSemanticSegmentation(
        SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[16, 32], num_attention_heads=[1, 2], sr_ratios=[4, 2],
            patch_sizes=[7, 3], strides=[4, 2], decoder_hidden_size=16, num_labels=5,
        )
    )  # fmt: skip


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic", num_labels=5)
    return ResNetForImageClassification(config)


CASES = {
    "timm_resnet": _timm("resnet10t"),
    "timm_efficientnet": Case(_efficientnet, (2, 3, 64, 64)),
    "timm_regnet": Case(_regnet, (2, 3, 64, 64)),
    "timm_convnext": _timm("convnext_atto", depths=(1, 1, 2, 1)),
    "timm_repvgg": _byob("repvgg_a0"),
    "timm_mobileone": _byob("mobileone_s0"),
    "torchvision_densenet": Case(_densenet, (2, 3, 64, 64)),
    "torchvision_mobilenet": Case(_mobilenet, (2, 3, 64, 64)),
    "diffusers_vae_decoder": Case(_vae, (1, 4, 8, 8), lambda model, x: model.decode(x).sample),
    "diffusers_unet": Case(_unet, (2, 4, 16, 16), _conditioned),
    "transformers_segformer": Case(_segformer, (2, 3, 64, 64), lambda model, x: model(x).logits),
    "transformers_resnet": Case(_resnet, (2, 3, 64, 64), lambda model, x: model(x).logits),
}


def made(name: str, device: str) -> tuple[Case, nn.Module, Tensor, Tensor, float]:
    """The case, its model and input, what float64 makes of it, and a bound: four times PyTorch's own error, at least
    1e-5."""
    pytest.importorskip(name.split("_")[0])
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    x = torch.randn(case.shape)
    with torch.no_grad():
        exact = case.call(copy.deepcopy(model).double(), x.double())
        own = case.call(model, x)
    bound = max(1e-5, 4 * relative_error(own.double(), exact))
    model, x = model.to(device).to(memory_format=torch.channels_last), x.to(device)
    return case, model, x.to(memory_format=torch.channels_last), exact, bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_swapped(name: str, device: str) -> None:
    case, model, x, exact, bound = made(name, device)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    report = fastconv.swap_(model)
    assert report.total == report.swapped == convolutions > 0, report
    with torch.no_grad():
        y = case.call(model, x)
    assert relative_error(y.cpu().double(), exact) < bound
    report.undo()
    assert sum(type(module) is nn.Conv2d for module in model.modules()) == convolutions


def test_group_norms_of_a_decoder_on_a_gpu() -> None:
    """Which need not be there. That of the attention is of three dimensions."""
    pytest.importorskip("diffusers")
    decoder = _vae().decoder.eval()
    norms = [name for name, each in decoder.named_modules() if isinstance(each, nn.GroupNorm)]
    assert sum("attentions" in name for name in norms) == 1
    graph = on_a_gpu(decoder, (1, 4, 64, 64))
    found = graph.find_nodes(op="call_function", target=ops.group_norm_op)
    assert [node.args[-1] for node in found] == ["silu"] * (len(norms) - 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["timm_repvgg", "timm_mobileone"])
def test_every_block_of_branches_is_one_convolution(name: str, device: str) -> None:
    """Norms of timm's own class, which `fuse` takes apart, folded."""
    case, model, x, exact, bound = made(name, device)
    blocks = [module for module in model.modules() if type(module).__name__ in ("RepVggBlock", "MobileOneBlock")]
    asked = Asked(algorithm="implicit_gemm", precision="fp32", packed=True)
    function, backend = compiled(lambda x: case.call(model, x), asked)
    fused = fastconv.fuse(model, precision="fp32")
    with torch.no_grad():
        for y in (function(x), case.call(fused, x)):
            assert relative_error(y.cpu().double(), exact) < bound
    assert len(backend.found) == fused.report.total == len(blocks)
    assert all("relu" in row.fused for row in fused.report.rows)
    assert fused.report.left == {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, device: str) -> None:
    """The rewritten graph, as `fastconv.compile` hands it to Inductor."""
    case, model, x, exact, bound = made(name, device)
    function, backend = compiled(lambda x: case.call(model, x), Asked(algorithm="auto", precision="fp32"))
    with torch.no_grad():
        y = function(x)
    assert relative_error(y.cpu().double(), exact) < bound
    assert len(backend.found) >= sum(isinstance(module, nn.Conv2d) for module in model.modules()) // 2

"""The table of networks: where each comes from, its input, and the family by which the corpus is split."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.corpus.definitions import OWN

Run = Callable[[nn.Module, Tensor], Any]


@dataclass(frozen=True)
class Entry:
    """`size`: C, H, W of the input. Networks of one family are never on both sides of the split."""

    name: str
    family: str
    kind: str  # classify, dense, generate, detect
    make: Callable[[], nn.Module]
    size: tuple[int, int, int] = (3, 224, 224)
    run: Run = lambda model, x: model(x)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this network is of {name}: pip install 'fastconv[corpus]'") from error


def _torchvision(name: str, module: str = "") -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        models = _package("torchvision.models")
        weights = {"weights_backbone": None} if module else {}
        return models.get_model(name, weights=None, **weights)

    return make


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return _package("timm").create_model(name, pretrained=False)

    return make


def _smp(name: str, encoder: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        smp = _package("segmentation_models_pytorch")
        return getattr(smp, name)(encoder_name=encoder, encoder_weights=None, classes=21)

    return make


def _diffusers(name: str, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return getattr(_package("diffusers"), name)(**config)

    return make


def _yolov3() -> nn.Module:
    from fastconv.models import YOLOv3

    return YOLOv3()


def _pyramid() -> nn.Module:
    from torchvision.models.detection import retinanet_resnet50_fpn

    return retinanet_resnet50_fpn(weights=None, weights_backbone=None)


def _run_pyramid(model: Any, x: Tensor) -> Any:
    return model.head(list(model.backbone(x).values()))


def _even(x: Tensor, *size: int) -> Tensor:
    """Values between -1 and 1, the same every time, of the input's dtype."""
    values = torch.linspace(-1, 1, math.prod(size), device=x.device)
    return values.reshape(size).to(x.dtype)


def _condition(width: int, tokens: int = 77, **more: tuple[int, ...]) -> Run:
    def run(model: nn.Module, x: Tensor) -> Any:
        n = x.shape[0]
        added = {name: _even(x, n, *size) for name, size in more.items()}
        context = _even(x, n, tokens, width)
        return model(x, torch.ones(n, device=x.device), context, added_cond_kwargs=added or None)

    return run


SD15 = {
    "sample_size": 64, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 768, "attention_head_dim": 8,
    "block_out_channels": (320, 640, 1280, 1280),
}  # fmt: skip
SDXL = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20), "block_out_channels": (320, 640, 1280), "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2, 10), "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
VAE = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip
DDPM = {
    "sample_size": 32, "block_out_channels": (128, 256, 256, 256), "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip


def _table() -> list[Entry]:
    families: dict[str, tuple[Callable[[str], Callable[[], nn.Module]], dict[str, str]]] = {
        "torchvision": (_torchvision, {
            "alexnet": "alexnet", "vgg": "vgg11 vgg16 vgg19", "inception": "googlenet inception_v3",
            "squeezenet": "squeezenet1_0 squeezenet1_1",
            "resnet": "resnet18 resnet34 resnet50 resnet101 resnet152 wide_resnet50_2",
            "resnext": "resnext50_32x4d resnext101_32x8d", "densenet": "densenet121 densenet161 densenet201",
            "mobilenet": "mobilenet_v2 mobilenet_v3_large", "shufflenet": "shufflenet_v2_x1_0",
            "mnasnet": "mnasnet1_0",
            "efficientnet": "efficientnet_b0 efficientnet_b4 efficientnet_v2_s",
            "regnet": "regnet_x_3_2gf regnet_y_8gf",
            "convnext": "convnext_tiny convnext_base",
        }),
        "timm": (_timm, {
            "hrnet": "hrnet_w18 hrnet_w32 hrnet_w48", "repvgg": "repvgg_a0 repvgg_b1", "dla": "dla34 dla60",
            "res2net": "res2net50_26w_4s", "resnest": "resnest50d", "resnet": "seresnet50 resnetv2_50x1_bit",
            "sknet": "skresnet34", "xception": "xception41", "inception": "inception_v4 inception_resnet_v2",
            "dpn": "dpn68",
            "vovnet": "ese_vovnet39b", "csp": "cspresnet50 cspdarknet53", "ghostnet": "ghostnet_100",
            "nfnet": "dm_nfnet_f0", "mixnet": "mixnet_s", "convnext": "convnextv2_tiny",
            "convmixer": "convmixer_768_32",
            "fastvit": "fastvit_t8", "mobileone": "mobileone_s1", "efficientvit": "efficientvit_b1",
            "edgenext": "edgenext_small", "gernet": "gernet_m",
            "selecsls": "selecsls60", "rexnet": "rexnet_100",
            "nasnet": "pnasnet5large", "mobilevit": "mobilevit_s", "vit": "vit_base_patch16_224",
        }),
    }  # fmt: skip
    table = [
        Entry(name, family, "classify", make(name), (3, 299, 299) if name == "inception_v3" else (3, 224, 224))
        for make, members in families.values()
        for family, names in members.items()
        for name in names.split()
    ]
    wide = (3, 512, 512)
    for name, encoder, family in (
        ("Unet", "resnet34", "resnet"), ("UnetPlusPlus", "resnet50", "resnet"),
        ("FPN", "efficientnet-b0", "efficientnet"),
        ("PSPNet", "resnet50", "resnet"), ("DeepLabV3Plus", "mobilenet_v2", "mobilenet"), ("Linknet", "vgg13", "vgg"),
        ("MAnet", "densenet121", "densenet"), ("Segformer", "mit_b2", "segformer"),
    ):  # fmt: skip
        table.append(Entry(f"{name.lower()}_{encoder}", family, "dense", _smp(name, encoder), wide))
    for name, family in (("deeplabv3_resnet50", "resnet"), ("fcn_resnet101", "resnet"),
                         ("lraspp_mobilenet_v3_large", "mobilenet")):  # fmt: skip
        table.append(Entry(name, family, "dense", _torchvision(name, "backbone"), (3, 520, 520)))

    def flow(model: nn.Module, x: Tensor) -> Any:
        return model(x, x, num_flow_updates=2)

    latent = (4, 64, 64)
    table += [
        Entry("unet_2015", "unet", "dense", OWN["unet_2015"], (1, 572, 572)),
        Entry("raft_large", "raft", "dense", _torchvision("raft_large"), (3, 384, 512), flow),
        Entry("raft_small", "raft", "dense", _torchvision("raft_small"), (3, 384, 512), flow),
        Entry("retinanet_resnet50_fpn", "resnet", "detect", _pyramid, (3, 640, 640), _run_pyramid),
        Entry("yolov3", "yolov3", "detect", _yolov3, (3, 416, 416)),
        *(Entry(f"yolov8{s}", "yolov8", "detect", OWN[f"yolov8{s}"], (3, 640, 640)) for s in "nsm"),
        Entry("ssd300_vgg16", "vgg", "detect", _torchvision("ssd300_vgg16", "backbone"), (3, 300, 300),
              lambda model, x: model.backbone(x)),  # type: ignore[operator]
        Entry("sd15_unet", "sd_unet", "generate", _diffusers("UNet2DConditionModel", **SD15), latent, _condition(768)),
        Entry("sdxl_unet", "sd_unet", "generate", _diffusers("UNet2DConditionModel", **SDXL), (4, 128, 128),
              _condition(2048, text_embeds=(1280,), time_ids=(6,))),
        Entry("sd_vae_encoder", "sd_vae", "generate", _diffusers("AutoencoderKL", **VAE), wide,
              lambda model, x: model.encoder(x)),  # type: ignore[operator]
        Entry("sd_vae_decoder", "sd_vae", "generate", _diffusers("AutoencoderKL", **VAE), latent,
              lambda model, x: model.decoder(x)),  # type: ignore[operator]
        Entry("ddpm_cifar10", "ddpm", "generate", _diffusers("UNet2DModel", **DDPM), (3, 32, 32),
              lambda model, x: model(x, torch.ones(x.shape[0], device=x.device))),
        Entry("rrdb", "rrdb", "generate", OWN["rrdb"], (3, 128, 128)),
        Entry("edsr_baseline", "edsr", "generate", OWN["edsr_baseline"], (3, 339, 510)),
        Entry("edsr", "edsr", "generate", OWN["edsr"], (3, 128, 128)),
        Entry("dncnn", "dncnn", "generate", OWN["dncnn"], (1, 180, 180)),
        Entry("vdsr", "dncnn", "generate", OWN["vdsr"], (3, 256, 256)),
        Entry("srcnn", "srcnn", "generate", OWN["srcnn"], (1, 256, 256)),
        Entry("fsrcnn", "srcnn", "generate", OWN["fsrcnn"], (1, 128, 128)),
        Entry("cyclegan", "cyclegan", "generate", OWN["cyclegan"], (3, 256, 256)),
        Entry("patchgan", "cyclegan", "generate", OWN["patchgan"], (3, 256, 256)),
        Entry("chess_192x15", "board", "classify", OWN["chess_192x15"], (112, 8, 8)),
        Entry("chess_256x20", "board", "classify", OWN["chess_256x20"], (112, 8, 8)),
        Entry("go_256x19", "board", "classify", OWN["go_256x19"], (17, 19, 19)),
        Entry("lenet5", "lenet", "classify", OWN["lenet5"], (1, 28, 28)),
        Entry("resnet20_cifar", "cifar", "classify", OWN["resnet20_cifar"], (3, 32, 32)),
        Entry("resnet56_cifar", "cifar", "classify", OWN["resnet56_cifar"], (3, 32, 32)),
    ]  # fmt: skip
    return table


TABLE = _table()

# Decoders of larger pictures than the corpus has, by their names: of 16 latent channels, as newer models have them.
DECODERS = {
    f"vae_decoder_{8 * side}": Entry(
        f"vae_decoder_{8 * side}",
        "sd_vae",
        "generate",
        _diffusers("AutoencoderKL", **{**VAE, "latent_channels": 16}),
        (16, side, side),
        lambda model, x: model.decoder(x),  # type: ignore[operator]
    )
    for side in (128, 256)
}

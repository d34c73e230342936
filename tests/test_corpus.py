"""The corpus of convolutions: what its file says holds together, and the tracer sees what a network runs."""

import copy
import json
import sys

import pytest
import torch
import torchvision
from torch import nn

from benchmarks import corpus
from benchmarks.corpus import definitions, networks, trace
from benchmarks.networks import suite as bench
from benchmarks.networks import zoo
from fastconv import _C

DOCUMENT = json.loads(corpus.PATH.read_text(encoding="utf-8"))


def test_the_file_is_small_and_has_enough_networks() -> None:
    assert corpus.PATH.stat().st_size <= 1.5e6
    assert len(DOCUMENT["networks"]) >= 60
    assert set(DOCUMENT["networks"]) == {entry.name for entry in networks.TABLE}
    named = {name for row in DOCUMENT["problems"] for name in row["networks"]}
    assert named == set(DOCUMENT["networks"])


def test_rows_are_convolutions_each_once() -> None:
    rows = corpus.read()
    problems = [tuple(row[name] for name in trace.FIELDS) for row in rows]
    assert len(set(problems)) == len(rows) > 1000
    for row in rows:
        assert row["layers"] >= len(row["networks"]) >= 1
        problem = _C.ConvProblem(
            *(row[name] for name in "nchwkrs"), (row["stride_h"], row["stride_w"]), (row["pad_h"], row["pad_w"]),
            (row["dilation_h"], row["dilation_w"]), row["groups"],
        )  # fmt: skip  # raises for what is none
        assert row["n"] in {n * images for n in DOCUMENT["batches"] for images in (1, 2)}  # RAFT reads pairs
        assert min(problem.p, problem.q) >= 1


def test_the_split_is_by_family_and_what_judges_is_new() -> None:
    entries = DOCUMENT["networks"].values()
    sides = {name: entry["split"] for name, entry in DOCUMENT["networks"].items()}
    assert sides == trace.split(networks.TABLE)
    for family in {entry["family"] for entry in entries}:
        assert len({entry["split"] for entry in entries if entry["family"] == family}) == 1
    assert 0.25 <= sum(side == "judge" for side in sides.values()) / len(sides) <= 0.4
    for row in DOCUMENT["problems"]:
        assert row["split"] == ("judge" if {sides[name] for name in row["networks"]} == {"judge"} else "fit")


@pytest.mark.parametrize("name", ["resnet18"])
def test_the_tracer_finds_what_a_network_runs(name: str) -> None:
    """Against hooks on the modules of a network that computes."""
    entry = next(entry for entry in networks.TABLE if entry.name == name)
    expected: dict[tuple[int, ...], int] = {}

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        assert not isinstance(module.padding, str)
        pairs = (*module.stride, *module.padding, *module.dilation)
        row = (*args[0].shape, module.weight.shape[0], *module.kernel_size, *pairs, module.groups)
        expected[row] = expected.get(row, 0) + 1

    model = torchvision.models.get_model(name, weights=None).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.zeros(1, *entry.size))
    assert dict(trace.convolutions(trace.build(entry), (1, *entry.size))) == expected
    written = [row for row in corpus.read() if name in row["networks"] and row["n"] == 1]
    assert {tuple(row[field] for field in trace.FIELDS) for row in written} == set(expected)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    (entry,) = (entry for entry in networks.TABLE if entry.name == "hrnet_w18")
    with pytest.raises(ImportError, match=r"this network is of timm: pip install 'fastconv\[corpus\]'"):
        entry.make()


def test_rrdb_has_the_scales_of_its_branches_in_its_weights():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = definitions.Dense(8, 4).double()
        x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    for keep in (1.0, definitions.RESIDUAL_SCALE):
        branch = plain(x) - x
        scaled = definitions.scaled(copy.deepcopy(plain), keep)
        torch.testing.assert_close(scaled(x), keep * (x + definitions.RESIDUAL_SCALE * branch))


def test_rrdb_is_finite_in_float16():
    model, x = zoo.build("rrdb"), zoo.inputs("rrdb", 1, 8)
    with torch.no_grad():
        expected = model(x)
        y = model.half()(x.half())
    assert y.isfinite().all()
    assert (y - expected).norm() < 4e-3 * expected.norm()


def test_the_networks_that_goals_name_can_be_run():
    named = ("hrnet_w18", "repvgg_a2", "convnext_tiny", "efficientnet_b0", "sdxl_unet", "maskrcnn_resnet50_fpn")
    assert {*named, "segformer_mit_b2"} <= set(zoo.names())
    assert not set(networks.RELATIVES) & set(DOCUMENT["networks"])


def test_mask_rcnn_runs_all_of_its_convolutions(monkeypatch):
    monkeypatch.setattr(networks, "BOXES", 3)
    model = zoo.build("maskrcnn_resnet50_fpn", image=64)
    called = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.register_forward_hook(lambda module, inputs, output: called.append(module))
    with torch.no_grad():
        y = zoo.comparable("maskrcnn_resnet50_fpn", model(zoo.inputs("maskrcnn_resnet50_fpn", 2, 64)))
    assert len(y) == 2
    assert y.isfinite().all()
    of_all = {module for module in model.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)}
    assert set(called) == of_all


def test_any_network_is_one_of_the_suites() -> None:
    """Any network of the corpus with a square input is one of the suite's, whatever it takes and returns."""
    assert {"vgg16", "unet_2015", "sd_vae_decoder"} <= set(zoo.names())
    assert zoo.inputs("vae_decoder_2048", 1, zoo.network("vae_decoder_2048").image).shape == (1, 16, 256, 256)
    assert zoo.inputs("unet_2015", 2, 188).shape == (2, 1, 188, 188)
    document = bench.run(["unet_2015"], ["fp32"], ["fused"], rounds=1, device="cpu", peers=["torch_eager"], batch=1,
                         image=188, layouts=["nchw"])  # fmt: skip
    (row,) = document["rows"]
    assert row["us"] > 0
    assert row["logits_error"] < 1e-5
    assert row["total"] == 23  # 4 of them transposed
    detector, x = zoo.build("yolov8n", image=64), zoo.inputs("yolov8n", 2, 64)
    assert zoo.comparable("yolov8n", detector(x)).shape[0] == 2
    with pytest.raises(ValueError, match="network is 'nothing'; expected one of"):
        zoo.network("nothing")

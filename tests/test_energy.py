"""Energy of an image: calls in turns beside the board's counter, here a counter that calls move."""

import time

import pytest
import torch
from test_benchmarks import HEAD
from torch import nn

from benchmarks.harness import energy, results
from benchmarks.networks import suite
from benchmarks.reports import documents
from fastconv import models

CPU = torch.device("cpu")


def test_contenders_alternate_and_each_pays_for_its_own_calls():
    board, order = [0.0], []

    def contender(name, joules):
        def call():
            order.append(name)
            board[0] += joules
            time.sleep(1e-3)

        return call

    found = energy.measure({"a": contender("a", 5.0), "b": contender("b", 2.0)}, CPU, 0.02, lambda: board[0])
    for name, joules in (("a", 5.0), ("b", 2.0)):
        its = found[name]
        assert its.joules == joules * its.calls
        assert its.calls >= energy.TURNS
        assert its.seconds >= 1e-3 * its.calls
        fields = its.fields(4)
        assert fields["image_j"] == joules / 4
        assert fields["watts"] == its.joules / its.seconds
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert turns == ["a", "b", "a", "b", "a"]  # once each to know their time and to warm up, then a b, then b a
    assert order[-found["a"].calls // energy.TURNS :].count("b") == 0


@pytest.fixture
def network(monkeypatch):
    class Tiny(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))

    monkeypatch.setitem(models.NETWORKS, "tiny", models.Network("tiny", 8, 2, Tiny))
    arguments = {"modes": ["eager", "fused"], "peers": ["torch_eager"], "rounds": 2, "device": "cpu"}
    return lambda **more: suite.run(["tiny"], ["fp32"], **arguments, **more)


def test_rows_of_networks_have_the_energy_of_an_image(network, monkeypatch, tmp_path):
    monkeypatch.setattr(energy, "meter", lambda device: lambda: 100 * time.perf_counter())  # a board of 100 W
    out = tmp_path / "energy.json"
    network(energy_s=0.02, out=out)
    document = results.read(out)
    assert [row["mode"] for row in document["rows"]] == ["eager", "fused"]
    for row in document["rows"]:
        for its in (row["energy"], row["peer_energy"]):
            assert its["watts"] >= 100  # more where the counter was read late
            assert its["image_j"] == pytest.approx(its["joules"] / its["calls"] / 2, rel=1e-3)


def test_without_a_counter_the_rows_say_why(network):
    for row in network(energy_s=0.02)["rows"]:
        assert "energy" not in row
        assert row["failures"]["energy"] == "OSError: device is cpu; energy is read of a GPU"
        assert row["us"] > 0
    assert "energy" not in network()["rows"][0]["failures"]


def test_energy_is_drawn(tmp_path):
    assert documents.region("h200/energy", tmp_path) == "(not measured)"
    row = {"network": "resnet50", "batch": 64, "class": "fp16", "mode": "eager", "us": 9e3, "swapped": 53, "total": 53}
    row |= {"peers": {"torch_eager": 12e3}, "best_peer": "torch_eager", "best_peer_us": 12e3, "logits_error": 1e-3}
    row |= {"top1_agreement": 1.0}
    its = {"calls": 10, "joules": 6.4, "seconds": 0.02}
    both = {"energy": its | {"image_j": 0.01, "watts": 320.0}, "peer_energy": its | {"image_j": 0.02, "watts": 400.0}}
    fused = {"mode": "fused", "us": 8e3, "energy": its | {"image_j": 0.012, "watts": 300.0}}  # faster, and takes more
    rows = [row | both, row | both | fused]
    rows.append(row | {"class": "bf16"})
    results.write(tmp_path / "h100/networks.json", {**HEAD, "suite": "networks", "rows": rows[2:]})
    assert documents.region("h100/energy", tmp_path) == "(not measured)"
    results.write(tmp_path / "h200/networks.json", {**HEAD, "suite": "networks", "rows": rows})
    lines = documents.region("h200/energy", tmp_path).splitlines()
    assert documents.region("h100+h200/energy", tmp_path).splitlines() == lines
    assert lines[2] == "| ResNet-50 | 64 | `fp16` | fused | 12.0 | 300 | `torch_eager` | 20.0 | 400 | 1.67x |"
    assert lines[3:-1] == [""]
    assert lines[-1].startswith("NVIDIA H200, ")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its board's energy counter")
def test_a_board_at_work_takes_energy():
    x = torch.randn(4096, 4096, device="cuda")
    device = torch.device("cuda")
    try:
        read = energy.meter(device)
    except OSError as error:
        pytest.skip(f"needs a board whose energy can be read: {error}")
    found = energy.measure({"product": lambda: x @ x}, device, 0.5, read)["product"]
    assert 50 < found.joules / found.seconds < 2000

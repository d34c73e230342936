"""What each mode promises of a weight that changes: checked layers follow it, frozen ones after the events that the
documents name, and `fastconv.conv2d` keeps what it packed of a weight as long as the weight lives."""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from layers import DEVICES, check, packed_algorithms, reference, relative_error
from torch import Tensor, nn
from torch.nn.utils import prune

import fastconv
from fastconv import eager, ops

pytestmark = pytest.mark.usefixtures("full_precision")
PACKED = packed_algorithms()


def frozen_layer(algorithm: str, device: str) -> tuple[fastconv.Conv2d, Tensor]:
    layer = nn.Conv2d(8, 16, 3, padding=1, device=device)
    fastconv.swap_(layer, algorithm=algorithm, precision="fp32", frozen=True)
    return layer, torch.randn(2, 8, 13, 11, device=device)


def load(assign: bool) -> Callable[[nn.Conv2d], None]:
    def load_state(layer: nn.Conv2d) -> None:
        layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()}, assign=assign)

    return load_state


def replace(layer: nn.Conv2d) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)


def replace_data(layer: nn.Conv2d) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def refresh_after(change: Callable[[nn.Conv2d], object]) -> Callable[[nn.Conv2d], None]:
    def changed(layer: nn.Conv2d) -> None:
        change(layer)
        fastconv.refresh(nn.Sequential(layer))

    return changed


def train(layer: nn.Conv2d) -> None:
    """A weight that requires a gradient is followed by every call; what was packed belongs to the last of them."""
    layer.weight.requires_grad_(True)
    x = torch.randn(1, 8, 9, 9, device=layer.weight.device)
    optimizer = torch.optim.SGD([layer.weight], lr=0.3)
    for _ in range(2):
        optimizer.zero_grad()
        check(layer, x).square().mean().backward()
        optimizer.step()
    check(layer, x)
    layer.weight.requires_grad_(False)


SEEN_WHILE_FROZEN = {
    "load_state_dict": load(False),
    "load_state_dict_assign": load(True),
    "new_parameter": replace,
    "new_data": replace_data,
    "half_and_back": lambda layer: layer.half().float(),
    "transposed": lambda layer: setattr(layer.weight, "data", layer.weight.data.transpose(2, 3)),
    "channels_last": lambda layer: layer.to(memory_format=torch.channels_last),
    "training": train,
    "in_place_and_refresh": refresh_after(lambda layer: layer.weight.data.mul_(2)),
    "apply_and_refresh": refresh_after(lambda layer: nn.init.normal_(layer.weight)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", PACKED)
class TestFrozen:
    @pytest.mark.parametrize("change", SEEN_WHILE_FROZEN)
    def test_the_documented_changes_are_seen(self, algorithm: str, device: str, change: str) -> None:
        layer, x = frozen_layer(algorithm, device)
        with torch.no_grad():
            for _ in range(2):
                check(layer, x)
        SEEN_WHILE_FROZEN[change](layer)
        with torch.no_grad():
            for _ in range(2):
                check(layer, x)

    def test_it_is_packed_once_and_not_compared(self, algorithm: str, device: str) -> None:
        layer, x = frozen_layer(algorithm, device)
        with torch.no_grad():
            before = check(layer, x)
            layer.weight.mul_(2)  # what the caller promised not to do
            assert relative_error(layer(x), before) < 1e-6
            layer.refresh()
            check(layer, x)

    def test_functional_call_with_other_weights(self, algorithm: str, device: str) -> None:
        layer, x = frozen_layer(algorithm, device)
        with torch.no_grad():
            check(layer, x)
            other = {name: torch.randn_like(value) for name, value in layer.named_parameters()}
            y = torch.func.functional_call(layer, other, (x,))
            assert relative_error(y, F.conv2d(x, other["weight"], other["bias"], padding=1)) < 1e-5
            check(layer, x)

    def test_copies_are_frozen_and_independent(self, algorithm: str, device: str) -> None:
        layer, x = frozen_layer(algorithm, device)
        with torch.no_grad():
            before = check(layer, x)
            other = copy.deepcopy(layer)
            assert other.frozen
            other.weight.mul_(3)
            check(other, x)
            assert relative_error(check(layer, x), before) == 0

    def test_input_and_bias_gradients(self, algorithm: str, device: str) -> None:
        layer, x = frozen_layer(algorithm, device)
        x.requires_grad_()
        grad = torch.randn(2, 16, 13, 11, device=device)
        found = torch.autograd.grad(layer(x), [x, layer.bias], grad)
        expected = torch.autograd.grad(reference(layer, x), [x, layer.bias], grad)
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b.to(a.dtype)) < 1e-5


def test_undo_restores_what_freezing_changed() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3).requires_grad_(False))
    report = fastconv.swap_(model, frozen=True)
    assert [layer.weight.requires_grad for layer in model] == [False, False]
    assert "frozen=True" in repr(model)
    report.undo()
    assert [layer.weight.requires_grad for layer in model] == [True, False]


@pytest.mark.parametrize("hook", ["prune", "weight_norm", "spectral_norm"])
def test_undo_where_a_hook_computes_the_weight_since(hook: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    report = fastconv.swap_(model, frozen=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weight_norm is deprecated
        if hook == "prune":
            prune.l1_unstructured(model[0], "weight", 0.5)
        else:
            getattr(nn.utils, hook)(model[0])
    report.undo()
    assert report.undone
    assert [type(layer) for layer in model] == [nn.Conv2d] * 2
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_fused_layers_are_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    fused = fastconv.fuse(model, precision="fp32")
    layers = [module for module in fused.modules() if isinstance(module, fastconv.Conv2d)]
    assert [layer.frozen for layer in layers] == [True, True]
    x = torch.randn(1, 4, 9, 9)
    state = {name: torch.randn_like(value) for name, value in fused.state_dict().items()}
    with torch.no_grad():
        fused(x)
        fused.load_state_dict(state)
        y = torch.relu(F.conv2d(x.double(), state["0.weight"].double(), state["0.bias"].double()))
        y = F.conv2d(y, state["3.weight"].double(), state["3.bias"].double())
    assert relative_error(fused(x), y.float()) < 1e-5


@pytest.mark.parametrize("arguments", [{"frozen": 1}, {"frozen": "yes"}])
def test_frozen_is_a_bool(arguments: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="frozen is"):
        fastconv.swap_(nn.Conv2d(2, 2, 1), **arguments)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        fastconv.refresh([nn.Conv2d(2, 2, 1)])


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every first packing of a weight."""
    calls: list[object] = []
    pack = ops.pack_weight
    monkeypatch.setattr(ops, "pack_weight", lambda *args: calls.append(args) or pack(*args))
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", PACKED)
class TestFunctional:
    def call(self, algorithm: str, x: Tensor, w: Tensor) -> Tensor:
        y = fastconv.conv2d(x, w, padding=1, algorithm=algorithm, precision="fp32")
        assert relative_error(y, F.conv2d(x.double(), w.double(), padding=1).float()) < 1e-5
        return y

    def tensors(self, device: str) -> tuple[Tensor, Tensor]:
        return torch.randn(2, 8, 13, 11, device=device), torch.randn(16, 8, 3, 3, device=device)

    def test_a_weight_seen_before_is_packed_once_and_followed(
        self, algorithm: str, device: str, packings: list[object]
    ) -> None:
        x, w = self.tensors(device)
        for size in (13, 9, 13, 5):
            self.call(algorithm, x[:, :, :size], w)
        assert len(packings) == 1
        for change in (lambda: w.mul_(2), lambda: w.data.add_(1), lambda: w.detach()[0].fill_(0.5)):
            change()
            self.call(algorithm, x, w)
        assert len(packings) == 1

    def test_weights_made_for_one_call_are_not_kept(self, algorithm: str, device: str, packings: list[object]) -> None:
        x, w = self.tensors(device)
        before = len(eager._seen)
        for factor in range(1, 5):
            self.call(algorithm, x, w * factor)
        assert packings == []
        assert len(eager._seen) == before

    def test_it_is_forgotten_with_its_weight(self, algorithm: str, device: str) -> None:
        x, w = self.tensors(device)
        for _ in range(2):
            self.call(algorithm, x, w)
        state = eager.state_of(w)
        assert state is not None
        assert len(state.packed) == 1
        gone = weakref.ref(state)
        del w, state
        gc.collect()
        assert gone() is None

    def test_gradients(self, algorithm: str, device: str) -> None:
        x, w = self.tensors(device)
        x.requires_grad_(), w.requires_grad_()
        grad = torch.randn(2, 16, 13, 11, device=device)
        expected = torch.autograd.grad(F.conv2d(x.double(), w.double(), padding=1), [x, w], grad.double())
        for _ in range(3):
            found = torch.autograd.grad(self.call(algorithm, x, w), [x, w], grad)
            for a, b in zip(found, expected, strict=True):
                assert relative_error(a, b.to(a.dtype)) < 1e-5

    def test_threads_share_a_weight(self, algorithm: str, device: str) -> None:
        x, w = self.tensors(device)
        expected = F.conv2d(x.double(), w.double(), padding=1).float()
        errors = [1.0] * 4

        def work(i: int) -> None:
            calls = [fastconv.conv2d(x, w, padding=1, algorithm=algorithm, precision="fp32") for _ in range(8)]
            errors[i] = max(relative_error(y, expected) for y in calls)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(errors) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch.cuda.is_available() is False")
@pytest.mark.parametrize("algorithm", PACKED)
class TestGraphs:
    def test_a_replay_of_a_frozen_layer_follows_refresh(self, algorithm: str) -> None:
        layer, x = frozen_layer(algorithm, "cuda")
        with torch.no_grad():
            check(layer, x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            for _ in range(2):
                graph.replay()
                assert relative_error(y, reference(layer, x)) < 1e-5
                layer.weight.mul_(-2)
                layer.refresh()

    def test_a_replay_of_a_function_follows_its_weight(self, algorithm: str) -> None:
        x, w = torch.randn(2, 8, 13, 11, device="cuda"), torch.randn(16, 8, 3, 3, device="cuda")
        for _ in range(2):
            fastconv.conv2d(x, w, algorithm=algorithm, precision="fp32")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fastconv.conv2d(x, w, algorithm=algorithm, precision="fp32")
        for _ in range(2):
            graph.replay()
            assert relative_error(y, F.conv2d(x.double(), w.double()).float()) < 1e-5
            w.mul_(-2)

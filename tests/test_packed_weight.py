"""The packed weights of fastconv.Conv2d are used where they may be, and never stale."""

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from choices import SIZES, activate, choice
from layers import DEVICES, check, packed_algorithms, reference, relative_error
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fastconv
import fastconv.nn
from fastconv import _C, ops

pytestmark = pytest.mark.usefixtures("full_precision")
PACKED = packed_algorithms()


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The algorithm of each convolution that ran from a packed weight."""
    calls: list[str] = []
    run = fastconv.nn.ops.layer_forward

    def spy(*args: Any) -> Tensor | None:
        y = run(*args)
        if y is not None:
            calls.append(fastconv.last_call()["algorithm"])
        return y

    monkeypatch.setattr(fastconv.nn.ops, "layer_forward", spy)
    return calls


def replace_weight(layer: nn.Conv2d) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def replace_weight_by_another_shape(layer: nn.Conv2d) -> None:
    layer.weight = nn.Parameter(torch.randn(12, *layer.weight.shape[1:], device=layer.weight.device))
    layer.bias = nn.Parameter(torch.randn(12, device=layer.weight.device))


def add_in_place(layer: nn.Conv2d) -> None:
    with torch.no_grad():
        layer.weight.add_(torch.randn_like(layer.weight))


def change_one_element(layer: nn.Conv2d) -> None:
    layer.weight.data[-1, -1, -1, -1] += 100


def set_data(layer: nn.Conv2d) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def write_through_numpy(layer: nn.Conv2d) -> None:
    if layer.weight.is_cuda:
        layer.weight.data.copy_(torch.randn(layer.weight.shape))
    else:
        layer.weight.detach().numpy()[...] *= -2


def step(optimizer: type[torch.optim.Optimizer], **arguments: object) -> Callable[[nn.Conv2d], None]:
    def train(layer: nn.Conv2d) -> None:
        updates = optimizer(layer.parameters(), lr=0.3, **arguments)
        layer(torch.randn(1, 8, 9, 9, device=layer.weight.device)).square().mean().backward()
        updates.step()
        updates.zero_grad()

    return train


def load(assign: bool) -> Callable[[nn.Conv2d], None]:
    def load_state(layer: nn.Conv2d) -> None:
        layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()}, assign=assign)

    return load_state


def to_half_and_back(layer: nn.Conv2d) -> None:
    layer.half()
    layer.float()


def change_inside_inference_mode(layer: nn.Conv2d) -> None:
    with torch.inference_mode():
        layer.weight.mul_(3)


MUTATIONS = {
    "data_mul": lambda layer: layer.weight.data.mul_(2),
    "add_in_place": add_in_place,
    "one_element": change_one_element,
    "set_data": set_data,
    "numpy": write_through_numpy,
    "init": lambda layer: nn.init.kaiming_normal_(layer.weight),
    "reset_parameters": lambda layer: layer.reset_parameters(),
    "sgd": step(torch.optim.SGD),
    "adam_foreach": step(torch.optim.Adam, foreach=True),
    "load_state_dict": load(False),
    "load_state_dict_assign": load(True),
    "new_parameter": replace_weight,
    "new_shape": replace_weight_by_another_shape,
    "half_and_back": to_half_and_back,
    "channels_last": lambda layer: layer.to(memory_format=torch.channels_last).weight.data.mul_(2),
    "inference_mode": change_inside_inference_mode,
    "nan": lambda layer: layer.weight.data[0, 0, 0, 0].fill_(float("inf")),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", PACKED)
class TestPackedWeight:
    def layer(self, algorithm: str, device: str) -> tuple[fastconv.Conv2d, Tensor]:
        layer = fastconv.Conv2d(8, 16, 3, padding=1, algorithm=algorithm, precision="fp32", device=device)
        return layer, torch.randn(2, 8, 13, 11, device=device)

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
    @pytest.mark.parametrize("mutation", MUTATIONS)
    def test_no_mutation_leaves_it_stale(
        self, algorithm: str, device: str, mutation: str, format: torch.memory_format, packed_calls: list[str]
    ) -> None:
        layer, x = self.layer(algorithm, device)
        layer.to(memory_format=format)
        with torch.no_grad():
            before = check(layer, x)
        MUTATIONS[mutation](layer)
        packed_calls.clear()
        with torch.no_grad():
            if mutation == "nan":
                layer(x)
                layer.weight.data[0, 0, 0, 0] = 1.0
                after = check(layer, x)
            else:
                after = check(layer, x)
        assert packed_calls
        assert set(packed_calls) == {algorithm}
        assert after.shape != before.shape or relative_error(after, before) > 1e-4

    def test_it_is_used_with_and_without_gradients(self, algorithm: str, device: str, packed_calls: list[str]) -> None:
        layer, x = self.layer(algorithm, device)
        check(layer, x)  # of a weight that is trained, which is packed for the call
        with torch.no_grad():
            check(layer, x)
            check(layer, x[0])
            check(layer, x.to(memory_format=torch.channels_last))
            check(layer, torch.randn(1, 8, 5, 30, device=device))
        with torch.inference_mode():
            check(layer, x)
        layer.requires_grad_(False)
        check(layer, x)
        check(layer, x.clone().requires_grad_())
        assert packed_calls == [algorithm] * 6
        assert len(layer._fastconv.packed) == 1
        with torch.no_grad():
            torch.func.vmap(layer)(x[None])  # a transform's tensors are not for it
        assert packed_calls == [algorithm] * 6

    def test_autocast_packs_what_it_casts(self, algorithm: str, device: str) -> None:
        layer, x = self.layer(algorithm, device)
        for grad in (False, True):
            for _ in range(2):
                layer.weight.data.mul_(-2)
                with torch.set_grad_enabled(grad), torch.autocast(device, torch.bfloat16):
                    try:
                        y = layer(x)
                    except fastconv.UnsupportedError:
                        return  # the algorithm may not offer the class
                assert y.dtype == torch.bfloat16
                assert relative_error(y.float(), reference(layer, x)) < 3e-2
        y.float().square().mean().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32

    def test_it_is_packed_once(self, algorithm: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        layer, x = self.layer(algorithm, device)
        calls: list[object] = []
        pack = fastconv.nn.ops.pack_weight
        monkeypatch.setattr(fastconv.nn.ops, "pack_weight", lambda *args: calls.append(args) or pack(*args))
        with torch.no_grad():
            for size in (9, 13, 9):
                check(layer, x[:, :, :size])
                layer.weight.data.mul_(1.5)
        assert len(calls) == 1

    def test_output_has_the_layout_of_conv2d(self, algorithm: str, device: str) -> None:
        layer, x = self.layer(algorithm, device)
        last = torch.channels_last
        with torch.no_grad():
            assert layer(x).is_contiguous()
            assert layer(x.to(memory_format=last)).is_contiguous(memory_format=last)
            layer.to(memory_format=last)
            assert check(layer, x).is_contiguous(memory_format=last)

    @pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
    def test_a_dense_weight_is_not_copied(self, algorithm: str, device: str, format: torch.memory_format) -> None:
        layer, x = self.layer(algorithm, device)
        x = layer.to(memory_format=format) and x.to(memory_format=format)
        with torch.no_grad():
            layer(x)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                layer(x)
        operators = {event.key for event in profile.key_averages()}
        assert "fastconv::layer_forward" in operators
        assert not operators & {"aten::clone", "aten::copy_", "aten::contiguous", "aten::to"}

    def test_functional_call(self, algorithm: str, device: str) -> None:
        layer, x = self.layer(algorithm, device)
        with torch.no_grad():
            check(layer, x)
            other = {name: torch.randn_like(value) for name, value in layer.named_parameters()}
            y = torch.func.functional_call(layer, other, (x,))
            assert relative_error(y, nn.functional.conv2d(x, other["weight"], other["bias"], padding=1)) < 1e-5
            check(layer, x)

    def test_made_inside_inference_mode_used_outside(self, algorithm: str, device: str) -> None:
        with torch.inference_mode():
            layer, x = self.layer(algorithm, device)
            check(layer, x)
        layer, x = self.layer(algorithm, device)
        with torch.inference_mode():
            check(layer, x)
        layer.weight.data.mul_(2)
        with torch.no_grad():
            check(layer, x)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_dtype_changes(self, algorithm: str, device: str, dtype: torch.dtype) -> None:
        layer, x = self.layer(algorithm, device)
        with torch.no_grad():
            check(layer, x)
            layer.to(dtype)
            try:
                y = layer(x.to(dtype))
            except fastconv.UnsupportedError:
                pass  # the algorithm may not offer the class on this device
            else:
                assert y.dtype == dtype
                assert relative_error(y.float(), reference(layer, x.to(dtype)).float()) < 3e-2
            layer.to(torch.float32)
            layer.weight.data.mul_(2)
            check(layer, x)

    def test_copies_and_pickles_are_independent(self, algorithm: str, device: str) -> None:
        layer, x = self.layer(algorithm, device)
        with torch.no_grad():
            before = check(layer, x)
            buffer = io.BytesIO()
            torch.save(layer, buffer)
            assert len(buffer.getvalue()) < 8 * layer.weight.nbytes  # the cache stays behind
            buffer.seek(0)
            copies = [
                copy.deepcopy(layer),
                pickle.loads(pickle.dumps(layer)),
                torch.load(buffer, weights_only=False),
            ]
            for other in copies:
                assert type(other) is fastconv.Conv2d
                assert (other.algorithm, other.precision) == (algorithm, "fp32")
                assert other.last_algorithm is None
                other.weight.data.mul_(2)
                check(other, x)
                assert relative_error(check(layer, x), before) == 0

    def test_state_dict_and_buffers_hold_parameters_alone(self, algorithm: str, device: str) -> None:
        layer, x = self.layer(algorithm, device)
        with torch.no_grad():
            layer(x)
        assert list(layer.state_dict()) == ["weight", "bias"]
        assert list(layer.buffers()) == []
        assert len(list(layer.parameters())) == 2

    def test_memory_is_bounded_over_shapes(self, algorithm: str, device: str) -> None:
        layer, _ = self.layer(algorithm, device)
        with torch.no_grad():
            for width in range(3, 83):
                layer(torch.randn(1, 8, 3, width, device=device))
            assert len(layer._fastconv.packed) == 1
            for k in (4, 5, 6):
                layer.weight = nn.Parameter(torch.randn(k, 8, 3, 3, device=device))
                layer.bias = None
                check(layer, torch.randn(1, 8, 3, 9, device=device))
            assert len(layer._fastconv.packed) == 1

    def test_many_threads(self, algorithm: str, device: str) -> None:
        layer, x = self.layer(algorithm, device)
        inputs = [x + i for i in range(4)]
        with torch.no_grad():
            expected = [reference(layer, value) for value in inputs]
        errors: list[float] = [1.0] * 4

        def work(i: int) -> None:
            with torch.no_grad():
                errors[i] = max(relative_error(layer(inputs[i]), expected[i]) for _ in range(10))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(errors) < 1e-5

    def test_data_parallel_replicas(self, algorithm: str, device: str, packed_calls: list[str]) -> None:
        layer, x = self.layer(algorithm, device)
        with torch.no_grad():
            check(layer, x)
            replica = layer._replicate_for_data_parallel()
            replica.weight, replica.bias = layer.weight.detach() * 2, layer.bias.detach()
            packed_calls.clear()
            y = replica(x)
            assert relative_error(y, nn.functional.conv2d(x, replica.weight, replica.bias, padding=1)) < 1e-5
            assert packed_calls == []
            check(layer, x)


def shared(kind: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """A convolution as threads share it, and PyTorch's."""
    layer = nn.Conv2d(8, 4, 3, bias=False).requires_grad_(False)
    model = nn.Sequential(layer, nn.ReLU()).eval()
    if kind == "fused":
        return fastconv.fuse(model, algorithm="auto"), model
    if kind == "function":
        return lambda x: fastconv.conv2d(x, layer.weight, activation="relu"), model
    swapped = copy.deepcopy(model)
    fastconv.swap_(swapped, frozen=kind == "frozen", algorithm="auto")
    return swapped, model


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("other", ["torch", "direct", "winograd_f2"])
@pytest.mark.parametrize("kind", ["swapped", "frozen", "fused", "function"])
def test_another_thread_chooses_otherwise_before_the_weight_is_packed(
    kind: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    convolve, wanted = shared(kind)
    activation = "relu" if kind in ("fused", "function") else "none"
    heights = {11: "winograd_f4", 5: other}
    problems = {name: _C.ConvProblem(**SIZES | {"h": h}, activation=activation) for h, name in heights.items()}
    activate(*(choice(name, problem) for name, problem in problems.items()))
    x, between = (torch.randn(2, 8, h, 9) for h in heights)
    ran: list[str] = []
    status = ops.layer_status

    def run(x: Tensor) -> None:
        assert relative_error(convolve(x), wanted(x)) < 1e-5
        ran.append((fastconv.last_call() or {})["algorithm"])

    def interrupted() -> int:
        outcome = status()
        if outcome == ops.STATUS_PACK and not threads:
            threads.append(threading.Thread(target=run, args=(between,)))
            threads[0].start()
            threads[0].join()
        return int(outcome)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(ops, "layer_status", interrupted)
    for _ in range(3):
        run(x)
    assert len(threads) == 1
    assert sorted(ran) == sorted(["winograd_f4"] * 3 + [other])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch.cuda.is_available() is False")
@pytest.mark.parametrize("algorithm", PACKED)
class TestGraphs:
    @pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
    def test_a_replay_sees_the_weight_of_its_day(self, algorithm: str, warm: bool) -> None:
        layer = fastconv.Conv2d(8, 16, 3, padding=1, algorithm=algorithm, precision="fp32", device="cuda")
        x = torch.randn(2, 8, 13, 11, device="cuda")
        with torch.no_grad():
            fastconv.conv2d(x, layer.weight, layer.bias, padding=1, algorithm=algorithm, precision="fp32")
            if warm:
                check(layer, x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            assert bool(layer._fastconv.packed) == warm
            for _ in range(3):
                graph.replay()
                assert relative_error(y, reference(layer, x)) < 1e-5
                layer.weight.data.mul_(-2)
                layer.cuda()  # drops the cache; the graph still holds its addresses
                poison = [torch.full_like(layer.weight, float("nan")) for _ in range(64)]
                check(layer, x)
                del poison

    def test_two_streams(self, algorithm: str) -> None:
        layer = fastconv.Conv2d(64, 64, 3, padding=1, algorithm=algorithm, precision="fp32", device="cuda")
        x = torch.randn(8, 64, 56, 56, device="cuda")
        with torch.no_grad():
            expected = reference(layer, x)
            torch.cuda.synchronize()
            streams = [torch.cuda.Stream() for _ in range(3)]
            outputs = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    outputs.append(layer(x))
            layer.cuda()
            torch.cuda.synchronize()
            assert max(relative_error(y, expected) for y in outputs) < 1e-5


class Collecting(nn.Module):
    """Python collects in the middle of it, as it may anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        return x * 2


TRACERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "export": lambda module, x: torch.export.export(module, (x,), strict=False).module(),
    **{
        mode: lambda module, x, mode=mode: make_fx(module, tracing_mode=mode)(x)
        for mode in ("real", "fake", "symbolic")
    },
    "pre_dispatch": lambda module, x: make_fx(module, pre_dispatch=True)(x),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_layer_that_is_collected_while_something_is_traced_is_no_part_of_it(tracer: str) -> None:
    layer = fastconv.Conv2d(8, 8, 3, algorithm="implicit_gemm").requires_grad_(False)
    layer(torch.randn(1, 8, 9, 9))
    number = layer._fastconv.latest[1]
    assert len(ops.layer_packed(number)) == 2
    gc.collect()
    gc.disable()
    try:
        layer.cycle = [layer]
        del layer
        traced = TRACERS[tracer](Collecting(), torch.randn(3))
    finally:
        gc.enable()
    assert not [node for node in traced.graph.nodes if "layer_free" in str(node.target)]
    assert torch.equal(traced(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="expected what layer_new returned"):
        ops.layer_packed(number)

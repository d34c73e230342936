"""fastconv.Conv2d: it is an nn.Conv2d, and its packed weights are never stale."""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from layers import DEVICES, packed_algorithms, relative_error
from torch import Tensor, nn

import fastconv
import fastconv.nn

PACKED = packed_algorithms()


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """PyTorch's own convolution is the reference here: without TF32."""
    torch.manual_seed(0)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The algorithm of each convolution that ran from a packed weight."""
    calls: list[str] = []
    run = fastconv.nn.ops.conv2d_packed

    def spy(*args: object) -> Tensor:
        calls.extend(arg for arg in args if isinstance(arg, str) and arg in PACKED)
        return run(*args)

    monkeypatch.setattr(fastconv.nn.ops, "conv2d_packed", spy)
    return calls


def reference(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What nn.Conv2d computes from the layer's attributes as they are now."""
    return nn.Conv2d.forward(layer, x)


def check(layer: nn.Conv2d, x: Tensor, bound: float = 1e-5) -> Tensor:
    y = layer(x)
    assert relative_error(y, reference(layer, x)) < bound
    return y


CONFIGURATIONS = {
    "plain": {"padding": 1},
    "int_arguments": {"stride": 2, "padding": 2, "dilation": 2},
    "pairs": {"stride": (1, 2), "padding": (0, 1), "dilation": (2, 1)},
    "no_bias": {"bias": False},
    "groups": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4, "padding": 1},
    "same": {"padding": "same"},
    "same_dilated": {"padding": "same", "dilation": 2},
    "valid": {"padding": "valid"},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate_pairs": {"padding": (2, 1), "padding_mode": "replicate"},
    "circular_same": {"padding": "same", "padding_mode": "circular"},
}


class TestLayer:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("name", CONFIGURATIONS)
    def test_computes_what_nn_conv2d_computes(self, name: str, device: str) -> None:
        layer = fastconv.Conv2d(4, 8, 3, **CONFIGURATIONS[name], device=device)
        x = torch.randn(2, 4, 13, 11, device=device)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                check(layer, x)
                check(layer, x[0])
                check(layer, x.to(memory_format=torch.channels_last))
                check(layer, x[:0])

    @pytest.mark.parametrize("kernel", [2, (4, 3), (2, 5)])
    @pytest.mark.parametrize("mode", ["zeros", "reflect"])
    def test_same_padding_of_an_even_kernel_is_asymmetric(self, kernel: int | tuple[int, int], mode: str) -> None:
        layer = fastconv.Conv2d(3, 5, kernel, padding="same", padding_mode=mode)
        with torch.no_grad():
            check(layer, torch.randn(2, 3, 9, 7))
            check(layer, torch.randn(3, 9, 7))

    def test_constructor_and_state_dict_are_those_of_nn_conv2d(self) -> None:
        arguments = (4, 6, (3, 5), 2, (1, 2), 1, 2, True, "reflect", "cpu", torch.float64)
        torch.manual_seed(1)
        ours = fastconv.Conv2d(*arguments)
        torch.manual_seed(1)
        theirs = nn.Conv2d(*arguments)
        assert isinstance(ours, nn.Conv2d)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert all(
            torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        )
        assert repr(ours) == repr(theirs)
        theirs.load_state_dict(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())

    def test_settings_are_kept_and_shown(self) -> None:
        layer = fastconv.Conv2d(4, 6, 3, algorithm="direct", precision="ieee")
        assert (layer.algorithm, layer.precision) == ("direct", "ieee")
        assert "algorithm=direct, precision=ieee" in repr(layer)
        assert layer.last_algorithm is None
        assert layer.last_input_shape is None
        layer(torch.randn(1, 4, 5, 5))
        assert (layer.last_algorithm, layer.last_input_shape) == ("direct", (1, 4, 5, 5))

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"algorithm": "no_such"}, ValueError),
            ({"algorithm": None}, TypeError),
            ({"precision": "fp64"}, ValueError),
            ({"precision": 32}, TypeError),
        ],
    )
    def test_bad_settings_are_refused(self, arguments: dict, error: type[Exception]) -> None:
        with pytest.raises(error, match=next(iter(arguments))):
            fastconv.Conv2d(4, 6, 3, **arguments)

    @pytest.mark.parametrize("shape", [(2, 5, 9, 9), (2, 4, 1, 1), (4, 9), (1, 2, 4, 9, 9)])
    def test_bad_input_raises_as_in_nn_conv2d(self, shape: tuple[int, ...]) -> None:
        layer = fastconv.Conv2d(4, 6, 3)
        x = torch.randn(shape)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                with pytest.raises(Exception) as theirs:  # noqa: PT011
                    reference(layer, x)
                with pytest.raises(theirs.type):
                    layer(x)

    def test_a_dtype_of_pytorchs_alone_runs_there(self) -> None:
        layer = fastconv.Conv2d(4, 6, 3, dtype=torch.float64)
        with torch.no_grad():
            check(layer, torch.randn(1, 4, 7, 7, dtype=torch.float64), 1e-14)
        assert layer.last_algorithm == "torch"

    def test_a_named_algorithm_that_does_not_fit_raises(self) -> None:
        for name in PACKED:
            with pytest.raises(fastconv.UnsupportedError, match=name), torch.no_grad():
                fastconv.Conv2d(4, 6, 3, stride=3, algorithm=name)(torch.randn(1, 4, 9, 9))

    def test_attributes_may_be_changed_after_construction(self) -> None:
        layer = fastconv.Conv2d(4, 6, 3)
        x = torch.randn(1, 4, 9, 9)
        with torch.no_grad():
            check(layer, x)
            layer.stride, layer.padding = (2, 2), (1, 1)
            assert check(layer, x).shape == (1, 6, 5, 5)
            layer.bias = None
            check(layer, x)

    @pytest.mark.parametrize("algorithm", ["auto", "direct", *PACKED])
    def test_gradients_are_those_of_nn_conv2d(self, algorithm: str) -> None:
        layer = fastconv.Conv2d(4, 8, 3, padding=1, algorithm=algorithm)
        x = torch.randn(2, 4, 9, 7, requires_grad=True)
        with torch.no_grad():
            layer(x)  # a packed weight, if any, must not hide the weight from autograd
        wanted = [x, layer.weight, layer.bias]
        ours = torch.autograd.grad(layer(x).square().sum(), wanted)
        theirs = torch.autograd.grad(reference(layer, x).square().sum(), wanted)
        for a, b in zip(ours, theirs, strict=True):
            assert relative_error(a, b) < 1e-5

    @pytest.mark.parametrize("algorithm", ["auto", *PACKED])
    def test_function_transforms(self, algorithm: str) -> None:
        layer = fastconv.Conv2d(4, 8, 3, padding=1, algorithm=algorithm)
        x = torch.randn(3, 2, 4, 7, 7)
        parameters = {name: value.detach() for name, value in layer.named_parameters()}
        with torch.no_grad():
            layer(x[0])
            batched = torch.func.vmap(layer)(x)
            assert relative_error(batched, torch.stack([reference(layer, image) for image in x])) < 1e-5
            _, tangent = torch.func.jvp(layer, (x[0],), (x[1],))
            assert relative_error(tangent, torch.func.jvp(lambda v: reference(layer, v), (x[0],), (x[1],))[1]) < 1e-5

        def loss(values: dict[str, Tensor], forward: Callable[[Tensor], Tensor]) -> Tensor:
            if forward is layer:
                return torch.func.functional_call(layer, values, (x[0],)).square().sum()
            return nn.functional.conv2d(x[0], values["weight"], values["bias"], padding=1).square().sum()

        with torch.no_grad():
            ours = torch.func.grad(lambda values: loss(values, layer))(parameters)
            theirs = torch.func.grad(lambda values: loss(values, torch.relu))(parameters)
        for name in parameters:
            assert relative_error(ours[name], theirs[name]) < 1e-5

    def test_forward_mode_derivatives_are_not_lost(self) -> None:
        for name in ["auto", *PACKED]:
            layer = fastconv.Conv2d(4, 8, 3, algorithm=name)
            x, tangent = torch.randn(1, 4, 7, 7), torch.randn(1, 4, 7, 7)
            with torch.no_grad():
                layer(x)
            with torch.no_grad(), torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, tangent)
                ours = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
                theirs = torch.autograd.forward_ad.unpack_dual(reference(layer, dual)).tangent
            assert ours is not None
            assert relative_error(ours, theirs) < 1e-5

    def test_autocast(self) -> None:
        layer = fastconv.Conv2d(8, 8, 3, padding=1)
        x = torch.randn(1, 8, 9, 9)
        with torch.no_grad():
            layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                assert check(layer, x, 1e-2).dtype == torch.bfloat16
            assert check(layer, x).dtype == torch.float32

    def test_fx_tracing_and_fake_tensors(self) -> None:
        layer = fastconv.Conv2d(4, 8, 3, padding="same", padding_mode="reflect")
        x = torch.randn(2, 4, 9, 9)
        assert relative_error(torch.fx.symbolic_trace(nn.Sequential(layer))(x), reference(layer, x)) < 1e-5
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert layer(mode.from_tensor(x)).shape == (2, 8, 9, 9)

    def test_compile_and_export(self) -> None:
        layer = fastconv.Conv2d(4, 8, 3, padding=1)
        x = torch.randn(2, 4, 9, 9)
        with torch.no_grad():
            layer(x)
            compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
            assert relative_error(compiled(x), reference(layer, x)) < 1e-5
            layer.weight.data.mul_(2)
            assert relative_error(compiled(x[:, :, :7]), reference(layer, x[:, :, :7])) < 1e-5
            exported = torch.export.export(layer, (x,)).module()
            assert relative_error(exported(x), reference(layer, x)) < 1e-5

    def test_meta_device_and_to_empty(self) -> None:
        layer = fastconv.Conv2d(4, 8, 3, device="meta")
        assert layer(torch.empty(2, 4, 9, 9, device="meta")).shape == (2, 8, 7, 7)
        layer = layer.to_empty(device="cpu")
        layer.reset_parameters()
        check(layer, torch.randn(2, 4, 9, 9))


def replace_weight(layer: nn.Conv2d) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def replace_weight_by_another_shape(layer: nn.Conv2d) -> None:
    layer.weight = nn.Parameter(torch.randn(12, *layer.weight.shape[1:], device=layer.weight.device))
    layer.bias = nn.Parameter(torch.randn(12, device=layer.weight.device))


def add_in_place(layer: nn.Conv2d) -> None:
    with torch.no_grad():
        layer.weight.add_(torch.randn_like(layer.weight))


def change_one_element(layer: nn.Conv2d) -> None:
    layer.weight.data.view(-1)[-1] += 100


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
    "nan": lambda layer: layer.weight.data.view(-1)[0].fill_(float("inf")),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", PACKED)
class TestPackedWeight:
    def layer(self, algorithm: str, device: str) -> tuple[fastconv.Conv2d, Tensor]:
        layer = fastconv.Conv2d(8, 16, 3, padding=1, algorithm=algorithm, precision="fp32", device=device)
        return layer, torch.randn(2, 8, 13, 11, device=device)

    @pytest.mark.parametrize("mutation", MUTATIONS)
    def test_no_mutation_leaves_it_stale(
        self, algorithm: str, device: str, mutation: str, packed_calls: list[str]
    ) -> None:
        layer, x = self.layer(algorithm, device)
        with torch.no_grad():
            before = check(layer, x)
        MUTATIONS[mutation](layer)
        packed_calls.clear()
        with torch.no_grad():
            if mutation == "nan":
                layer(x)
                layer.weight.data.view(-1)[0] = 1.0
                after = check(layer, x)
            else:
                after = check(layer, x)
        assert packed_calls
        assert set(packed_calls) == {algorithm}
        assert after.shape != before.shape or relative_error(after, before) > 1e-4

    def test_it_is_used_in_inference_and_only_there(self, algorithm: str, device: str, packed_calls: list[str]) -> None:
        layer, x = self.layer(algorithm, device)
        check(layer, x)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            layer(x)
        with torch.no_grad():
            torch.func.vmap(layer)(x[None])
        assert packed_calls == []
        with torch.no_grad():
            check(layer, x)
            check(layer, x[0])
            check(layer, x.to(memory_format=torch.channels_last))
            check(layer, torch.randn(1, 8, 5, 30, device=device))
        assert packed_calls == [algorithm] * 4
        with torch.inference_mode():
            check(layer, x)
        layer.requires_grad_(False)
        check(layer, x)
        assert packed_calls == [algorithm] * 6
        check(layer, x.clone().requires_grad_())
        assert packed_calls == [algorithm] * 6

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
            assert len(layer._fastconv.choices) <= 64
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

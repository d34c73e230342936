"""fastconv.Conv2d: it is an nn.Conv2d."""

from collections.abc import Callable

import pytest
import torch
from layers import DEVICES, check, packed_algorithms, reference, relative_error
from torch import Tensor, nn

import fastconv

pytestmark = pytest.mark.usefixtures("full_precision")
PACKED = packed_algorithms()


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
                fastconv.Conv2d(4, 6, 3, algorithm=name).double()(torch.randn(1, 4, 9, 9, dtype=torch.float64))

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


@pytest.mark.parametrize("algorithm", ["auto", "torch", "direct", *PACKED])
def test_a_layer_that_has_seen_one_memory_format_answers_in_the_other(algorithm: str) -> None:
    layer, last = fastconv.Conv2d(8, 8, 3, padding=1, algorithm=algorithm), torch.channels_last
    inputs = [torch.randn(2, 8, 9, 7), torch.randn(2, 8, 9, 7).to(memory_format=last)]
    with torch.no_grad():
        for _ in range(2):
            for x in (*inputs, *inputs[::-1]):
                y = check(layer, x)
                wanted = last if layer.weight.is_contiguous(memory_format=last) else None
                wanted = wanted or (last if x.is_contiguous(memory_format=last) else torch.contiguous_format)
                assert y.is_contiguous(memory_format=wanted)
            layer.to(memory_format=last)

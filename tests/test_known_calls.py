"""`conv2d` with a weight that it knows: arguments that have been checked are not checked again, all others are."""

import pytest
import torch
import torch.nn.functional as F
from layers import relative_error

import fastconv
from fastconv import functional


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in ((2, 4, 7, 6), (8, 4, 3, 3), (8,)))  # type: ignore[return-value]


def known(**arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors of a call that has been made several times."""
    x, w, b = tensors()
    for _ in range(3):
        fastconv.conv2d(x, w, b, **arguments)  # type: ignore[arg-type]
    return x, w, b


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_a_call_like_the_last_one_is_not_resolved_again(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    arguments = {"stride": (1, 2), "padding": 1, "activation": "relu", "algorithm": algorithm}
    x, w, b = known(**arguments)

    def resolved(*_: object) -> None:
        raise AssertionError("resolved again")

    monkeypatch.setattr(functional, "resolved_conv2d", resolved)
    w.mul_(2)
    residual = torch.randn(2, 8, 7, 3)
    for batch in (x, x[:1], x[0], x.to(memory_format=torch.channels_last)):
        y = fastconv.conv2d(batch, w, b, **arguments)
        close(y, F.relu(F.conv2d(batch, w, b, (1, 2), 1)))
    close(
        fastconv.conv2d(x, w, None, residual=residual, **arguments), F.relu(F.conv2d(x, w, None, (1, 2), 1) + residual)
    )
    with pytest.raises(AssertionError, match="resolved again"):
        fastconv.conv2d(x, w, b, **arguments | {"padding": 0})


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"stride": True}, TypeError, "stride is True"),
        ({"groups": True}, TypeError, "groups is True"),
        ({"dilation": (True, 1)}, TypeError, "dilation is True"),
        ({"dilation": 1.0}, TypeError, "dilation is 1.0"),
        ({"residual_after": 0}, TypeError, "residual_after is 0"),
        ({"max_pool": 0}, TypeError, "max_pool is 0"),
        ({"precision": "fp64"}, ValueError, "precision is 'fp64'"),
        ({"max_error": 0}, ValueError, "max_error is 0"),
        ({"residual": torch.zeros(8, 5, 4)}, RuntimeError, "residual has shape"),
        ({"residual": torch.zeros(2, 8, 5, 5)}, RuntimeError, "residual has shape"),
        ({"bias": 1}, TypeError, "bias is a int"),
        ({"input": [1]}, TypeError, "input is a list"),
        ({"input": torch.zeros(2, 3, 7, 6)}, RuntimeError, "channels"),
        ({"input": torch.zeros(2, 4, 7, 6).half()}, RuntimeError, "float16"),
    ],
)
def test_a_mistake_behind_a_call_that_was_right(wrong: dict, error: type[Exception], text: str) -> None:
    """Values that are equal to the right ones are mistakes where their types are."""
    x, w, _ = known()
    fastconv.conv2d(x, w)
    fastconv.conv2d(x, w)
    with pytest.raises(error, match=text):
        fastconv.conv2d(**{"input": x, "weight": w} | wrong)
    close(fastconv.conv2d(x, w), F.conv2d(x, w))


def test_a_list_may_have_changed() -> None:
    padding = [1, 1]
    x, w, b = known(padding=padding)
    padding[1] = 2
    close(fastconv.conv2d(x, w, b, padding=padding), F.conv2d(x, w, b, padding=(1, 2)))


def test_a_weight_may_have_become_another() -> None:
    x, w, b = known(padding="same")
    w.data = torch.randn(8, 4, 5, 5)
    close(fastconv.conv2d(x, w, b, padding="same"), F.conv2d(x, w, b, padding="same"))
    x, w, _ = known()
    fastconv.conv2d(x, w)
    w.data, x = torch.randint(-3, 3, (8, 4, 3, 3)), torch.randint(-3, 3, (2, 4, 7, 6))
    assert torch.equal(fastconv.conv2d(x, w), F.conv2d(x, w))


def test_two_calls_of_one_weight_in_turns() -> None:
    x, w, b = tensors()
    for _ in range(3):
        for stride in (1, 2):
            close(fastconv.conv2d(x, w, b, stride), F.conv2d(x, w, b, stride))
            close(fastconv.conv2d(x, w, b, stride, activation="silu"), F.silu(F.conv2d(x, w, b, stride)))


def test_a_sparse_input_is_refused_as_by_pytorch() -> None:
    x, w, b = known()
    for function in (F.conv2d, fastconv.conv2d):
        with pytest.raises((RuntimeError, NotImplementedError)):
            function(x.to_sparse(), w, b)


@pytest.mark.parametrize("lower", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm", "torch"])
def test_a_weight_that_is_trained(algorithm: str, lower: torch.dtype | None) -> None:
    """At other sizes, with another bias or none, written in place, trained no more."""
    x, w, b = tensors()
    w.requires_grad_()

    def both(x: torch.Tensor, bias: torch.Tensor | None, padding: int = 1) -> None:
        found = []
        for conv2d in (fastconv.conv2d, F.conv2d):
            own, named = x.clone().requires_grad_(), {"algorithm": algorithm} if conv2d is fastconv.conv2d else {}
            with torch.autocast("cpu", lower, enabled=lower is not None):
                y = conv2d(own, w, bias, padding=padding, **named)  # type: ignore[operator]
            ran = fastconv.last_call() or {}  # no gradient's
            if named:
                assert ran["class"] == ("fp32" if lower is None else "bf16")
                assert algorithm in ("auto", ran["algorithm"])
            asked = (own, w) if w.requires_grad else (own,)
            found.append((y, *torch.autograd.grad((y.float() ** 2).sum(), asked)))
        for ours, expected in zip(*found, strict=True):
            assert ours.dtype == expected.dtype
            if lower is None:
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)
            else:  # of values that nearly cancel nothing is left beside the others' roundings
                assert relative_error(ours.double(), expected.double()) < 0.02

    for _ in range(4):
        both(x, b)
    both(x[:1], b)
    both(x.to(memory_format=torch.channels_last), None)
    both(x, b, padding=2)
    with torch.no_grad():
        w.mul_(3)
    both(x, b)
    both(x[0], b)
    w.requires_grad_(False)
    both(x, b)


@pytest.mark.parametrize("algorithm", ["winograd_f2", "null"])
def test_a_name_that_does_not_fit_is_said_in_every_call(algorithm: str) -> None:
    x, w = torch.randn(2, 8, 12, 12), torch.randn(16, 8, 5, 5, requires_grad=True)
    for _ in range(4):
        with pytest.raises(fastconv.UnsupportedError, match=algorithm):
            fastconv.conv2d(x, w, algorithm=algorithm)

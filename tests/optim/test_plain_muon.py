"""`em.Muon` on a plain model against `torch.optim.Muon` on each matrix, and the parameters that it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.errors import ConfigError


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_torch(start: Tensor, gradients: list[Tensor], **options: Any) -> Tensor:
    """A stack of matrices after a step with each gradient, where each matrix is a parameter of torch's Muon."""
    matrices = [nn.Parameter(matrix.clone()) for matrix in start.flatten(0, -3)]
    muon = torch.optim.Muon(matrices, **options)
    for gradient in gradients:
        for matrix, part in zip(matrices, gradient.flatten(0, -3), strict=True):
            matrix.grad = part.contiguous()
        muon.step()
    return torch.stack([matrix.detach() for matrix in matrices]).view_as(start)


def channels_last(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def transposed(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.mT.contiguous().mT


@pytest.mark.parametrize("change", [channels_last, transposed])
@pytest.mark.parametrize("before", [True, False])
def test_the_layout_of_a_parameter_does_not_change_its_update(
    change: Callable[[nn.Parameter], None], before: bool
) -> None:
    start, gradients = drawn(3, 4, 5, 6), [drawn(3, 4, 5, 6, seed=1 + step) for step in range(3)]
    parameter = nn.Parameter(start.clone())
    if before:
        change(parameter)
    muon = em.Muon([parameter], lr=0.02)
    if not before:
        change(parameter)
    for gradient in gradients:
        parameter.grad = gradient.clone().as_strided(parameter.shape, parameter.stride()).copy_(gradient)
        muon.step()
    assert not parameter.is_contiguous()
    assert torch.equal(parameter, by_torch(start, gradients, lr=0.02))


def test_a_transposed_parameter_of_a_later_group_is_updated_as_by_torch() -> None:
    start, gradient = drawn(1, 6, 4), drawn(1, 6, 4, seed=1)
    first, later = nn.Parameter(drawn(2, 2)), nn.Parameter(start[0].T.contiguous().T)
    assert not later.is_contiguous()
    muon = em.Muon([first], lr=0.02)
    muon.add_param_group({"params": [later]})
    later.grad = gradient[0].clone()
    muon.step()
    assert torch.equal(later, by_torch(start, [gradient], lr=0.02)[0])


def test_a_parameter_without_elements_is_left_as_it_is() -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((4, 0), (0, 4), (0, 2, 2))]
    muon = em.Muon([*parameters, nn.Parameter(torch.zeros(2, 2))])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    muon.step()


def polynomial(update: Tensor, steps: int) -> Tensor:
    """The iteration on the singular values of a matrix, in fp64: U p(S) V^T."""
    a, b, c = 3.4445, -4.7750, 2.0315
    left, values, right = torch.linalg.svd(update.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


SHAPES = [(5, 16, 32), (5, 32, 16), (3, 64, 64), (600, 20, 24), (2, 300, 900), (7, 1, 9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_iteration_in_fp32_is_that_of_the_singular_values(shape: tuple[int, ...]) -> None:
    """The first step: the momentum is 0.05 of the gradient, and the update a multiple of it."""
    start, gradient = drawn(*shape), drawn(*shape, seed=1)
    found = {}
    for ns_dtype in ("fp32", "bf16"):
        parameter = nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        em.Muon([parameter], lr=1.0, weight_decay=0.0, adjust_lr_fn=None, ns_dtype=ns_dtype).step()
        scaled = max(1.0, shape[1] / shape[2]) ** 0.5
        found[ns_dtype] = (start - parameter.detach()).double() / scaled
    for number, matrix in enumerate(gradient):
        wanted = polynomial(matrix, 5)
        error = {name: ((moved[number] - wanted).norm() / wanted.norm()).item() for name, moved in found.items()}
        assert error["fp32"] <= 1e-5, number
        assert error["bf16"] >= 1e-4, "else the option has no use"


def test_matrices_of_a_stack_in_fp32_are_as_if_each_were_by_itself() -> None:
    start, gradients = drawn(40, 24, 40), [drawn(40, 24, 40, seed=1 + step) for step in range(3)]
    stack, single = nn.Parameter(start.clone()), [nn.Parameter(matrix.clone()) for matrix in start]
    both = em.Muon([stack], lr=0.02, ns_dtype="fp32"), em.Muon(single, lr=0.02, ns_dtype="fp32")
    for gradient in gradients:
        stack.grad = gradient.clone()
        for parameter, part in zip(single, gradient, strict=True):
            parameter.grad = part.clone()
        for muon in both:
            muon.step()
    torch.testing.assert_close(stack.detach(), torch.stack([one.detach() for one in single]), rtol=1e-6, atol=1e-6)


REFUSED: dict[str, tuple[Tensor, dict[str, Any], str]] = {
    "one dim": (torch.zeros(4), {}, r"updates matrices, and a parameter has the shape \(4,\)"),
    "complex": (torch.zeros(4, 4, dtype=torch.complex64), {}, "updates real matrices, and .* is complex: give it to"),
    "a number that is not whole": (torch.zeros(4, 4), {"split_rows": 2.0}, "split_rows=2.0: expected the number of"),
    "a string": (torch.zeros(4, 4), {"split_rows": "ab"}, "split_rows='ab': expected the number of equal parts, or"),
    "a tensor": (torch.zeros(4, 4), {"split_rows": torch.tensor([2, 2])}, r"split_rows=tensor.*: expected the number"),
    "fractions": (torch.zeros(4, 4), {"split_rows": (2.0, 2.0)}, r"split_rows=\(2.0, 2.0\): expected the number"),
    "no rows": (torch.zeros(4, 4), {"split_rows": (4, 0)}, r"split_rows=\(4, 0\) does not make up the 4"),
    "a dtype": (torch.zeros(4, 4), {"ns_dtype": torch.float32}, "ns_dtype=torch.float32: expected 'bf16', as in torch"),
    "columns": (torch.zeros(4, 4), {"split_columns": "ab"}, "split_columns='ab': expected the number of equal parts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_group_without_matrices_is_refused_and_not_added(case: str) -> None:
    value, options, message = REFUSED[case]
    muon = em.Muon([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ConfigError, match=message):
        muon.add_param_group({"params": [nn.Parameter(value)], **options})
    assert len(muon.param_groups) == 1
    with pytest.raises(ConfigError, match=message):
        em.Muon([{"params": [nn.Parameter(value)], **options}])

"""The oracle of every wrapped run: the same model in one process under plain torch, step by step.

Tolerance. fp32 throughout; the wrapped run differs from the plain one in the order of sums over ranks, experts and
micro-batches and in the norm's. A gradient element g of size up to 1 carries an error of a few ulps, 1e-7 *
sqrt(terms); Adam divides by sqrt(v) + eps, so where |g| is near eps = 1e-8 times that error the step, at most lr, may
turn. With eps = 1e-4 in these tests the update is smooth: |d step| <= lr * |dg| / eps = 1e-2 * 3e-7 / 1e-4 = 3e-5 a
step.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import elixir_moe as em
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.support.cases import placed

STEPS = 5
ROWS = 4
LR = 1e-2
TOLERANCE = 5 * 3e-5
LOSS_TOLERANCE = 2e-5


def mesh_of_world(tp: int = 1) -> DeviceMesh:
    """The mesh of all ranks."""
    return em.init_mesh(tp, device_type="cpu")


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=LR, eps=1e-4
    )


def tokens(step: int, micro: int, seq_len: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randint(vocab, (ROWS, seq_len + 1), generator=generator)


def run(
    model: nn.Module,
    optimizer: Any,
    config: GPTConfig,
    accumulation: int,
    clip: float | None,
    rank: int = 0,
    world: int = 1,
    *,
    at_once: bool = False,
) -> dict[str, list[float]]:
    """The same training loop for the plain and the wrapped model; with `at_once`, by `em.accumulate`."""
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    losses, norms = [], []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        total = 0.0
        batches = [tokens(step, n, config.seq_len, config.vocab_size)[rows] for n in range(accumulation)]
        if at_once:
            total = sum(loss.item() / accumulation for loss in em.accumulate(model, lm_loss, batches))
        for batch in () if at_once else batches:
            loss = lm_loss(model, batch) / accumulation
            loss.backward()
            total += loss.item()
        if clip is not None:
            plain = not hasattr(optimizer, "clip_grad_norm_")
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if plain else optimizer.clip_grad_norm_(clip)
            norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
    return {"loss": losses, "norm": norms}


def plain(config: GPTConfig, accumulation: int, clip: float | None) -> dict[str, Any]:
    """The oracle."""
    torch.manual_seed(5)
    model = GPT(config)
    result: dict[str, Any] = run(model, make_optimizer(model), config, accumulation, clip)
    result["state"] = {name: value.clone() for name, value in model.state_dict().items()}
    return result


def wrapped(
    config: GPTConfig,
    plan: em.Plan,
    accumulation: int,
    clip: float | None,
    tp: int = 1,
    *,
    at_once: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The same run under `plan` on this rank."""
    mesh = mesh_of_world(tp)
    torch.manual_seed(5)
    model = GPT(config, mesh)
    em.annotate(model, gpt_patterns(model))
    model, optimizer = em.wrap(
        model,
        make_optimizer(model),
        plan=placed(plan),
        **options,
    )
    place = mesh.get_local_rank("dp"), mesh.size(0)
    result: dict[str, Any] = run(model, optimizer, config, accumulation, clip, *place, at_once=at_once)
    losses = torch.tensor(result["loss"], dtype=torch.float64)
    dist.all_reduce(losses)
    result["loss"] = (losses / dist.get_world_size()).tolist()
    result["state"] = em.full_state_dict(model, all_ranks=True)
    result["statistics"] = em.inspect(model).statistics.as_dict()
    assert em.inspect(model).schedule is not None
    result["least_blocks"] = em.inspect(model).schedule.least_blocks()
    result["chunks"] = len(em.inspect(model).layout.cached)
    optimizer.close()
    del model, optimizer
    gc.collect()  # hooks and model point at each other, and a process group costs threads until it is freed
    return result


def trained(
    build: Callable[[], tuple[nn.Module, Any]],
    backward: Callable[[Any, int], object],
    plan: em.Plan | None,
    steps: int,
    *,
    after: Callable[[nn.Module], nn.Module] = lambda model: model,
    between: Callable[[nn.Module], float] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The weights after some steps, and the gradient norm of each; under plain torch if `plan` is None.

    Args:
        build: makes the model and its optimizer; torch's generator is seeded before.
        backward: ``backward(model, step)`` brings gradients, wrapped of this rank's part of the rows.
        plan: of `wrap`.
        steps: how many.
        after: what is done to the model after `wrap`.
        between: what is done before and after each step; what it returns counts as a norm.
        options: of `wrap` too.
    """
    torch.manual_seed(1)
    model, optimizer = build()
    if plan is not None:
        model, optimizer = em.wrap(model, optimizer, plan=placed(plan), **options)
    model = after(model)
    norms = [] if between is None else [between(model)]
    for step in range(steps):
        backward(model, step)
        clip = partial(nn.utils.clip_grad_norm_, model.parameters()) if plan is None else optimizer.clip_grad_norm_
        norms.append(clip(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        norms += [] if between is None else [between(model)]
    if plan is None:
        return {"norms": norms, "state": model.state_dict()}
    result = {"norms": norms, "state": em.full_state_dict(model, all_ranks=True)}
    optimizer.close()
    del model, optimizer, clip
    gc.collect()
    return result


def assert_alike(found: dict[str, Any], wanted: dict[str, Any], case: object, tolerance: float, **norms: float) -> None:
    """Compares what `trained` gave: weights within `tolerance`, norms as `pytest.approx` is told."""
    assert found["norms"] == pytest.approx(wanted["norms"], **norms), case
    assert set(found["state"]) == set(wanted["state"]), case
    for name, value in wanted["state"].items():
        torch.testing.assert_close(
            found["state"][name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{case}: {name}: {text}"
        )


def compare(found: dict[str, Any], wanted: dict[str, Any], case: str, tolerance: float = TOLERANCE) -> float:
    """Asserts equality of loss, norm and parameters; returns the largest parameter error."""
    for key in ("loss", "norm"):
        torch.testing.assert_close(
            torch.tensor(found[key]),
            torch.tensor(wanted[key]),
            rtol=LOSS_TOLERANCE,
            atol=LOSS_TOLERANCE,
            msg=lambda text, key=key: f"{case}: {key}: {text}\n{found[key]}\n{wanted[key]}",
        )
    assert set(found["state"]) == set(wanted["state"]), case
    worst = 0.0
    for name, value in wanted["state"].items():
        assert found["state"][name].shape == value.shape, f"{case}: {name}"
        assert found["state"][name].dtype == value.dtype, f"{case}: {name}"
        worst = max(worst, (found["state"][name] - value).abs().max().item())
        torch.testing.assert_close(
            found["state"][name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{case}: {name}: {text}"
        )
    return worst


def collect(cases: list[tuple[str, Callable[[], dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """Runs named cases one after another."""
    return {name: case() for name, case in cases}

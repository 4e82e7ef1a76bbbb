"""Training steps that are compared with plain torch on the same device, for the tests of GPUs and for the sanitizer.

Owns the models, the plans and the comparison; a rank of a pool runs it, so that a crash ends nothing else. Run as a
program it takes some steps under the plans that move most, for ``TORCH_CUDA_SANITIZER=1``.

Tolerances. fp32 is as in `parity`: sums in another order. In bf16 all weights have fp32 masters, and gradients are
rounded to 8 bits: an element below 0.1 by 2^-9 * 0.1 at most, where the value before was not the same to the bit (an
update on the CPU, a product of operands that are aligned otherwise). With eps = 1e-3 beside sqrt(v) an update, of size
lr = 1e-2, moves by lr * 2^-9 * 0.1 / 1e-3 = 2e-3 at most a step. In bf16 every token goes to all experts, since the
choice of a few is not continuous.
"""

import copy
import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import elixir_moe as em
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.support import parity
from tests.support.cases import placed

STEPS, ROWS, LR, CLIP = 3, 4, 1e-2, 0.5
CHUNK = 4096
DENSE = GPTConfig(vocab_size=64, seq_len=16, n_layers=3, d_model=32, n_heads=2, mlp_ratio=1)
MIXTURE = replace(DENSE, experts=(0, 4, 4), ep=(1, 1, 1), top_k=2, residual=True)
MODELS = {"dense": DENSE, "mixture": MIXTURE}
ADAPTED = replace(DENSE, n_layers=4, experts=(0,) * 4, ep=(1,) * 4)
"""Its first two blocks are frozen, and its MLPs are tiled where it is wrapped."""
EPS = {torch.float32: 1e-4, torch.bfloat16: 1e-3}
TOLERANCE = {torch.float32: STEPS * 3e-5, torch.bfloat16: STEPS * 2e-3}
LOSS_TOLERANCE = {torch.float32: parity.LOSS_TOLERANCE, torch.bfloat16: 1e-2}
DISK = "offload, some on disk"
NEAR = "offload, values on the device"
PLANS: dict[str, Callable[[], em.Plan | em.AutoPlan]] = {
    "ddp": em.Plan.ddp,
    "zero2": lambda: em.Plan.zero2(chunk_numel=CHUNK),
    "zero3": lambda: em.Plan.zero3(chunk_numel=CHUNK),
    "offload": lambda: em.Plan.offload(chunk_numel=CHUNK),
    "offload, some on the device": lambda: em.Plan.offload(device_chunks=3, chunk_numel=CHUNK),
    DISK: lambda: em.Plan.offload(device_chunks=2, disk_chunks=2, chunk_numel=CHUNK),
    "zero3, inputs on the host": lambda: replace(em.Plan.zero3(chunk_numel=CHUNK), host_checkpoints="all"),
    "offload, all on disk": lambda: em.Plan.offload(disk_chunks=99, chunk_numel=CHUNK),
    "offload, values on disk": lambda: em.Plan.offload(disk_chunks=99, values_on_disk=True, chunk_numel=CHUNK),
    NEAR: lambda: em.Plan.offload(device_chunks=2, disk_chunks=2, values_on_device=True, chunk_numel=CHUNK),
    "auto": lambda: em.Plan.auto(lm_loss, torch.zeros(ROWS, DENSE.seq_len + 1, dtype=torch.int64), budget="4 GiB"),
}
LOOPS = ((1, "none"), (2, "non_reentrant"), (1, "reentrant"))
PASSES = ((3, "none"), (2, "non_reentrant"), (3, "reentrant"))
"""(micro-batches of a step, activation checkpointing), of a plain loop and of passes."""


def config_of(model: str, dtype: torch.dtype, checkpoint: Any = "none") -> GPTConfig:
    config = replace(ADAPTED if model == "adapted" else MODELS[model], checkpoint=checkpoint)
    return replace(config, top_k=4) if model == "mixture" and dtype is torch.bfloat16 else config


def build(config: GPTConfig, mesh: Any = None) -> GPT:
    model = GPT(config, mesh)
    if config.n_layers == ADAPTED.n_layers:
        model.blocks[:2].requires_grad_(False)
    return model


def optimizer_of(model: nn.Module, dtype: torch.dtype) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, eps=EPS[dtype])


def tokens(step: int, micro: int, device: str) -> Tensor:
    return parity.tokens(step, micro, DENSE.seq_len, DENSE.vocab_size).to(device)


def plain(config: GPTConfig, dtype: torch.dtype, accumulation: int, device: str) -> dict[str, Any]:
    """The oracle: fp32 masters in torch's AdamW; a copy in the compute dtype runs forward and backward."""
    torch.manual_seed(5)
    master = build(config).to(device)
    model = copy.deepcopy(master).to(dtype)
    optimizer = optimizer_of(master, dtype)
    both = zip(master.parameters(), model.parameters(), strict=True)
    pairs = [(p, q) for p, q in both if p.requires_grad]
    losses, norms = [], []
    for step in range(STEPS):
        for p, _ in pairs:
            p.grad = torch.zeros_like(p)
        for micro in range(accumulation):
            loss = lm_loss(model, tokens(step, micro, device)) / accumulation
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            for p, q in pairs:
                p.grad += q.grad.float()
        norms.append(nn.utils.clip_grad_norm_([p for p, _ in pairs], CLIP).item())
        optimizer.step()
        with torch.no_grad():
            for p, q in pairs:
                q.copy_(p)
    return {"losses": losses, "norms": norms, "state": master.state_dict()}


def wrap(config: GPTConfig, plan: em.Plan | em.AutoPlan, dtype: torch.dtype, device: str) -> tuple[GPT, Any]:
    mesh = em.init_mesh(device_type=device)
    torch.manual_seed(5)
    model = build(config, mesh)
    em.annotate(model, gpt_patterns(model))
    if config.n_layers == ADAPTED.n_layers:
        em.tile(model, at_most=CHUNK * 2)
    plan = placed(plan) if isinstance(plan, em.Plan) else plan
    narrower = None if dtype is torch.float32 else dtype
    return em.wrap(model, optimizer_of(model, dtype), plan=plan, compute_dtype=narrower, device=device)


def train(
    model: GPT, optimizer: Any, steps: range, accumulation: int, device: str, *, one_pass: bool = False
) -> dict[str, Any]:
    """Steps of a wrapped model on this rank's rows. The host reads nothing before the end, and so runs ahead."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    batches = [[tokens(step, micro, device)[rows] for micro in range(accumulation)] for step in steps]
    losses, norms = [], []
    for batch in batches:
        if one_pass:
            losses += [loss / accumulation for loss in em.accumulate(model, lm_loss, batch)]
        else:
            for micro in batch:
                loss = lm_loss(model, micro) / accumulation
                loss.backward()
                losses.append(loss.detach())
        norms.append(optimizer.clip_grad_norm_(CLIP))
        optimizer.step()
        optimizer.zero_grad()
    whole = torch.stack(losses).cpu()
    dist.all_reduce(whole)
    return {"losses": (whole / world).tolist(), "norms": [norm.item() for norm in norms]}


def wrapped(
    config: GPTConfig, plan: Any, dtype: torch.dtype, accumulation: int, device: str, *, one_pass: bool = False
) -> dict[str, Any]:
    model, optimizer = wrap(config, plan, dtype, device)
    assert {p.device.type for p in model.parameters()} == {device}
    result = train(model, optimizer, range(STEPS), accumulation, device, one_pass=one_pass)
    result["state"] = em.full_state_dict(model, all_ranks=True)
    close(optimizer)
    return result


def close(optimizer: Any) -> None:
    optimizer.close()
    gc.collect()


def compare(found: dict[str, Any], wanted: dict[str, Any], dtype: torch.dtype, case: str) -> None:
    for name in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(found[name]),
            torch.tensor(wanted[name]),
            rtol=LOSS_TOLERANCE[dtype],
            atol=LOSS_TOLERANCE[dtype],
            msg=lambda text, name=name: f"{case}: {name}: {text}\n{found[name]}\n{wanted[name]}",
        )
    assert set(found["state"]) == set(wanted["state"]), case
    for name, value in wanted["state"].items():
        torch.testing.assert_close(
            found["state"][name].cpu(),
            value.cpu(),
            rtol=0,
            atol=TOLERANCE[dtype],
            msg=lambda text, name=name: f"{case}: {name}: {text}",
        )


def trains_as_plain_torch(
    model: str,
    plan: str,
    dtype: torch.dtype,
    device: str,
    *,
    oracle: str | None = None,
    loops: Sequence[tuple[int, str]] = LOOPS,
    one_pass: bool = False,
) -> None:
    """Losses, norms and all parameters after every loop's steps; plain torch runs on `oracle`, or on `device` too.

    With `one_pass`, the micro-batches of a step pass each layer together.
    """
    for accumulation, checkpoint in loops:
        config = config_of(model, dtype, checkpoint)
        found = wrapped(config, PLANS[plan](), dtype, accumulation, device, one_pass=one_pass)
        wanted = plain(config, dtype, accumulation, oracle or device)
        compare(found, wanted, dtype, f"{model}, {plan}, {dtype}, {accumulation} micro-batches, {checkpoint}")


def saves_and_loads(plan: str, other: str, device: str, folder: str) -> None:
    """What is saved under one plan and loaded under another is the same to the bit, and trains on alike."""
    config = config_of("mixture", torch.float32)
    model, optimizer = wrap(config, PLANS[plan](), torch.float32, device)
    train(model, optimizer, range(2), 1, device)
    em.save(folder, model, optimizer)
    saved = em.full_state_dict(model, all_ranks=True)
    on = train(model, optimizer, range(2, STEPS), 1, device) | {"state": em.full_state_dict(model, all_ranks=True)}
    close(optimizer)
    model, optimizer = wrap(config, PLANS[other](), torch.float32, device)
    em.load(folder, model, optimizer)
    loaded = em.full_state_dict(model, all_ranks=True)
    assert set(loaded) == set(saved)
    for name, value in saved.items():
        assert torch.equal(loaded[name].cpu(), value.cpu()), name
    again = train(model, optimizer, range(2, STEPS), 1, device)
    compare(again | {"state": em.full_state_dict(model, all_ranks=True)}, on, torch.float32, f"{plan} to {other}")
    close(optimizer)


def main() -> int:
    """A few steps of the mixture under the plans that move most, and a save."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fp32, bf16 = torch.float32, torch.bfloat16
    for plan, dtype in (("zero3", bf16), ("offload", fp32), ("offload, some on the device", bf16), (DISK, bf16)):
        with set_checkpoint_early_stop(False):  # its exception is on the way where the sanitizer imports
            wrapped(config_of("mixture", dtype, "non_reentrant"), PLANS[plan](), dtype, 2, device)
        print(f"{plan}, {dtype}: {STEPS} steps", flush=True)
    if find_spec("blake3") is None:
        print("no save: checkpoints need blake3", flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        saves_and_loads("offload", "zero3", device, str(Path(folder) / "saved"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

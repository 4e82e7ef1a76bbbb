"""A difference of a peer as a script that needs torch and the peer alone.

Owns its text. The script trains the model that was verified, by the peer and in plain PyTorch on each rank, up to the
step that differed, and compares what `certificate` compares, by the same bounds. It knows nothing of this library.
"""

import re
from pprint import pformat
from typing import Any

from elixir_tools.verify.cases import FIRST_WORD, Function, HuggingFace, Source
from elixir_tools.verify.certificate import GRADIENT, GRADIENT_OF_ALL, LOSS, WEIGHT, Check
from elixir_tools.verify.training import CLIP, DECAY, GROUPS, SEED, Setup
from tests.certificate.peers import Peer, stage_of

_HUGGING_FACE = """\
import transformers
CONFIG = {settings}
def build():
    config = transformers.AutoConfig.for_model(CONFIG["model_type"]).from_dict(CONFIG)
    config.use_cache = False
    return transformers.{architecture}(config).train()
def loss_of(model, batch):
    return model(**batch).loss
def sample():
    words = torch.randint({first}, {vocabulary}, ({rows}, {length}))
    return {{"input_ids": words, "labels": words}}
"""
_FUNCTION = """\
from {module} import {name}
_, loss_of, sample = {name}()
def build():
    return {name}()[0].train()
"""

_DDP = """\
runs = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
"""
_FSDP2 = """\
import torch.distributed.fsdp
lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
for name in lists:
    if not any(name.startswith(other + ".") for other in lists):
        for block in model.get_submodule(name).children():
            torch.distributed.fsdp.fully_shard(block)
runs = torch.distributed.fsdp.fully_shard(model)
"""
_HF_EP = """\
import math
if rank == 0:
    model.save_pretrained("plain-model")
dist.barrier()
counts = [m.num_experts for m in model.modules() if isinstance(getattr(m, "num_experts", None), int)]
spread = transformers.DistributedConfig(fsdp_size=ranks, ep_size=math.gcd(ranks, *counts))
runs = model = type(model).from_pretrained("plain-model", dtype=torch.float32, distributed_config=spread).train()
"""
_OF_TORCH = """\
optimizer = adamw(model)
def backward(loss, last):
    (loss / MICRO).backward()
def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value
def gradient(p):
    return whole(p.grad)
def weight(p):
    return whole(p.detach())
def update():
    norm = {clip}(model.parameters(), {bound})
    optimizer.step()
    optimizer.zero_grad()
    return float(whole(norm))
"""
_DEEPSPEED = """\
import os
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param as weight, safe_get_full_grad as gradient
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
settings = {{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO, "gradient_clipping": {bound},
            "zero_optimization": {{"stage": {stage}}}, "zero_allow_untested_optimizer": True}}
optimizer = adamw(model)
runs, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
def backward(loss, last):
    runs.backward(loss)
    if not last:
        runs.step()
def update():
    runs.step()
    return float(runs.get_global_grad_norm())
"""
_TEXT = '''\
"""{peer} differs from plain PyTorch: {difference}

Run it with: torchrun --nproc-per-node {ranks} FILE    (seen with {versions})
"""
import torch
import torch.distributed as dist
{model}
STEPS, MICRO = {steps}, {micro}
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed({seed})
model = build()
torch.manual_seed({seed})
plain = build()
def adamw(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=trained[i::{kinds}], **options) for i, options in enumerate({groups})]
    return torch.optim.AdamW([group for group in groups if group["params"]])
{way}
expected = adamw(plain)
schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: {decay}**step) for one in (optimizer, expected)]
def compare(what, mine, wanted, allowed):
    if not abs(mine - wanted) <= allowed:
        raise SystemExit(f"{{what}} differs: {{mine:.6g}} by the peer, {{wanted:.6g}} plain, allowed {{allowed:.2g}}")
for step in range(STEPS):
    losses = torch.zeros(2, dtype=torch.float64)
    for micro in range(MICRO):
        torch.manual_seed(1000 * step + micro)
        batch = sample()
        if isinstance(batch, dict):
            parts = [{{k: v.chunk(ranks)[part] for k, v in batch.items()}} for part in range(ranks)]
        else:
            parts = batch.chunk(ranks)
        loss = loss_of(runs, parts[rank])
        backward(loss, micro + 1 == MICRO)
        losses[0] += loss.detach() / (MICRO * ranks)
        for part in parts:
            loss = loss_of(plain, part) / (MICRO * ranks)
            loss.backward()
            losses[1] += loss.detach() / ranks
    dist.all_reduce(losses)
    mine, wanted = losses.tolist()
    compare(f"step {{step + 1}}: loss", mine, wanted, {loss} * (1 + abs(wanted)))
    pairs = [(name, p, q) for (name, p), q in zip(model.named_parameters(), plain.parameters()) if q.grad is not None]
    norm = sum(float(q.grad.norm()) ** 2 for *_, q in pairs) ** 0.5
    for name, p, q in pairs:
        found, wanted = gradient(p), float(q.grad.norm())
        found = 0.0 if found is None else float(found.norm())
        allowed = {gradient} * wanted + {of_all} * norm
        compare(f"step {{step + 1}}: norm of the gradient of {{name}}", found, wanted, allowed)
    compare(f"step {{step + 1}}: global norm", update(), norm, {loss} * (1 + norm))
    torch.nn.utils.clip_grad_norm_(plain.parameters(), {bound})
    expected.step()
    for name, p, q in pairs:
        far = float((weight(p) - q.detach()).abs().max())
        compare(f"step {{step + 1}}: the largest difference of {{name}}", far, 0.0, {weight} * (step + 1))
    expected.zero_grad()
    for schedule in schedules:
        schedule.step()
print("nothing differs")
'''


def script_of(setup: Setup, failed: Check, versions: dict[str, str]) -> str | None:
    """The script for the first difference of a peer; None where it is not in a step before the save."""
    step = re.search(r" in step (\d+)$| of step (\d+)$", failed.name)
    if step is None:
        return None
    assert isinstance(setup.backend, Peer), "a script is of a peer"
    return _TEXT.format(
        peer=setup.backend.name,
        difference=f"{failed.name}: {failed.where}",
        ranks=setup.ranks,
        versions=", ".join(f"{name} {version}" for name, version in versions.items() if name != "elixir-moe"),
        model=_model(setup.source),
        way=_way(setup.backend.name),
        steps=int(step[1] or step[2]),
        micro=setup.accumulation,
        seed=SEED,
        groups=GROUPS,
        kinds=len(GROUPS),
        decay=DECAY,
        bound=CLIP,
        gradient=GRADIENT,
        of_all=GRADIENT_OF_ALL,
        loss=LOSS,
        weight=WEIGHT,
    )


def _model(source: Source) -> str:
    """What defines `build`, `loss_of` and `sample`."""
    if isinstance(source, Function):
        module, _, name = source.path.partition(":")
        return _FUNCTION.format(module=module, name=name)
    assert isinstance(source, HuggingFace), "named models are not for peers"
    config: Any = source.config()
    vocabulary = config.get_text_config().vocab_size
    return _HUGGING_FACE.format(
        settings=pformat(config.to_diff_dict() | {"model_type": config.model_type}, width=120, compact=True),
        architecture=source.architecture,
        first=min(FIRST_WORD, vocabulary - 1),
        vocabulary=vocabulary,
        rows=source.rows,
        length=source.length,
    )


def _way(name: str) -> str:
    """What makes `runs` of `model`, and trains it."""
    if name.startswith("deepspeed"):
        return _DEEPSPEED.format(stage=stage_of(name), bound=CLIP)
    clip = "torch.nn.utils.clip_grad_norm_"
    if name == "hf-ep":
        clip = "(lambda _, bound: transformers.Trainer._mixed_mesh_grad_norm(None, model, bound))"
    begin = {"ddp": _DDP, "fsdp2": _FSDP2, "hf-ep": _HF_EP}[name]
    return begin + _OF_TORCH.format(clip=clip, bound=CLIP)

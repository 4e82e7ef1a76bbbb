"""The training loop: text in, trained model out.

Owns the order of things: forward and backward over the micro-batches, then clip and step, then report; evaluation in
between, a text sample and the weights at the end. Whatever communicates is called by all ranks, in the same order;
only what is told and written is rank 0's.
"""

import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from elixir_moe.chunks.plan import Plan
from elixir_moe.models.gpt import GPT, generate, gpt_patterns, lm_loss, tokens_per_expert
from elixir_moe.parallel.annotate import annotate, pattern_of
from elixir_moe.parallel.mesh import init_mesh
from elixir_moe.state import full_state_dict
from elixir_moe.train import settings
from elixir_moe.train.bigram import Bigram
from elixir_moe.train.config import OptimizerConfig, PlanConfig, TrainConfig
from elixir_moe.train.data import ByteText, batch_at, rows_of, validation_batches
from elixir_moe.train.report import Console, Report, StepRecord, Summary
from elixir_moe.wrap import wrap

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(config: TrainConfig, text: ByteText, directory: Path | None, console: Console) -> Summary | None:
    """Runs a training from start to end. Collective: every rank calls it with the same settings and text.

    Args:
        config: the settings, already checked against the number of ranks.
        text: what to train on.
        directory: the run directory on rank 0, claimed before; None on the others.
        console: where rank 0 writes.

    Returns:
        How it ended, on rank 0; None on the others.

    Raises:
        ElixirError: whatever the library finds wrong.
    """
    torch.set_num_threads(config.run.threads)
    mesh = init_mesh()
    training = Training(config, text, mesh)
    bigram_loss = Bigram.fit(text.train).loss(training.validation_text)
    if directory is None:
        training.run(None)
        training.conclude(None, bigram_loss)
        return None
    run = config.run
    with Report(console, directory, steps=run.steps, log_every=run.log_every, bigram_loss=bigram_loss) as report:
        report.write("config.yaml", settings.to_yaml(config))
        report.say(training.description())
        report.plan(training.optimizer.plan_table(), training.optimizer.plan.to_json())
        if training.optimizer.plan.explanation:
            report.say(training.optimizer.plan.explanation)
        training.run(report)
        return training.conclude(report, bigram_loss)


class Training:
    """A model, its optimizer and its text, between the first step and the last."""

    def __init__(self, config: TrainConfig, text: ByteText, mesh: DeviceMesh) -> None:
        self.config, self.text, self.mesh = config, text, mesh
        self.rank, self.ranks = mesh.get_local_rank("dp"), mesh.size(0)
        self.device = torch.device(mesh.device_type)
        torch.manual_seed(config.run.seed)  # the same on all ranks: replicated weights start out equal
        model = GPT(config.model, mesh).to(self.device)
        annotate(model, gpt_patterns(model))
        self.parameters = _count_parameters(model)
        optimizer = _adamw(model, config.optimizer)
        dtype = _DTYPES[config.run.dtype]
        if config.plan.kind == "auto":
            budget = config.plan.budget_gib
            self.model, self.optimizer = wrap(
                model,
                optimizer,
                plan="auto",
                sample=torch.zeros(config.micro_batch // self.ranks, config.model.seq_len + 1, dtype=torch.int64),
                step=lm_loss,
                compute_dtype=dtype,
                hardware=config.plan.hardware,
                budget_bytes=None if budget is None else int(budget * 2**30),
                accumulation=config.run.accumulation,
            )
        else:
            self.model, self.optimizer = wrap(model, optimizer, plan=_plan(config.plan), compute_dtype=dtype)
        self.schedule = LambdaLR(self.optimizer, lambda step: lr_factor(step, config.run.steps, config.optimizer))
        torch.manual_seed(config.run.seed + 1 + self.rank)  # from here on chance is dropout, and differs between ranks
        self.validation = validation_batches(
            text.validation, batches=config.run.eval_batches, rows=config.micro_batch, seq_len=config.model.seq_len
        )
        self.train_seconds = 0.0
        self.last: StepRecord | None = None

    @property
    def validation_text(self) -> Tensor:
        """uint8: the bytes an evaluation sees, each but the first predicted once."""
        batches, rows = self.validation.shape[:2]
        return self.text.validation[: batches * rows * self.config.model.seq_len + 1]

    def run(self, report: Report | None) -> None:
        """All steps and evaluations."""
        begin = time.perf_counter()
        for step in range(1, self.config.run.steps + 1):
            before, lr, start = self.optimizer.statistics(), self.schedule.get_last_lr()[0], time.perf_counter()
            loss = self.forward_backward(step)
            norm = self.update()
            seconds = time.perf_counter() - start
            self.last = StepRecord(
                step=step,
                loss=loss,
                grad_norm=norm,
                lr=float(lr),
                step_seconds=seconds,
                tokens_per_second=self.config.tokens_per_step / seconds,
                statistics=(self.optimizer.statistics() - before).as_dict(),
                tokens_per_expert=tokens_per_expert(self.model),
                val_loss=self.evaluate() if self._evaluation_is_due(step) else None,
            )
            if report is not None:
                report.step(self.last)
        self.train_seconds = time.perf_counter() - begin

    def forward_backward(self, step: int) -> float:
        """Gradients of the mean loss over the step's samples; returns that loss, the same on all ranks."""
        run = self.config.run
        batch = batch_at(
            self.text.train, seed=run.seed, step=step, rows=run.global_batch, seq_len=self.config.model.seq_len
        )
        losses = []
        for micro_batch in batch.chunk(run.accumulation):
            loss = lm_loss(self.model, rows_of(micro_batch, self.rank, self.ranks).to(self.device))
            (self.optimizer.scale(loss) / run.accumulation).backward()
            losses.append(loss.detach())
        return self._mean_over_ranks(torch.stack(losses).mean())

    def update(self) -> float | None:
        """Clips and applies the gradients; returns the global norm."""
        clip = self.config.optimizer.clip_norm
        norm = None if clip is None else float(self.optimizer.clip_grad_norm_(clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return norm

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross-entropy over the validation batches, in nats a byte, without auxiliary losses."""
        self.model.eval()
        losses = []
        for batch in self.validation:
            mine = rows_of(batch, self.rank, self.ranks).to(self.device)
            logits = self.model(mine[:, :-1]).logits
            losses.append(F.cross_entropy(logits.float().flatten(0, 1), mine[:, 1:].flatten()))
        self.model.train()
        return self._mean_over_ranks(torch.stack(losses).mean())

    def sample(self) -> str:
        """Text the model writes after the start of the validation part; all ranks write the same."""
        run = self.config.run
        if not run.sample_bytes:
            return ""
        prompt = self.text.validation[: min(64, self.config.model.seq_len)]
        tokens = generate(
            self.model,
            prompt.long().unsqueeze(0).to(self.device),
            run.sample_bytes,
            temperature=run.temperature,
            generator=torch.Generator(self.device).manual_seed(run.seed),
        )
        return bytes(tokens[0].tolist()).decode(errors="replace")

    def conclude(self, report: Report | None, bigram_loss: float) -> Summary | None:
        """The sample, the weights and the summary; whatever communicates comes before rank 0 goes its own way."""
        sample, weights = self.sample(), full_state_dict(self.model)
        if report is None:
            return None
        assert self.last is not None and self.last.val_loss is not None, (
            "the last step is always followed by an evaluation"
        )
        steps = self.config.run.steps
        summary = Summary(
            steps=steps,
            ranks=self.ranks,
            parameters=self.parameters,
            train_loss=self.last.loss,
            val_loss=self.last.val_loss,
            bigram_loss=bigram_loss,
            train_seconds=self.train_seconds,
            tokens_per_second=steps * self.config.tokens_per_step / self.train_seconds,
            out=self.config.run.out,
            prediction=None if (expected := self.optimizer.prediction) is None else expected.as_dict(),
        )
        report.finish(summary, sample, weights)
        return summary

    def description(self) -> str:
        """What is about to be trained, in a few lines."""
        model, run = self.config.model, self.config.run
        kinds = (f"{n} experts (ep {ep})" if n else "dense" for n, ep in zip(model.experts, model.ep, strict=True))
        batches, rows = self.validation.shape[:2]
        return (
            f"model       {self.parameters:,} parameters, layers of width {model.d_model}: {', '.join(kinds)}\n"
            f"text        {len(self.text.train):,} bytes to train on, {len(self.text.validation):,} for validation "
            f"({len(self.validation_text) - 1:,} of them used: {batches} batches of {rows})\n"
            f"step        {run.global_batch} samples of {model.seq_len} bytes, ranks: {self.ranks}, "
            f"micro-batches: {run.accumulation}, {run.dtype}"
        )

    def _evaluation_is_due(self, step: int) -> bool:
        return step % self.config.run.eval_every == 0 or step == self.config.run.steps

    def _mean_over_ranks(self, value: Tensor) -> float:
        total = value.float()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


def lr_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """Share of the learning rate at a step counted from 0: a linear rise, then half a cosine down to `final_lr`."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps))
    return config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * done)) / 2


def _adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    param_groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(param_groups, lr=config.lr, betas=config.betas, eps=config.eps)


def _plan(config: PlanConfig) -> Plan:
    if config.kind == "ddp":
        return Plan.ddp()
    if config.kind == "zero2":
        return Plan.zero2(chunk_numel=config.chunk_numel)
    if config.kind == "zero3":
        assert config.rcache_blocks is not None, "the settings were checked before"
        return Plan.zero3(rcache_blocks=config.rcache_blocks, chunk_numel=config.chunk_numel)
    return Plan.offload(
        rcache_blocks=config.rcache_blocks, device_chunks=config.device_chunks or 0, chunk_numel=config.chunk_numel
    )


def _count_parameters(model: nn.Module) -> int:
    """Elements of the whole model: a parameter that ranks share out counts with all its parts, a tied one once."""
    patterns = ((p, pattern_of(p)) for p in model.parameters())
    return sum(math.prod(pattern.global_shape(p.shape)) if pattern else p.numel() for p, pattern in patterns)

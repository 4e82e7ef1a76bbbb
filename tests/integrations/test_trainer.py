"""Hugging Face's Trainer and Accelerate under a plan: the losses of a plain run, saved, killed and resumed."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elixir_moe as em
from elixir_moe.errors import ConfigError, UsageError
from tests.state.test_huggingface import run_example
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
ROWS, SEQ = 64, 16
TOLERANCE = 1e-5


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """As if torchrun had started the ranks of this pool; a rank alone runs without a launcher."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    rank, world = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world} if world > 1 else {}
    forget()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        for name, value in variables.items():
            patch.setenv(name, str(value))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
    forget()


def mixture() -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(mixture(), LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets))


def data() -> list[dict[str, Any]]:
    rows = torch.randint(64, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(
    folder: str,
    steps: int,
    plan: em.Plan | None,
    *,
    peft: bool = False,
    resume: bool = False,
    stop: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """A run of ours with a plan, of the plain Trainer without; `stop`: it dies after so many steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from elixir_moe.integrations.transformers import ElixirTrainer

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop:
                raise KeyboardInterrupt

    with launched():
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8 // dist.get_world_size(), learning_rate=1e-2,
            gradient_accumulation_steps=2, max_grad_norm=0.5, warmup_steps=2, logging_steps=1, use_cpu=True,
            report_to=[], disable_tqdm=True, **{"save_strategy": "no", **settings},
        )  # fmt: skip
        kind: Any = Trainer if plan is None else ElixirTrainer
        given = {} if plan is None else {"plan": plan}
        model = adapted() if peft else mixture()
        evaluated = data()[:16]
        trainer = kind(model, arguments, train_dataset=data(), eval_dataset=evaluated, callbacks=[Dies()], **given)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=resume or None)
        log = trainer.state.log_history
        full = trainer.model.state_dict() if plan is None else em.full_state_dict(trainer.model, all_ranks=True)
        if plan is not None:
            trainer.model._elixir.optimizer.close()
    return {
        "loss": [entry["loss"] for entry in log if "loss" in entry],
        "norm": [float(entry["grad_norm"]) for entry in log if "grad_norm" in entry],
        "rate": [entry["learning_rate"] for entry in log if "learning_rate" in entry],
        "eval": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
        "state": {name: value.float() for name, value in full.items()},
        "best": trainer.state.best_model_checkpoint,
    }


def check_alike(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours["rate"] == plain["rate"]
    for name in ("loss", "eval"):
        assert ours[name] == pytest.approx(plain[name], abs=TOLERANCE), name
    assert ours["norm"] == pytest.approx(plain["norm"], rel=1e-4)
    for name, value in plain["state"].items():
        torch.testing.assert_close(ours["state"][name], value, atol=2e-3, rtol=0)


PLANS = {"zero3": em.Plan.zero3(), "offload": em.Plan.offload(host_checkpoints="all")}
EVERY_4 = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
BEST = {"load_best_model_at_end": True, "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("world", "plan", "peft", "steps"),
    [
        (1, "offload", False, 6),
        pytest.param(2, "zero3", True, 50, marks=pytest.mark.slow),
        pytest.param(1, "zero3", True, 50, marks=pytest.mark.slow),
        pytest.param(2, "offload", False, 50, marks=pytest.mark.slow),
        pytest.param(1, "offload", False, 50, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_the_plain_trainer(
    ranks: Ranks, tmp_path: Path, world: int, plan: str, peft: bool, steps: int
) -> None:
    (plain,) = ranks(1).run(trained, str(tmp_path / "plain"), steps, None, peft=peft, **EVERY_4, **BEST)
    for ours in ranks(world).run(trained, str(tmp_path / "ours"), steps, PLANS[plan], peft=peft, **EVERY_4, **BEST):
        check_alike(ours, plain)
    names = set(os.listdir(tmp_path / "ours" / "checkpoint-4"))
    assert names >= {"elixir_moe", "adapter_model.safetensors" if peft else "model.safetensors", "trainer_state.json"}


@pytest.mark.parametrize(("peft", "again"), [(True, 1), pytest.param(False, 2, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_under_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, peft: bool, again: int
) -> None:
    (plain,) = ranks(1).run(trained, str(tmp_path / "plain"), 8, None, peft=peft)
    folder = str(tmp_path / "ours")
    ranks(2).run(trained, folder, 8, em.Plan.zero3(), peft=peft, stop=6, **EVERY_4)
    settings = EVERY_4 | {"eval_strategy": "no"}
    ours = ranks(again).run(trained, folder, 8, em.Plan.offload(), peft=peft, resume=True, **settings)
    for found in ours:
        found["eval"] = []
        check_alike(found, plain)


def refused(settings: dict[str, Any], folder: str) -> str:
    with pytest.raises((ConfigError, UsageError)) as error:
        trained(folder, 2, em.Plan.zero3(), **settings)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"auto_find_batch_size": True}, "auto_find_batch_size=True"), ({"torch_compile": True}, "torch_compile=True")],
    ids=["batch", "compile"],
)
def test_settings_that_fight_the_plan_are_refused(
    ranks: Ranks, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    (said,) = ranks(1).run(refused, settings, str(tmp_path))
    assert message in said and "leave it out" in said


def accelerated(folder: str, ours: bool, first: int, last: int) -> list[float]:
    """A loop of Accelerate's kind with accumulation and a schedule; from step `first` on, with the state of before."""
    from accelerate import Accelerator

    from elixir_moe.integrations.accelerate import ElixirAccelerator

    with launched():
        kind: Any = ElixirAccelerator if ours else Accelerator
        given: dict[str, Any] = {"plan": em.Plan.offload()} if ours else {}
        accelerator = kind(cpu=True, gradient_accumulation_steps=2, **given)
        model = mixture()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = torch.utils.data.DataLoader(data(), batch_size=8 // dist.get_world_size())
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if first:
            accelerator.load_state(folder)
        losses = []
        for step, batch in enumerate(loader):
            if not first <= step < last:
                continue
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if ours:
            accelerator.save_state(folder)
            optimizer.optimizer.close()
    return losses


def test_a_loop_of_accelerate(ranks: Ranks, tmp_path: Path) -> None:
    for world in (1, 2):
        plain = ranks(world).run(accelerated, "", False, 0, 8)[0]
        folder = str(tmp_path / str(world))
        before = ranks(world).run(accelerated, folder, True, 0, 4)[0]
        after = ranks(world).run(accelerated, folder, True, 4, 8)[0]
        assert before + after == pytest.approx(plain, abs=TOLERANCE)


def prepared_badly() -> list[str]:
    from elixir_moe.integrations.accelerate import ElixirAccelerator

    said = []
    with launched():
        accelerator = ElixirAccelerator(cpu=True)
        model = mixture()
        for given in ((model,), (model, mixture(), torch.optim.SGD(model.parameters(), lr=0.1))):
            with pytest.raises(UsageError) as error:
                accelerator.prepare(*given)
            said.append(str(error.value))
        with pytest.raises(UsageError) as error:
            accelerator.save_state("nowhere")
        said.append(str(error.value))
    with launched(), pytest.raises(ConfigError) as refused:
        ElixirAccelerator(cpu=True, mixed_precision="fp16")
    return [*said, str(refused.value)]


def test_what_cannot_be_prepared_is_told(ranks: Ranks) -> None:
    (said,) = ranks(1).run(prepared_badly)
    assert said[0].startswith("prepare got 1 models and 0 optimizers: give one model with its optimizer")
    assert said[1].startswith("prepare got 2 models and 1 optimizers")
    assert "call prepare with both first" in said[2]
    assert "mixed_precision='fp16': expected 'bf16' or 'no'" in said[3]


def sft() -> str:
    with launched():
        return run_example(Path(__file__).parents[2] / "examples" / "sft_trainer.py")


def test_the_example_of_sft_runs(ranks: Ranks) -> None:
    first, _ = ranks(2).run(sft)
    losses = [float(loss) for loss in first.partition("losses: ")[2].splitlines()[0].split()]
    assert losses[-1] < losses[0] - 0.1
    assert float(first.partition("differ by ")[2].split()[0]) <= 1e-5

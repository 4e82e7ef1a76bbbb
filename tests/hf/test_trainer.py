"""Hugging Face's Trainer and Accelerate under a plan: the losses of a plain run, saved, killed and resumed."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elixir_moe as em
from elixir_moe.errors import CheckpointError, ConfigError, UsageError
from tests.optim.test_modes import ScheduleFree
from tests.state.test_huggingface import run_example
from tests.support.every import every
from tests.support.hf_cases import forget_accelerate
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
ROWS, SEQ = 64, 16
TOLERANCE = 1e-5


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """As if torchrun had started the ranks of this pool; a rank alone runs without a launcher."""
    rank, world = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world} if world > 1 else {}
    forget_accelerate()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        for name, value in variables.items():
            patch.setenv(name, str(value))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield
    forget_accelerate()


def mixture(**options: Any) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **options,
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
    loss: str = "whole",
    model_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A run of ours with a plan, of the plain Trainer without; `stop`: it dies after so many steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

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
        given = {} if plan is None else {"plan": plan, "loss": loss}
        model = adapted() if peft else mixture(**(model_options or {}))
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


def with_more_tokens(base: str, folder: str, steps: int, plan: em.Plan | None, resume: bool = False) -> list[float]:
    """Losses of adapters on a base whose vocabulary is enlarged; each run draws other new rows at first."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    with launched():
        torch.manual_seed(5 + resume)
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(80, mean_resizing=False)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[arg-type]
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8 // dist.get_world_size(), learning_rate=1e-1,
            lr_scheduler_type="constant", logging_steps=1, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        rows = [{name: row[name] + 12 for name in row} for row in data()]
        trainer = (
            Trainer(model, arguments, train_dataset=rows)
            if plan is None
            else ElixirTrainer(model, arguments, train_dataset=rows, plan=plan)
        )
        trainer.train(resume_from_checkpoint=resume or None)
        if plan is not None:
            trainer.model._elixir.optimizer.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_adapters_on_an_enlarged_vocabulary_go_on(ranks: Ranks, tmp_path: Path) -> None:
    base, plain, ours = (str(tmp_path / name) for name in ("base", "plain", "ours"))
    mixture().save_pretrained(base)
    (wanted,) = ranks(1).run(with_more_tokens, base, plain, 4, None)
    ranks(2).run(with_more_tokens, base, ours, 2, em.Plan.zero3())
    (found,) = ranks(1).run(with_more_tokens, base, ours, 4, em.Plan.offload(), True)
    assert found == pytest.approx(wanted, abs=TOLERANCE)


def refused(settings: dict[str, Any], folder: str) -> str:
    with pytest.raises(em.ElixirError) as error:
        trained(folder, 2, em.Plan.zero3(), **settings)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"torch_compile": True}, "torch_compile=True"),
        (BEST | EVERY_4 | {"save_only_model": True}, "save_only_model=True, load_best_model_at_end=True"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True"),
        ({"fp16_full_eval": True}, "fp16_full_eval=True"),
        ({"optim": "adafactor"}, "Adafactor looks at whole tensors"),
    ],
    ids=["batch", "compile", "best", "bf16", "fp16", "optimizer"],
)
def test_settings_that_fight_the_plan_are_refused(
    ranks: Ranks, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    (said,) = ranks(1).run(refused, settings, str(tmp_path))
    assert message in said and ("leave" in said or "use an elementwise optimizer" in said)


def prompts(folder: str) -> tuple[str, int]:
    """(rank) What is said of checkpoints of learned prompts, and the steps of a run without checkpoints."""
    from peft import PromptTuningConfig, get_peft_model
    from transformers import TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    def trainer(**settings: Any) -> Any:
        model = get_peft_model(mixture(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
        arguments = TrainingArguments(folder, max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, **settings)
        return ElixirTrainer(model, arguments, train_dataset=data(), plan=em.Plan.zero3())

    with launched():
        with pytest.raises(ConfigError) as error:
            trainer()
        unsaved = trainer(save_strategy="no")
        unsaved.train()
        unsaved.model._elixir.optimizer.close()
    return str(error.value), unsaved.state.global_step


def test_prompts_that_no_checkpoint_could_have_are_refused_before_training(ranks: Ranks, tmp_path: Path) -> None:
    for said, steps in ranks(2).run(prompts, str(tmp_path)):
        assert "save_strategy='no'" in said and steps == 2


def made(folder: str, ours: bool, given: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A trainer of a dense model: Trainer does not find fused experts in the checkpoints it has saved."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True,
        **{"max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 1} | settings,
    )  # fmt: skip
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, hidden_size=32, **sizes))
    kind: Any = ElixirTrainer if ours else Trainer
    return kind(model, arguments, train_dataset=data(), eval_dataset=data()[:8], **(given or {}))


def again(folder: str, ours: bool) -> list[float]:
    """Losses of one trainer that trains, evaluates, trains on, and goes back to a checkpoint."""
    losses = []
    with launched():
        trainer = made(folder, ours)
        for resume in (None, None, f"{folder}/checkpoint-1"):
            trainer.train(resume_from_checkpoint=resume)
            losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            losses.append(trainer.evaluate()["eval_loss"])
        if ours:
            trainer.model._elixir.optimizer.close()
    return losses


def test_a_trainer_trains_more_than_once(ranks: Ranks, tmp_path: Path) -> None:
    plain, ours = (ranks(1).run(again, str(tmp_path / str(ours)), ours)[0] for ours in (False, True))
    assert ours == pytest.approx(plain, abs=TOLERANCE)


class Line(torch.nn.Module):
    """A model that is no PreTrainedModel; it keeps the rows that it was given, in their order, if `keeps`."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("rows", torch.empty(0)) if keeps else None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if "rows" in self._buffers:
            self.rows = torch.cat([self.rows, x[:, 0].detach()])
        found = self.inner(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


def line(folder: str, ours: bool, model: Any = Line, **settings: Any) -> Any:
    """A trainer of `Line`; of a class, which `train` makes anew each time, or of one model."""
    from transformers import Trainer, TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True,
        **{"max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 1} | settings,
    )  # fmt: skip
    rows = torch.randn(16, 2, 4, generator=torch.Generator().manual_seed(1))
    kind: Any = ElixirTrainer if ours else Trainer
    given = {"model_init": model} if isinstance(model, type) else {"model": model}
    return kind(**given, args=arguments, train_dataset=[{"x": x, "labels": y} for x, y in rows])


def weights(trainer: Any, ours: bool) -> dict[str, torch.Tensor]:
    state = em.full_state_dict(trainer.model) if ours else trainer.model.state_dict()
    return {name: value.clone() for name, value in state.items()}


def anew(folder: str, ours: bool) -> list[dict[str, torch.Tensor]]:
    """Weights of trainings that each begin with a new model; the last has another seed."""
    found = []
    with launched():
        trainer = line(folder, ours)
        for seed in (42, 42, 7):
            trainer.args.seed = seed
            trainer.train()
            found.append(weights(trainer, ours))
        if ours:
            trainer.model._elixir.optimizer.close()
    return found


def test_model_init_makes_a_new_model_for_each_training(ranks: Ranks, tmp_path: Path) -> None:
    plain, ours = (ranks(1).run(anew, str(tmp_path / str(ours)), ours)[0] for ours in (False, True))
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours[0], ours[1], atol=0, rtol=0)
    assert not torch.equal(ours[0]["inner.weight"], ours[2]["inner.weight"])


def told(folder: str) -> dict[str, str]:
    """What a plain Trainer does and this one refuses: the errors' messages."""
    found: dict[str, str] = {}

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        with pytest.raises(em.ElixirError) as error:
            yield
        found[name] = str(error.value)

    with launched():
        trainer = line(folder, True, Line(keeps=True))
        trainer.train()
        with noted("state_dict"):
            trainer.optimizer.state_dict()
        with noted("second"):
            line(folder, True, trainer.model).train()
        trainer.model._elixir.optimizer.close()
        with noted("buffer"):
            line(folder, True, Line(keeps=True)).train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        with noted("routers"):
            from elixir_moe.hf.trainer import ElixirTrainer

            ElixirTrainer(args=trainer.args, model_init=Line, routers={})
        with noted("nan"):
            line(folder, True, learning_rate=1e30).train()
    return found


def test_what_a_plain_trainer_does_and_this_one_refuses(ranks: Ranks, tmp_path: Path) -> None:
    (said,) = ranks(1).run(told, str(tmp_path))
    assert "optimizer.param_groups" in said["state_dict"]
    assert "another trainer or Accelerator has wrapped this model" in said["second"]
    assert "buffer 'rows' is of shape (16,) in the checkpoint, (0,) in the model" in said["buffer"]
    assert "model_init" in said["routers"]
    assert "the global gradient norm" in said["nan"]


def with_own_losses(folder: str, ours: bool) -> list[float]:
    """Losses of trainers whose `compute_loss` takes what Trainer gives by name, each in a way of its own."""
    from transformers import Trainer

    from elixir_moe.hf.trainer import ElixirMixin

    class Rest(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
            found = model(**inputs)
            loss = found["loss"] + model.inner.weight.square().mean() * (1 + len(rest))
            return (loss, found) if return_outputs else loss

    class OtherOrder(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, num_items_in_batch: Any = 1, return_outputs: Any = False
        ) -> Any:
            found = model(**inputs)
            loss = found["loss"] / num_items_in_batch
            return (loss, found) if return_outputs else loss

    losses = []
    with launched():
        for kind in (Rest, OtherOrder):
            torch.manual_seed(0)
            trainer = line(folder, ours, Line(), save_strategy="no")
            trainer.__class__ = type("Ours", (ElixirMixin, kind), {}) if ours else kind
            trainer.model_accepts_loss_kwargs = True  # then it counts the items of a batch
            trainer.train()
            losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
            if ours:
                trainer.model._elixir.optimizer.close()
    return losses


def test_a_loss_of_ones_own_is_given_what_trainer_gives_it(ranks: Ranks, tmp_path: Path) -> None:
    plain, ours = (ranks(1).run(with_own_losses, str(tmp_path / str(ours)), ours)[0] for ours in (False, True))
    assert len(ours) == 8 and ours == pytest.approx(plain, abs=TOLERANCE)


def history(folder: str, ours: bool, resume: bool) -> list[dict[str, float]]:
    torch.manual_seed(0)
    with launched():
        trainer = line(folder, ours, Line(), max_steps=5)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
        found = [{k: v for k, v in e.items() if not k.startswith("train_")} for e in trainer.state.log_history]
        if ours:
            trainer.model._elixir.optimizer.close()
    return found


def test_a_resumed_run_has_the_history_of_one_without_a_stop(ranks: Ranks, tmp_path: Path) -> None:
    (whole,) = ranks(1).run(history, str(tmp_path), True, False)
    (resumed,) = ranks(1).run(history, str(tmp_path), True, True)
    (plain,) = ranks(1).run(history, str(tmp_path / "plain"), False, False)
    assert resumed == whole
    for ours, wanted in zip(whole, plain, strict=True):
        assert ours == pytest.approx(wanted, abs=1e-6)
    names = [set(os.listdir(tmp_path / kind / "checkpoint-2")) for kind in ("", "plain")]
    assert names[1] - names[0] == {"optimizer.pt"} and names[0] - names[1] == {"elixir_moe"}


def averaged(folder: str, ours: bool, resume: bool) -> dict[str, Any]:
    """(rank) Losses of a schedule-free optimizer, which are evaluated on its averages, and the weights at the end."""
    with launched():
        settings = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2, "save_steps": 3}
        given = {"optimizer_cls_and_kwargs": (ScheduleFree, {"lr": 0.1})}
        trainer = made(folder, ours, given, max_steps=6, lr_scheduler_type="constant", **settings)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
        trainer.evaluate()
        log = trainer.state.log_history
        found = {name: [each[name] for each in log if name in each] for name in ("loss", "eval_loss")}
        found["weights"] = weights(trainer, ours)  # type: ignore[assignment]
        if ours:
            trainer.model._elixir.optimizer.close()
    return found


def test_a_schedule_free_optimizer_evaluates_its_averages(ranks: Ranks, tmp_path: Path) -> None:
    (plain,) = ranks(1).run(averaged, str(tmp_path / "plain"), False, False)
    for resume in (False, True):
        (ours,) = ranks(1).run(averaged, str(tmp_path / "ours"), True, resume)
        for name, wanted in plain.items():
            torch.testing.assert_close(ours[name], wanted, rtol=0, atol=TOLERANCE)


def interrupted(folder: str, ours: bool, where: str) -> list[float]:
    """Ctrl-C in the middle of an epoch: losses of the same trainer, from the weights of then and from a checkpoint."""
    found: list[float] = []
    with launched():
        torch.manual_seed(0)
        trainer = line(folder, ours, Line(), max_steps=4, gradient_accumulation_steps=2, per_device_train_batch_size=2)
        calls = 0

        def stop(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 6:  # in the second micro-batch of the third step
                raise KeyboardInterrupt

        inner = trainer.model.inner
        handle = inner.register_forward_hook(stop) if where == "forward" else inner.weight.register_hook(stop)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        handle.remove()
        assert calls == 6 and trainer.state.global_step == 2
        found.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
        for folder_or_not in (None, f"{folder}/checkpoint-2"):
            trainer.train(resume_from_checkpoint=folder_or_not)
            found += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if ours:
            trainer.model._elixir.optimizer.close()
    return found


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_interrupted_trainer_goes_on(ranks: Ranks, tmp_path: Path, where: str) -> None:
    plain, ours = (ranks(1).run(interrupted, str(tmp_path / str(ours)), ours, where)[0] for ours in (False, True))
    assert ours == pytest.approx(plain, abs=1e-6)


SMALL = em.Plan.offload(chunk_numel=4096)
UNCLIPPED = EVERY_4 | {"max_steps": 6, "max_grad_norm": 0, "gradient_accumulation_steps": 2}


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The chunks whose updates are begun in backward."""
    from elixir_moe.optim.early import EarlyUpdates

    begun: list[int] = []
    begin = EarlyUpdates._begin
    with pytest.MonkeyPatch.context() as patch:

        def count(self: EarlyUpdates, chunk: Any, *given: Any) -> None:
            begun.append(chunk.spec.index)
            begin(self, chunk, *given)

        patch.setattr(EarlyUpdates, "_begin", count)
        yield begun


def unclipped(folder: str, given: dict[str, Any], **settings: Any) -> tuple[int, dict[str, Any]]:
    """(rank) How many updates began in backward, and what a training without clipping gave."""
    rows = 8 // dist.get_world_size()
    with launched(), counted() as begun:
        trainer = made(
            folder, True, {"plan": SMALL, **given}, **UNCLIPPED | {"per_device_train_batch_size": rows} | settings
        )
        trainer.train()
        history = [(e.get("loss"), e.get("eval_loss"), e.get("grad_norm")) for e in trainer.state.log_history]
        state = em.full_state_dict(trainer.model, all_ranks=True)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        resumed = em.full_state_dict(trainer.model, all_ranks=True)
        trainer.model._elixir.optimizer.close()
    return len(begun), {"history": history[:-1], "state": state, "resumed": resumed}


@pytest.mark.parametrize("world", [1, 2])
def test_updates_begin_in_backward_where_nothing_is_clipped(ranks: Ranks, tmp_path: Path, world: int) -> None:
    late = ranks(world).run(unclipped, str(tmp_path / "late"), {"update_in_backward": False})
    early = ranks(world).run(unclipped, str(tmp_path / "early"), {})
    for (none, wanted), (some, found) in zip(late, early, strict=True):
        assert none == 0 and some > 8, "each of 8 steps has several chunks"
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found["resumed"], found["state"], rtol=0, atol=0)


def left_off(folder: str) -> dict[str, int]:
    """The updates that begin in backward where code of the user's, or lost weights, speak against it."""
    from transformers import TrainerCallback

    from elixir_moe.hf.trainer import ElixirTrainer

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
            assert given["optimizer"].optimizer.grad_norms()

    class Own(ElixirTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().training_step(*args, **kwargs)

    def hooked(trainer: Any) -> None:
        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(lambda *_: None)

    found = {}
    changes: dict[str, Callable[[Any], Any]] = {
        "nothing": lambda trainer: None,
        "callback": lambda trainer: trainer.add_callback(Looks()),
        "training_step": lambda trainer: setattr(trainer, "__class__", Own),
        "hook": hooked,
        "no checkpoint": lambda trainer: setattr(trainer.args, "save_strategy", "no"),
        "no state of the optimizer": lambda trainer: setattr(trainer.args, "save_only_model", True),
        "clipping": lambda trainer: setattr(trainer.args, "max_grad_norm", 1.0),
    }
    for name, change in changes.items():
        with launched(), counted() as begun:
            trainer = made(folder, True, {"plan": SMALL}, max_grad_norm=0)
            change(trainer)
            trainer.train()
            trainer.model._elixir.optimizer.close()
        found[name] = len(begun)
    with launched(), pytest.raises(ConfigError, match=r"update_in_backward=True with .*max_grad_norm=1.0"):
        made(folder, True, {"update_in_backward": True})
    return found


def test_updates_wait_for_the_step_where_whole_gradients_may_be_wanted(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks(1).run(left_off, str(tmp_path))
    assert found.pop("nothing")
    assert set(found.values()) == {0}, found


def broken(folder: str) -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """A backward that fails when updates have begun: what is said, and the weights of runs from a checkpoint on."""
    said, states = [], []
    with launched(), counted() as begun:
        trainer = made(folder, True, {"plan": SMALL}, **UNCLIPPED)
        trainer.train()
        states.append(em.full_state_dict(trainer.model))

        def fail(_: torch.Tensor) -> None:
            if begun:
                raise RuntimeError("failed in the middle")

        handle = trainer.model.model.embed_tokens.weight.register_hook(fail)
        del begun[:]
        with pytest.raises(RuntimeError, match="failed in the middle"):
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        handle.remove()
        for call in (trainer.evaluate, trainer.train, lambda: trainer.save_model(folder)):
            with pytest.raises(UsageError) as error:
                call()
            said.append(str(error.value))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        states.append(em.full_state_dict(trainer.model))
        trainer.model._elixir.optimizer.close()
    return said, states


def test_a_backward_that_fails_behind_updates_goes_on_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ((said, (wanted, found)),) = ranks(1).run(broken, str(tmp_path))
    assert every("a backward failed" in text and "checkpoint (em.load)" in text for text in said), said
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def signalled(folder: str, where: str) -> list[str]:
    """The folders after a signal has asked for a checkpoint at an event of the second step."""
    from transformers import TrainerCallback
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    with launched():
        trainer = line(folder, True, Line(), save_steps=100, enable_jit_checkpoint=True)
        (found,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))

        class Signal(TrainerCallback):
            def on_event(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 1:
                    found.jit_manager._enable_checkpoint()

        setattr(Signal, where, Signal.on_event)
        trainer.callback_handler.callbacks.insert(0, Signal())
        trainer.train()
        trainer.model._elixir.optimizer.close()
        again = line(folder, True, Line())
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 3
        again.model._elixir.optimizer.close()
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("where", ["on_pre_optimizer_step", pytest.param("on_step_begin", marks=pytest.mark.slow)])
def test_a_signal_saves_between_two_steps(ranks: Ranks, tmp_path: Path, where: str) -> None:
    (found,) = ranks(1).run(signalled, str(tmp_path), where)
    saved = 2 if where == "on_pre_optimizer_step" else 1
    assert f"checkpoint-{saved}" in found


def signalled_on_two(folder: str) -> str:
    with launched(), pytest.raises(ConfigError) as error:
        line(folder, True, Line(), enable_jit_checkpoint=True)
    return str(error.value)


def test_a_signal_on_several_ranks_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(signalled_on_two, str(tmp_path)):
        assert "enable_jit_checkpoint=True) on 2 ranks" in said


def dtype_after(folder: str, evaluates: bool) -> str:
    with launched():
        trainer = made(folder, True, bf16=True)
        if evaluates:
            trainer.evaluate()
        trainer.train()
        found = trainer.model(data()[0]["input_ids"][None]).logits.dtype
        trainer.model._elixir.optimizer.close()
    return str(found)


@pytest.mark.slow
def test_an_evaluation_before_leaves_no_autocast_in_training(ranks: Ranks, tmp_path: Path) -> None:
    (before,), (without,) = (ranks(1).run(dtype_after, str(tmp_path), first) for first in (True, False))
    assert before == without == "torch.bfloat16"


def shown_after_small_steps(folder: str, **options: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    """{name: the weight before training, what the parameter shows afterwards, and the master}, trained in bf16."""
    from transformers import TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    with launched():
        arguments = TrainingArguments(
            folder, max_steps=2, learning_rate=1e-6, bf16=True, use_cpu=True, report_to=[], disable_tqdm=True,
            save_strategy="no",
        )  # fmt: skip
        model = mixture()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trainer = ElixirTrainer(model, arguments, train_dataset=data(), **options)
        trainer.train()
        masters = em.full_state_dict(trainer.model, all_ranks=True)
        shown = {name: trainer.model.get_parameter(name).detach().clone() for name in before}
        trainer.model._elixir.optimizer.close()
    return {name: (before[name], shown[name], masters[name]) for name in before}


def test_parameters_show_bf16_and_masters_are_fp32(ranks: Ranks, tmp_path: Path) -> None:
    """As docs/trainer.md says of `bf16=True`."""
    (found,) = ranks(1).run(shown_after_small_steps, str(tmp_path))
    for before, shown, master in found.values():
        assert master.dtype is torch.float32 and not torch.equal(master, before)
        assert torch.equal(shown, master.bfloat16())
    assert any(torch.equal(shown, before.bfloat16()) for before, shown, _ in found.values()), "a small step is hidden"
    (found,) = ranks(1).run(shown_after_small_steps, str(tmp_path), wrap={"compute_dtype": torch.float32})
    assert every(torch.equal(shown, master) for _, shown, master in found.values())


def before_train(folder: str) -> tuple[str, str]:
    """What is said of a trainer's model before `train`, if its weights come from a folder then."""
    from transformers import TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    with launched(), torch.device("meta"):
        trainer = ElixirTrainer(mixture(), TrainingArguments(folder, report_to=[]), wrap={"weights": folder})
    with pytest.raises(UsageError) as saved:
        trainer.save_model(folder)
    with pytest.raises(UsageError) as inspected:
        em.inspect(trainer.model)
    return str(saved.value), str(inspected.value)


def test_what_comes_before_train_says_the_whole_way(ranks: Ranks, tmp_path: Path) -> None:
    """A model that has its weights is saved as by the plain Trainer (docs/wrapped.md)."""
    ((saved, inspected),) = ranks(1).run(before_train, str(tmp_path))
    assert "on the meta device until train()" in saved and "on_train_begin" in inspected


def cut(folder: str) -> list[str]:
    """The warnings of runs that resume where a kill has cut the last checkpoints, each to the loss of a whole run."""
    with launched():
        trainer = made(folder, True, max_steps=3)
        trainer.train()
        trainer.model._elixir.optimizer.close()
    last, before = (Path(folder) / f"checkpoint-{step}" for step in (3, 2))
    found = []
    for spoilt in ("trainer_state.json", "rng_state.pth", "scheduler.pt", "elixir_moe", before / "scheduler.pt"):
        path = last / spoilt
        if path.is_dir():
            path.rename(last / "lost")
        else:
            path.write_bytes(path.read_bytes()[:-20])
        with launched(), pytest.warns(UserWarning, match="is passed over") as said:
            again = made(folder, True, save_strategy="no", max_steps=3)
            again.train(resume_from_checkpoint=str(last) if spoilt == "scheduler.pt" else True)
            again.model._elixir.optimizer.close()
        assert again.state.log_history[-2]["loss"] == trainer.state.log_history[-2]["loss"]
        found += [str(each.message).replace(folder, "") for each in said if "passed over" in str(each.message)]
    (Path(folder) / "checkpoint-1" / "trainer_state.json").unlink()
    with launched(), pytest.raises(CheckpointError, match="found none, and no whole checkpoint comes before it"):
        made(folder, True).train(resume_from_checkpoint=True)
    return found


def test_a_checkpoint_that_a_kill_has_cut_is_passed_over_for_the_newest_whole_one(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks(1).run(cut, str(tmp_path))
    files = [f"{name} is missing or cut short" for name in ("trainer_state.json", "rng_state.pth", "scheduler.pt")]
    reasons = [*files, *["expected a folder 'elixir_moe', found none"] * 2]
    for said, lacks, number in zip(found, reasons, [2, 2, 2, 2, 1], strict=True):
        assert said.startswith(f"/checkpoint-3 is passed over: {lacks}")
        assert said.endswith(f"the training continues from /checkpoint-{number}")


def foreign(folder: str, ours: bool, **settings: Any) -> str:
    with launched():
        trainer = made(folder, ours, **settings)
        trainer.train()
        if ours:
            trainer.model._elixir.optimizer.close()
        with pytest.raises(CheckpointError) as error:
            made(folder, True).train(resume_from_checkpoint=True)
    return str(error.value)


def test_a_folder_without_our_checkpoint_is_no_silent_start(ranks: Ranks, tmp_path: Path) -> None:
    for ours, settings in ((False, {}), (True, {"save_only_model": True})):
        (said,) = ranks(1).run(foreign, str(tmp_path / str(ours)), ours, **settings)
        assert "Can't find a valid checkpoint at" in said
        assert "checkpoint-2: expected a folder 'elixir_moe', found none" in said


def accelerated(folder: str, ours: bool, first: int, last: int) -> list[float]:
    """A loop of Accelerate's kind with accumulation and a schedule; from step `first` on, with the state of before.

    It saves twice, in folders that Accelerate names, and loads from the newest.
    """
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from elixir_moe.hf.accelerate import ElixirAccelerator

    with launched():
        kind: Any = ElixirAccelerator if ours else Accelerator
        given: dict[str, Any] = {"plan": em.Plan.offload()} if ours else {}
        named = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, iteration=10 * bool(first))
        accelerator = kind(cpu=True, gradient_accumulation_steps=2, project_config=named, **given)
        model = mixture()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = torch.utils.data.DataLoader(data(), batch_size=8 // dist.get_world_size())
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if first:
            accelerator.load_state()
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
            if ours and step + 1 in (last - 2, last):
                accelerator.save_state()
        if ours:
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
    from elixir_moe.hf.accelerate import ElixirAccelerator

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
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(UsageError) as error:
            accelerator.load_state()
        said.append(str(error.value))
        with pytest.raises(UsageError) as error:
            ElixirAccelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        said.append(str(error.value))
        accelerator.release()
    with launched(), pytest.raises(ConfigError) as refused:
        ElixirAccelerator(cpu=True, mixed_precision="fp16")
    return [*said, str(refused.value)]


def test_what_cannot_be_prepared_is_told(ranks: Ranks) -> None:
    (said,) = ranks(1).run(prepared_badly)
    assert said[0].startswith("prepare got 1 trainable models and 0 optimizers: give one model with its optimizer")
    assert said[1].startswith("prepare got 2 trainable models and 1 optimizers")
    assert "call prepare with both first" in said[2]
    assert "load_state needs the folder that save_state returned" in said[3]
    assert "another trainer or Accelerator has wrapped this model" in said[4]
    assert "mixed_precision='fp16': expected 'bf16' or 'no'; write mixed_precision='bf16'" in said[5]


def sft() -> str:
    with launched():
        return run_example(Path(__file__).parents[2] / "examples" / "sft_trainer.py")


def test_the_example_of_sft_runs(ranks: Ranks) -> None:
    first, _ = ranks(2).run(sft)
    losses = [float(loss) for loss in first.partition("losses: ")[2].splitlines()[0].split()]
    assert losses[-1] < losses[0] - 0.1
    assert float(first.partition("differ by ")[2].split()[0]) <= 1e-5

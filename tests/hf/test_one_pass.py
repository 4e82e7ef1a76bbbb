"""Trainers whose micro-batches pass each layer together: what the plain trainer logs and trains."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elixir_moe as em
from elixir_moe.errors import UsageError
from elixir_moe.hf import fused_loss
from elixir_moe.runtime.hooks import Hooks
from tests.hf.test_trainer import check_alike, data, launched, mixture
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
PLAN = em.Plan.offload(chunk_numel=8192, rcache_blocks=4, batches_per_pass=8)


@contextlib.contextmanager
def passes() -> Iterator[list[int]]:
    """The number of micro-batches of each pass that runs in the context."""
    found: list[int] = []
    run = Hooks.run_in_turns

    def counted(hooks: Hooks, forwards: Any, *args: Any) -> Any:
        found.append(len(forwards))
        return run(hooks, forwards, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hooks, "run_in_turns", counted)
        yield found


def with_passes(run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[int]]:
    """(rank) The result of a run, and the number of micro-batches of each of its passes."""
    with passes() as found:
        return run(*args, **kwargs), found


def uneven(rows: int) -> list[dict[str, Any]]:
    """Rows with different numbers of tokens to learn."""
    found = data()[:rows]
    for number, row in enumerate(found):
        row["labels"] = row["labels"].clone()
        row["labels"][: 1 + 5 * number % 13] = -100
    return found


def trained(
    folder: str,
    plan: em.Plan | None,
    micro_batches: int,
    *,
    stop: int = 0,
    resume: bool = False,
    tied: bool = False,
    loss: str = "whole",
    **settings: Any,
) -> dict[str, Any]:
    """Two epochs of ten batches, of ours with a plan, of the plain Trainer without.

    `stop`: Ctrl-C in that call of the loss; the training begins again if it does not `resume` in another call.
    """
    from transformers import Trainer, TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    base: Any = Trainer if plan is None else ElixirTrainer
    calls = 0

    class Stopped(base):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == stop:
                signal.raise_signal(signal.SIGINT)
            return super().compute_loss(*args, **kwargs)

    with launched(), passes() as found:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        arguments = TrainingArguments(
            folder, num_train_epochs=2, per_device_train_batch_size=4 // dist.get_world_size(), learning_rate=1e-2,
            gradient_accumulation_steps=micro_batches, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
            **{"max_grad_norm": 0.5, "save_strategy": "no", **settings},
        )  # fmt: skip
        given = {} if plan is None else {"plan": plan, "loss": loss}
        model = mixture(tie_word_embeddings=tied)
        trainer = Stopped(model, arguments, train_dataset=uneven(40), eval_dataset=data()[:16], **given)
        if stop:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        if not stop or not settings:
            trainer.train(resume_from_checkpoint=resume or None)
        log = trainer.state.log_history
        full = trainer.model.state_dict() if plan is None else em.full_state_dict(trainer.model, all_ranks=True)
        if plan is not None:
            trainer.model._elixir.optimizer.close()
    keys = {"loss": "loss", "norm": "grad_norm", "rate": "learning_rate", "eval": "eval_loss"}
    return {
        **{name: [float(entry[key]) for entry in log if key in entry] for name, key in keys.items()},
        "state": {name: value.float() for name, value in full.items()},
        "passes": found,
    }


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("micro_batches", [4, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2, 3))])
def test_losses_are_those_of_the_plain_trainer(ranks: Ranks, tmp_path: Path, world: int, micro_batches: int) -> None:
    """The ten batches of an epoch do not divide by 3 and 4: its last step has fewer."""
    (plain,) = ranks(1).run(trained, str(tmp_path / "plain"), None, micro_batches, **EVALUATED)
    whole, rest = divmod(10, micro_batches)
    expected = [micro_batches] * whole + [rest] * (rest > 1)
    for ours in ranks(world).run(trained, str(tmp_path / "ours"), PLAN, micro_batches, **EVALUATED):
        check_alike(ours, plain)
        assert ours["passes"] == (expected * 2 if micro_batches > 1 else [])


def test_fewer_micro_batches_than_all_pass_together(ranks: Ranks, tmp_path: Path) -> None:
    (plain,) = ranks(1).run(trained, str(tmp_path), None, 5)
    for together, expected in ((2, [2, 2]), (1, [])):
        (ours,) = ranks(1).run(trained, str(tmp_path), replace(PLAN, batches_per_pass=together), 5)
        check_alike(ours, plain)
        assert ours["passes"] == expected * 4


SETTINGS: dict[str, dict[str, Any]] = {
    "smoothed": {"label_smoothing_factor": 0.1, "tied": True},
    "without logits": {"loss": "fused", "tied": True},
    "smoothed without logits": {"label_smoothing_factor": 0.1, "loss": "fused", "gradient_checkpointing": True},
    "updates in backward": {"max_grad_norm": 0.0, "save_strategy": "epoch"},
    "each mean": {"average_tokens_across_devices": False, "gradient_checkpointing": True},
}


def recomputed(*args: Any, **settings: Any) -> set[bool]:
    """(rank) How a training computes its losses without logits: whether again in backward."""
    found = set()
    fused = fused_loss.linear_cross_entropy

    def noted(*given: Any, recompute: bool, **options: Any) -> torch.Tensor:
        found.add(recompute)
        return fused(*given, recompute=recompute, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_loss, "linear_cross_entropy", noted)
        trained(*args, loss="fused", **settings)
    return found


@pytest.mark.parametrize(("plan", "micro_batches"), [(PLAN, 4), (PLAN, 1), (replace(PLAN, batches_per_pass=1), 4)])
def test_losses_whose_gradients_would_wait_for_each_other_are_recomputed(
    ranks: Ranks, tmp_path: Path, plan: em.Plan, micro_batches: int
) -> None:
    (found,) = ranks(1).run(recomputed, str(tmp_path), plan, micro_batches)
    assert found == {plan.batches_per_pass == 8 and micro_batches > 1}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_trainer(ranks: Ranks, tmp_path: Path, world: int, name: str) -> None:
    settings = SETTINGS[name]
    plain = ranks(world).run(trained, str(tmp_path / "plain"), None, 4, **settings | {"loss": "whole"})
    for ours in ranks(world).run(trained, str(tmp_path / "ours"), PLAN, 4, **settings):
        check_alike(ours, plain[0])
        assert ours["passes"] == [4, 4, 2] * 2


def test_ctrl_c_in_a_pass(ranks: Ranks, tmp_path: Path) -> None:
    """Losses from the weights of the step before, as the plain trainer's, and from a checkpoint as without a stop."""
    (plain,) = ranks(1).run(trained, str(tmp_path), None, 4, stop=7)
    (ours,) = ranks(1).run(trained, str(tmp_path), PLAN, 4, stop=7)
    check_alike(ours, plain)
    saved = {"save_strategy": "steps", "save_steps": 1}
    (plain,) = ranks(1).run(trained, str(tmp_path / "plain"), None, 4, **saved)
    ranks(1).run(trained, str(tmp_path / "ours"), PLAN, 4, stop=13, **saved)
    (ours,) = ranks(1).run(trained, str(tmp_path / "ours"), PLAN, 4, resume=True, **saved)
    check_alike(ours, plain)
    assert ours["passes"] == [4, 4, 2]


def looped(folder: str, case: str) -> tuple[str, list[int]]:
    """The warning or error of a trainer whose micro-batches cannot pass together, and its passes."""
    from transformers import TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    class Own(ElixirTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            found = super().training_step(*args, **kwargs)
            assert found.item() > 0
            return found

    class Switching(ElixirTrainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(model, *args, **kwargs)
            model.eval()
            with torch.no_grad():
                super().compute_loss(model, *args, **kwargs)
            model.train()
            return found

    kind = {"step": Own, "offloading": ElixirTrainer, "switch": Switching}[case]
    with launched(), passes() as found:
        arguments = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
            report_to=[], disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        arguments.activation_offloading = case == "offloading"
        trainer = kind(mixture(), arguments, train_dataset=uneven(40), plan=PLAN)
        if case == "switch":
            with pytest.raises(UsageError) as error:
                trainer.train()
            said = str(error.value)
        else:
            with pytest.warns(UserWarning, match="batches_per_pass=8") as warned:
                trainer.train()
            said = " ".join(str(each.message) for each in warned)
        trainer.model._elixir.optimizer.close()
    return said, found


def test_what_keeps_micro_batches_in_the_plain_loop(ranks: Ranks, tmp_path: Path) -> None:
    for case, why in {"step": "Own.training_step may read the loss", "offloading": "activation_offloading"}.items():
        ((said, found),) = ranks(1).run(looped, str(tmp_path), case)
        assert why in said and not found


def test_a_loss_that_switches_modules_is_refused_before_an_update(ranks: Ranks, tmp_path: Path) -> None:
    ((said, found),) = ranks(1).run(looped, str(tmp_path), "switch")
    assert "the step changes 'training' of module" in said and found == [2]


def searched(folder: str, accumulation: int, own_step: bool) -> tuple[Any, Any, Any]:
    """The request of a trainer with four micro-batches a step: (`accumulation`, `batches_per_pass`), and the plan's."""
    from transformers import TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    class Own(ElixirTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    with launched():
        arguments = TrainingArguments(
            folder, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4, use_cpu=True,
            report_to=[], disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        plan = em.Plan.auto(
            step=lambda model, ids: model(input_ids=ids, labels=ids).loss, sample=torch.zeros(2, 16, dtype=torch.long),
            hardware="a100-80g-pcie-x4", accumulation=accumulation,
        )  # fmt: skip
        trainer = (Own if own_step else ElixirTrainer)(mixture(), arguments, train_dataset=uneven(40), plan=plan)
        trainer.train()
        asked, chosen = trainer.accelerator.plan, em.inspect(trainer.model).plan
        trainer.model._elixir.optimizer.close()
    return asked.accumulation, asked.batches_per_pass, chosen.batches_per_pass


@pytest.mark.parametrize(
    ("accumulation", "own_step", "asked"),
    [(1, False, (4, None)), (1, True, (4, 1)), pytest.param(2, False, (2, 1), marks=pytest.mark.slow)],
)
def test_a_search_knows_the_micro_batches_of_a_step(
    ranks: Ranks, tmp_path: Path, accumulation: int, own_step: bool, asked: tuple[int, int | None]
) -> None:
    (found,) = ranks(1).run(searched, str(tmp_path), accumulation, own_step)
    assert found[:2] == asked and found[2] is not None


def watched(folder: str, plan: em.Plan) -> list[tuple[Any, ...]]:
    """(rank) The facts of each step for a callback, which computes each loss again."""
    from transformers import TrainingArguments

    from elixir_moe.hf.steps import StepCallback
    from elixir_moe.hf.trainer import ElixirTrainer

    steps: list[tuple[Any, ...]] = []

    class Facts(StepCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            facts = self.trainer.step_facts()
            inputs = list(self.trainer._steps.inputs)
            self.trainer.forward_again()
            steps.append((*facts.losses, facts.norm, facts.tokens, dict(facts.tokens_per_expert), len(inputs)))

    with launched():
        arguments = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=4 // dist.get_world_size(), report_to=[], use_cpu=True,
            gradient_accumulation_steps=3, disable_tqdm=True, save_strategy="no", label_smoothing_factor=0.1,
        )  # fmt: skip
        trainer = ElixirTrainer(mixture(), arguments, train_dataset=uneven(40), plan=plan, callbacks=[Facts()])
        trainer.train()
        trainer.model._elixir.optimizer.close()
    return steps


def test_callbacks_see_all_micro_batches_of_a_step(ranks: Ranks, tmp_path: Path) -> None:
    plain, ours = (
        ranks(2).run(watched, str(tmp_path), replace(PLAN, batches_per_pass=together))[0] for together in (1, 3)
    )
    for found, wanted in zip(ours, plain, strict=True):
        assert found[:4] == pytest.approx(wanted[:4], rel=1e-5)
        assert found[4:] == wanted[4:] and found[-1] == 3

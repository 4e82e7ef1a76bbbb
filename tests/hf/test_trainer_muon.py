"""Muon and another optimizer under the Trainer: the weights of torch's own two in a plain loop, saved and resumed."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_moe as em
from elixir_moe.errors import ConfigError
from elixir_moe.optim.division import matrices_of_layers
from tests.hf.test_trainer import data, launched, mixture
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS, ROWS, MICRO = 6, 8, 2
LR, DECAY, EPS = 1e-2, 0.1, 1e-4
CLIPS = {"bf16": 0.0, "fp32": 0.5}
RESTS = {"bf16": "sgd", "fp32": "adamw_torch"}
"""{dtype of the iteration: the largest norm, the other optimizer}. The iteration in bf16 would make more of the last
bits of AdamW's updates and of a clipped gradient, which are computed in another order than torch's."""
PLANS = {"zero3": em.Plan.zero3(), "offload": em.Plan.offload(batches_per_pass=MICRO)}


def dense() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, hidden_size=32, **sizes))


def divided_by_hand(model: Any) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Matrices of layers, other parameters that decay, and those that do not."""
    names = dict(model.named_parameters())
    matrices = {n: p for n, p in names.items() if "proj" in n}
    rest = {n: p for n, p in names.items() if n not in matrices}
    return matrices, [p for n, p in rest.items() if "norm" not in n], [p for n, p in rest.items() if "norm" in n]


def both(model: Any, ns_dtype: str) -> tuple[Any, Any]:
    """What the trainer is to build of its settings; torch's own Muon iterates in bf16."""
    matrices, decays, stays = divided_by_hand(model)
    options: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    muon: Any = torch.optim.Muon if ns_dtype == "bf16" else partial(em.Muon, ns_dtype=ns_dtype)
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": stays, "weight_decay": 0.0}]
    rest: Any = torch.optim.SGD if ns_dtype == "bf16" else partial(torch.optim.AdamW, eps=EPS)
    return muon(matrices.values(), **options), rest(groups, lr=LR)


def looped(model: Any, ns_dtype: str) -> dict[str, torch.Tensor]:
    """The weights of a loop without Trainer: micro-batches, clipping, warm-up and decay of the rate."""
    from transformers import get_scheduler

    optimizers = both(model, ns_dtype)
    schedules = [get_scheduler("linear", each, num_warmup_steps=2, num_training_steps=STEPS) for each in optimizers]
    rows = data()
    order = torch.utils.data.DataLoader(rows, ROWS // MICRO, shuffle=False)  # type: ignore[arg-type]
    batches = iter(order)
    for _ in range(STEPS):
        micro = [next(batches) for _ in range(MICRO)]
        tokens = sum(batch["labels"][:, 1:].numel() for batch in micro)
        for batch in micro:
            model(**batch, num_items_in_batch=tokens).loss.backward()
        if CLIPS[ns_dtype]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPS[ns_dtype])
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(
    folder: str,
    how: str,
    plan: em.Plan,
    model: Callable[[], Any] = dense,
    *,
    stop: int = 0,
    resume: bool = False,
    ns_dtype: str = "bf16",
    muon: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """(rank) The weights after a training by the Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from elixir_moe.hf.trainer import ElixirTrainer

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop:
                raise KeyboardInterrupt

    class Creates(ElixirTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = both(self.model, ns_dtype)
            return self.optimizer

    with launched():
        world = torch.distributed.get_world_size()
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=ROWS // MICRO // world, learning_rate=LR,
            gradient_accumulation_steps=MICRO, max_grad_norm=CLIPS[ns_dtype], warmup_steps=2, weight_decay=DECAY,
            adam_epsilon=EPS, use_cpu=True, report_to=[], disable_tqdm=True, train_sampling_strategy="sequential",
            save_steps=2, save_strategy="steps" if stop or resume else "no",
            **{"optim": RESTS[ns_dtype], **settings},
        )  # fmt: skip
        made = model()
        ways: dict[str, dict[str, Any]] = {
            "muon=": {"muon": {"ns_dtype": ns_dtype, **(muon or {})}},
            "optimizers=": {"optimizers": (both(made, ns_dtype), None)} if how == "optimizers=" else {},
            "create_optimizer": {},
        }
        given = ways[how] | (given or {})
        kind: Any = Creates if how == "create_optimizer" else ElixirTrainer
        trainer = kind(made, arguments, train_dataset=data(), plan=plan, callbacks=[Dies()], **given)
        assert isinstance(trainer, Trainer)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=resume or None)
        full = em.full_state_dict(trainer.model, all_ranks=True)
        trainer.model._elixir.optimizer.close()
    return {name: value.clone() for name, value in full.items()}


@pytest.mark.parametrize("how", ["muon=", "optimizers=", "create_optimizer"])
@pytest.mark.parametrize(("plan", "ns_dtype"), [("zero3", "bf16"), ("offload", "fp32")])
def test_weights_are_those_of_torchs_two_optimizers_in_a_loop(
    ranks: Ranks, tmp_path: Path, how: str, plan: str, ns_dtype: str
) -> None:
    """Two micro-batches a step, one by one or in one pass, and a rate that rises and falls."""
    (wanted,) = ranks(1).run(looped, dense(), ns_dtype)
    (found,) = ranks(1).run(trained, str(tmp_path), how, PLANS[plan], ns_dtype=ns_dtype)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0 if ns_dtype == "bf16" else 1e-6)


def test_a_killed_run_goes_on_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks(2).run(trained, str(tmp_path / "whole"), "muon=", PLANS["zero3"], mixture, ns_dtype="fp32")
    folder = str(tmp_path / "killed")
    ranks(2).run(trained, folder, "muon=", PLANS["zero3"], mixture, stop=5, ns_dtype="fp32")
    found = ranks(2).run(trained, folder, "muon=", PLANS["zero3"], mixture, resume=True, ns_dtype="fp32")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_options_of_muon_are_its_own(ranks: Ranks, tmp_path: Path) -> None:
    """A rate of 0 for Muon leaves the matrices as they are; the rest trains, without clipping and by SGD."""
    settings: dict[str, Any] = {"muon": {"lr": 0.0}, "optim": "sgd"}
    (found,) = ranks(1).run(trained, str(tmp_path), "muon=", PLANS["offload"], **settings)
    model = dense()
    matrices, *_ = divided_by_hand(model)
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value) is (name in matrices), name


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(dense(), LoraConfig(r=2, target_modules=["q_proj"]))


def two_of_a_kind(model: Any) -> tuple[Any, Any]:
    return torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"muon": {"momentun": 0.9}}, "Muon has no option 'momentun'; did you mean 'momentum'"),
    "value": ({"muon": {"adjust_lr_fn": "best"}}, "Muon with {.*'adjust_lr_fn': 'best'}: "),
    "dtype": ({"muon": {"ns_dtype": "fp8"}}, "ns_dtype='fp8'"),
    "adapters": ({"model": adapted}, "none of these is trainable"),
    "the rest": ({"optim": "adafactor"}, "Adafactor looks at whole tensors"),
    "given": ({"given": {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), None)}}, "leave one"),
    "two": ({"given": {"optimizers": (two_of_a_kind(dense()), None), "muon": None}}, "at most one elementwise"),
    "none": ({"given": {"optimizers": ((3,), None), "muon": None}}, "a sequence of them such as .muon, adamw."),
}


def refused(case: str, folder: str) -> None:
    """(rank) Trains with wrong arguments."""
    changes, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        trained(folder, "muon=", PLANS["zero3"], **changes)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(ranks: Ranks, tmp_path: Path, case: str) -> None:
    ranks(1).run(refused, case, str(tmp_path))


def test_matrices_of_layers_and_experts_are_muons() -> None:
    with torch.device("meta"):
        model = mixture()
        for layer in model.model.layers:
            layer.mixer = torch.nn.Conv1d(8, 8, 4, groups=8)
            layer.bias_table = torch.nn.Embedding(4, 4)
            layer.mlp.shared_expert_gate = torch.nn.Linear(32, 1, bias=False)
            layer.mlp.experts.down_proj_bias = torch.nn.Parameter(torch.empty(4, 32))
        model.model.layers[1].requires_grad_(False)
    names = set(matrices_of_layers(model))
    inside = {
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
    }
    inside |= {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert names == {f"model.layers.0.{name}" for name in inside}
    assert not matrices_of_layers(adapted())

"""Trainers built on Hugging Face's Trainer, with the mixin in front: TRL's, and Seq2SeqTrainer, which generates.

The oracle is the trainer without the mixin on as many ranks, which is DistributedDataParallel on two.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elixir_moe as em
from tests.hf.test_one_pass import passes
from tests.hf.test_trainer import launched
from tests.support.cases import with_further
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
VOCAB, ROWS = 64, 16
PLANS = {"zero3": em.Plan.zero3(), "offload": em.Plan.offload()}
SETTINGS = {
    "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True,
    "save_strategy": "no", "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip


def tokenizer() -> Any:
    """One token for each of the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCAB - 3))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def text(seed: int, words: int) -> str:
    drawn = torch.randint(VOCAB - 3, (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in drawn.tolist())


def column(seed: int, words: int) -> list[str]:
    return [text(seed + row, words) for row in range(ROWS)]


def write_llama(folder: str) -> None:
    """A model in a folder, since some of TRL's trainers read a reference from there again."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def llama(folder: str, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)  # for a head that the folder lacks
    kind = AutoModelForSequenceClassification if more else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, **more)


def reward_of(completions: list[str], **_: Any) -> list[float]:
    return [float(completion.count("1")) for completion in completions]


def parts(name: str, folder: str) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """(trainer, its settings, its arguments, values of settings)"""
    if name == "dpo":
        from trl import DPOConfig, DPOTrainer

        rows = {"prompt": column(0, 4), "chosen": column(100, 5), "rejected": column(200, 5)}
        return DPOTrainer, DPOConfig, {"model": llama(folder), "train_dataset": rows}, {}
    if name == "sft":
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer, SFTConfig, {"model": llama(folder), "train_dataset": {"text": column(0, 9)}}, {}
    if name == "kto":
        from trl.experimental.kto import KTOConfig, KTOTrainer

        rows = {"prompt": column(0, 4), "completion": column(100, 5), "label": [row % 2 == 0 for row in range(ROWS)]}
        return KTOTrainer, KTOConfig, {"model": llama(folder), "train_dataset": rows}, {}
    if name == "reward":
        from trl import RewardConfig, RewardTrainer

        rows = {"chosen": column(100, 5), "rejected": column(200, 5)}
        return RewardTrainer, RewardConfig, {"model": llama(folder, num_labels=1), "train_dataset": rows}, {}
    from trl import GRPOConfig, GRPOTrainer

    given = {"model": llama(folder), "train_dataset": {"prompt": column(0, 4)}, "reward_funcs": reward_of}
    return GRPOTrainer, GRPOConfig, given, {"num_generations": 4, "max_completion_length": 8, "beta": 0.1}


def trained(
    name: str, folder: str, plan: em.Plan | None, lora: bool, micro_batches: int = 1, **more: Any
) -> tuple[list[dict[str, float]], dict[str, Any], list[int]]:
    """(rank) The log and the weights of a trainer of TRL, and the micro-batches of each pass."""
    from datasets import Dataset
    from peft import LoraConfig

    from elixir_moe.hf.trainer import ElixirMixin

    with launched():
        kind, config, given, values = parts(name, folder)
        given["train_dataset"] = Dataset.from_dict(given["train_dataset"])
        if lora:
            task = "SEQ_CLS" if name == "reward" else "CAUSAL_LM"
            given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
        if name == "grpo":
            kind = type("Seeded", (kind,), {"_generate_and_score_completions": seeded(kind)})
        if plan is not None:
            kind, given["plan"] = type("Ours", (ElixirMixin, kind), {}), plan
        values |= {"gradient_accumulation_steps": micro_batches, **more}
        batch = 8 // dist.get_world_size() // micro_batches
        settings = config(f"{folder}/out", per_device_train_batch_size=batch, **SETTINGS | values)
        trainer = kind(args=settings, processing_class=tokenizer(), **given)
        with passes() as found:
            trainer.train()
        if plan is None:
            state = trainer.model.state_dict()
        else:
            state = em.full_state_dict(trainer.model, all_ranks=True)
            trainer.model._elixir.optimizer.close()
    clocks = ("time", "runtime", "per_second")
    log = [
        {key: float(value) for key, value in entry.items() if not key.endswith(clocks)}
        for entry in trainer.state.log_history
    ]
    return log, {name: value.clone() for name, value in state.items()}, found


def seeded(kind: Any) -> Callable[..., Any]:
    """A trainer's generation with a seed of its own for each step: a pass of several micro-batches draws seeds."""

    def generate(trainer: Any, inputs: Any) -> Any:
        torch.manual_seed(trainer.state.global_step)
        return kind._generate_and_score_completions(trainer, inputs)

    return generate


def check(ours: list[Any], plain: list[Any], expected: list[int]) -> None:
    for (log, state, found), (plain_log, plain_state, _) in zip(ours, plain, strict=True):
        for entry, wanted in zip(log, plain_log, strict=True):
            assert entry == pytest.approx(wanted, abs=1e-5, rel=1e-5)
        torch.testing.assert_close(state, plain_state, atol=1e-5, rtol=0)
        assert found == expected


CASES = [(name, lora, world) for name in ("dpo", "kto", "reward", "grpo") for lora in (True, False) for world in (1, 2)]
QUICK = (("grpo", True, 2), ("dpo", False, 1))


@pytest.mark.parametrize(
    ("name", "lora", "world"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_a_trainer_of_trl_trains_as_without_the_mixin(
    ranks: Ranks, tmp_path: Path, name: str, lora: bool, world: int
) -> None:
    write_llama(str(tmp_path))
    plain = ranks(world).run(trained, name, str(tmp_path), None, lora)
    ours = ranks(world).run(trained, name, str(tmp_path), PLANS["offload" if lora else "zero3"], lora)
    check(ours, plain, [])


TOGETHER = em.Plan.offload(chunk_numel=2048, rcache_blocks=6, batches_per_pass=8)
IN_PASSES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "sft": ("sft", False, {"label_smoothing_factor": 0.1}),
    "sft of adapters": ("sft", True, {"gradient_checkpointing": True}),
    "dpo with a reference": ("dpo", False, {"gradient_checkpointing": True}),
    "dpo of adapters, references before": ("dpo", True, {"precompute_ref_log_probs": True}),
    "kto": ("kto", False, {}),
    "reward": ("reward", False, {}),
    "grpo": ("grpo", False, {}),
    "grpo of adapters": ("grpo", True, {}),
}


ON_TWO_RANKS = ("sft", "dpo with a reference", "kto", "grpo of adapters")


@pytest.mark.parametrize(
    ("case", "world"),
    with_further(
        [*((case, 1) for case in IN_PASSES), *((case, 2) for case in ON_TWO_RANKS)],
        [("sft", 1), ("dpo with a reference", 1), ("grpo of adapters", 2)],
    ),
)
def test_micro_batches_of_a_trainer_of_trl_pass_together(ranks: Ranks, tmp_path: Path, case: str, world: int) -> None:
    name, lora, more = IN_PASSES[case]
    write_llama(str(tmp_path))
    plain = ranks(world).run(trained, name, str(tmp_path), None, lora, 4 // world, **more)
    ours = ranks(world).run(trained, name, str(tmp_path), TOGETHER, lora, 4 // world, **more)
    check(ours, plain, [4 // world] * 3)


IN_THE_LOOP: dict[str, tuple[str, bool, dict[str, Any], str]] = {
    "references": ("dpo", True, {}, "precompute_ref_log_probs=True computes it before"),
    "references of kto": ("kto", True, {}, "the loss switches adapters off"),
    "entropy": ("grpo", True, {"use_adaptive_entropy": True}, "use_adaptive_entropy=True"),
}


@pytest.mark.parametrize("case", with_further(IN_THE_LOOP, ("references",)))
def test_what_keeps_micro_batches_in_the_plain_loop(ranks: Ranks, tmp_path: Path, case: str) -> None:
    name, lora, more, why = IN_THE_LOOP[case]
    write_llama(str(tmp_path))
    plain = ranks(1).run(trained, name, str(tmp_path), None, lora, 4, **more)
    ours = ranks(1).run(warned, name, str(tmp_path), why, lora, more)
    check(ours, plain, [])


def warned(name: str, folder: str, why: str, lora: bool, more: dict[str, Any]) -> Any:
    with pytest.warns(UserWarning, match=why):
        return trained(name, folder, TOGETHER, lora, 4, **more)


def generated(folder: str, plan: em.Plan | None) -> list[float]:
    """(rank) Losses and lengths of a Seq2SeqTrainer that generates in each evaluation."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from elixir_moe.hf.trainer import ElixirMixin

    with launched():
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=16, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0,
            dropout_rate=0.0, initializer_factor=4.0,
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
        model.generation_config.eos_token_id = [1, 12, 13, 14]
        rows = torch.randint(16, (ROWS, 6), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": row, "labels": row} for row in rows]
        settings = Seq2SeqTrainingArguments(
            folder, predict_with_generate=True, generation_max_length=5, eval_strategy="steps", eval_steps=2,
            per_device_train_batch_size=8 // dist.get_world_size(), per_device_eval_batch_size=1,
            **SETTINGS | {"learning_rate": 1e-3, "max_steps": 2},
        )  # fmt: skip
        kind: Any = Seq2SeqTrainer if plan is None else type("Ours", (ElixirMixin, Seq2SeqTrainer), {})
        given: dict[str, Any] = {} if plan is None else {"plan": plan}

        def lengths(found: Any) -> dict[str, float]:
            tokens = torch.as_tensor(found.predictions).clamp(min=0)
            words = (tokens > 0).sum(1)
            return {"tokens": float(tokens.sum()), "shortest": float(words.min()), "longest": float(words.max())}

        trainer = kind(
            model, settings, train_dataset=data, eval_dataset=data[8:],
            compute_metrics=lengths, **given,
        )  # fmt: skip
        trainer.train()
        if plan is not None:
            trainer.model._elixir.optimizer.close()
    kept = ("loss", "eval_loss", "eval_tokens", "eval_shortest", "eval_longest")
    return [float(entry[key]) for entry in trainer.state.log_history for key in kept if key in entry]


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_an_evaluation_that_generates_other_lengths_on_each_rank(ranks: Ranks, tmp_path: Path, world: int) -> None:
    plain = ranks(world).run(generated, str(tmp_path / "plain"), None)[0]
    plan = em.Plan.zero3(chunk_numel=4096, rcache_blocks=2)  # weights leave between two tokens
    ours = ranks(world).run(generated, str(tmp_path / "ours"), plan)
    assert plain[4] < plain[5], "every row has the same length"
    for found in ours:
        assert found == pytest.approx(plain, abs=1e-5)

"""Models of Hugging Face and modules of one's own under the trainer, beside a plain loop on the same rows.

One rank computes what plain torch does, in its order: to the bit where nothing is adapted beside a weight. Two ranks
sum in another order: a few roundings of 6e-8 a step, which AdamW enlarges where a gradient is near zero, so losses and
norms are compared within 1e-4.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from elixir_moe import settings
from elixir_moe.cli.main import main
from elixir_moe.errors import CheckpointError, ConfigError, LayoutError
from elixir_moe.models.adapters import adapted
from elixir_moe.models.lora import Lora
from elixir_moe.train import config as configs
from elixir_moe.train.config import TrainConfig
from elixir_moe.train.export import export
from elixir_moe.train.huggingface import HuggingFaceRecipe
from elixir_moe.train.module import ModuleRecipe
from tests.support.checkpoint_cases import assert_same
from tests.support.hf_folders import CONFIGS, model_folder, some_rows, tokenizer, write_rows
from tests.support.ranks import RankPool
from tests.support.train_cases import last_state, run, written

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

Ranks = Callable[[int], RankPool]
STEPS, ROWS, LENGTH = 3, 4, 32
EXPERTS = {"r": 4, "targets": ["q_proj", "v_proj", "experts"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama, Qwen3Moe and rows.jsonl."""
    where = tmp_path_factory.mktemp("models")
    for kind in ("Llama", "Qwen3Moe"):
        model_folder(where / kind, kind)
    write_rows(where / "rows.jsonl", some_rows())
    return where


def settings_of(folders: Path, kind: str, out: Path, **changes: Any) -> TrainConfig:
    """A short run without clipping, decay or schedule."""
    sections: dict[str, Any] = {
        "model": {"hf": str(folders / kind)},
        "data": {"file": str(folders / "rows.jsonl"), "seq_len": LENGTH},
        "plan": {"kind": "offload"},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "warmup_steps": 0, "final_lr": 1.0, "clip_norm": None},
        "run": {"steps": STEPS, "global_batch": ROWS, "eval_every": STEPS, "out": str(out)},
    }
    for section, values in changes.items():
        if isinstance(values, dict):
            sections.setdefault(section, {}).update(values)
        else:
            sections[section] = values
    return settings.build(TrainConfig, sections)


def plain_model(config: TrainConfig) -> Any:
    """The model of a run by transformers and peft alone."""
    folder = config.model.hf  # type: ignore[union-attr]
    torch.manual_seed(config.run.seed)
    described = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32).train()
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    if config.lora is None:
        model.load_state_dict(read)
        return model
    fused = ["experts.gate_up_proj", "experts.down_proj"] if "experts" in config.lora.targets else None
    modules = [target for target in config.lora.targets if target != "experts"]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=16, target_modules=modules, target_parameters=fused)
    )
    names = {name.replace(".base_layer", ""): p for name, p in adapted.get_base_model().named_parameters()}
    with torch.no_grad():
        for name, value in read.items():
            if name in names:
                names[name].copy_(value)
    return adapted


def plain(config: TrainConfig) -> tuple[list[tuple[float, float]], Any]:
    """(loss, norm) of each step of a plain loop on whole batches, and the model."""
    data, model = config.load_data(), plain_model(config)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for step in range(1, STEPS + 1):
        tokens, labels, positions = data.batch(seed=0, step=step, rows=ROWS).unbind(1)
        given = {"position_ids": positions} if data.restarts else {}
        loss = model(input_ids=tokens, labels=labels, use_cache=False, **given).loss
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
        found.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return found, model


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, one text a row": ("Llama", {"data": {"packing": False}}),
    "Llama, adapters": ("Llama", {"lora": {"r": 4, "targets": ["q_proj", "v_proj"]}}),
    "Qwen3Moe": ("Qwen3Moe", {"model": {"checkpoint": "non_reentrant"}}),
    "Qwen3Moe, adapters of experts": ("Qwen3Moe", {"lora": EXPERTS}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_trains_as_in_a_plain_loop(case: str, folders: Path, ranks: Ranks, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    one = settings_of(folders, kind, tmp_path / "one", **changes)
    expected, model = plain(one)
    found = ranks(1).run(run, one, None, 0, True)[0]
    assert found["ended"] == "" and found["status"]["state"] == "done"
    losses = [line["loss"] for line in found["metrics"]]
    # peft computes x (W + A B), this library x W + (x A) B. Elsewhere only Adam's last bit differs from torch's.
    assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-5 if "experts" in case else 1e-6)
    if "adapters" not in case:  # a CPU with AVX2 only adds thin products up by where their memory begins
        assert losses[0] == expected[0][0]
    assert [line["grad_norm"] for line in found["metrics"]] == pytest.approx([n for _, n in expected], rel=1e-4)
    two = settings_of(folders, kind, tmp_path / "two", **changes)
    spread = ranks(2).run(run, two, None, 0, True)[0]
    assert spread["ended"] == ""
    assert [line["loss"] for line in spread["metrics"]] == pytest.approx(losses, rel=1e-4)
    assert spread["metrics"][-1]["val_loss"] == pytest.approx(found["metrics"][-1]["val_loss"], rel=1e-4)
    if kind == "Qwen3Moe":
        (layer, *_) = found["metrics"][0]["tokens_per_expert"].items()
        assert sum(layer[1]) == 2 * ROWS * LENGTH, "two experts a token"
        assert spread["metrics"][0]["tokens_per_expert"] == found["metrics"][0]["tokens_per_expert"]
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        wanted = model.eval()(input_ids=tokens).logits
        told = export(tmp_path / "two")
        read = transformers.AutoModelForCausalLM.from_pretrained(
            folders / kind if told.what == "adapter" else told.out, dtype=torch.float32
        )
        before = read(input_ids=tokens).logits
        if told.what == "adapter":
            read = peft.PeftModel.from_pretrained(read, told.out)
            assert (before - wanted).abs().max() > 1e-2, "the adapters count"
        torch.testing.assert_close(read.eval()(input_ids=tokens).logits, wanted, rtol=1e-3, atol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(told.out)("ab")["input_ids"] == tokenizer()("ab")["input_ids"]


def test_the_loss_of_packed_rows_is_that_of_each_text_alone(folders: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Texts do not see each other, and each label counts once, whatever row and rank it is on."""
    config = settings_of(folders, "Llama", tmp_path / "out", run={"steps": 1, "accumulation": 2})
    data, model = config.load_data(), plain_model(config)
    total, items = 0.0, 0
    for tokens, labels, positions in data.batch(seed=0, step=1, rows=ROWS):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, stop in pairwise(starts):
            if (labels[start:stop] >= 0).any():
                logits = model(input_ids=tokens[None, start:stop]).logits[0, :-1]
                wanted = labels[start + 1 : stop]
                total += nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
                items += int((wanted >= 0).sum())
    found = ranks(2).run(run, config, None, 0, True)[0]["metrics"][0]["loss"]
    assert found == pytest.approx(total / items, rel=1e-5)


def test_adapters_on_quantized_weights(folders: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Trained beside peft on the decoded weights; the base's rows are multiples of a block."""
    import elixir_moe as em

    folder = model_folder(tmp_path / "wide", "Llama", hidden_size=64, intermediate_size=64, head_dim=64)
    changes = {"model": {"hf": str(folder)}, "lora": {"r": 4, "targets": ["q_proj", "v_proj"]}, "quantize": "nf4"}
    config = settings_of(folders, "wide", tmp_path / "out", **changes)
    model = plain_model(config)
    base = em.dequantize(em.quantize(model.get_base_model(), "nf4"))
    assert base is model.get_base_model()
    data = config.load_data()
    tokens, labels, positions = data.batch(seed=0, step=1, rows=ROWS).unbind(1)
    wanted = model(input_ids=tokens, labels=labels, position_ids=positions, use_cache=False).loss.item()
    found = ranks(2).run(run, config, None, 0, True)[0]
    assert found["metrics"][0]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert export(tmp_path / "out").change > 0  # type: ignore[operator]
    merged = export(tmp_path / "out", what="merged")
    assert (Path(merged.out) / "model.safetensors").is_file() and merged.difference < 1e-4


def test_a_resume_on_another_number_of_ranks_goes_on_with_the_same_rows(
    folders: Path, ranks: Ranks, tmp_path: Path
) -> None:
    changes = {"lora": EXPERTS, "save": {"every": 1}}
    whole = ranks(1).run(run, settings_of(folders, "Qwen3Moe", tmp_path / "whole", **changes), None, 0, True)[0]
    config = settings_of(folders, "Qwen3Moe", tmp_path / "out", **changes)
    assert ranks(1).run(run, config, {1: "SIGTERM"}, 0, True)[0]["ended"].startswith("75 stopped after step 2")
    found = ranks(1).run(run, config, None, 0, True)[0]
    assert found["metrics"] == whole["metrics"] and [kind for kind, _ in found["events"]] == ["stopped", "resumed"]
    assert_same(last_state(tmp_path / "out"), last_state(tmp_path / "whole"), "the last step")
    other = settings_of(folders, "Qwen3Moe", tmp_path / "other", **changes)
    ranks(2).run(run, other, {1: "SIGTERM"}, 0, True)
    again = ranks(1).run(run, other, None, 0, True)[0]
    assert [line["loss"] for line in again["metrics"]] == pytest.approx(
        [line["loss"] for line in whole["metrics"]], rel=1e-4
    )
    changed = settings_of(folders, "Qwen3Moe", tmp_path / "other", **changes | {"run": {"steps": 9}, "lora": {"r": 8}})
    assert "lora.r is 8, but was 4" in ranks(1).run(run, changed, None, 0, True)[0]["ended"]


@pytest.mark.parametrize("lora", [{}, {"lora": EXPERTS}], ids=["full", "adapters of experts"])
def test_experts_spread_over_ranks_train_as_whole_ones(
    lora: dict[str, Any], folders: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Within the roundings of two ranks; resumed with whole experts; exported in one process."""
    whole = ranks(2).run(run, settings_of(folders, "Qwen3Moe", tmp_path / "whole", **lora), None, 0, True)[0]
    changes: dict[str, Any] = {"model": {"hf": str(folders / "Qwen3Moe"), "ep": 2}, **lora, "save": {"every": 1}}
    found = ranks(2).run(run, settings_of(folders, "Qwen3Moe", tmp_path / "spread", **changes), None, 0, True)[0]
    assert found["ended"] == "" and "experts over 2 ranks" in found["said"]
    stopped = settings_of(folders, "Qwen3Moe", tmp_path / "stopped", **changes)
    ranks(2).run(run, stopped, {1: "SIGTERM"}, 0, True)
    changes["model"]["ep"] = 1
    again = ranks(1).run(run, settings_of(folders, "Qwen3Moe", tmp_path / "stopped", **changes), None, 0, True)[0]
    for other in (found, again):
        for name in ("loss", "grad_norm"):
            wanted = [line[name] for line in whole["metrics"]]
            assert [line[name] for line in other["metrics"]] == pytest.approx(wanted, rel=1e-4)
        assert other["metrics"][0]["tokens_per_expert"] == whole["metrics"][0]["tokens_per_expert"]
        assert other["metrics"][-1]["val_loss"] == pytest.approx(whole["metrics"][-1]["val_loss"], rel=1e-4)
    told = export(tmp_path / "spread")
    assert told.difference <= 1e-4 * told.largest
    changes["model"]["ep"] = 4
    with pytest.raises(LayoutError, match="has 6 experts, which ep=4 ranks cannot share"):
        settings_of(folders, "Qwen3Moe", tmp_path / "four", **changes).check_ranks(4)


@pytest.mark.slow
def test_a_step_without_memory_is_redone(folders: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 has none left in step 2: all redo it from the same rows, in more and smaller micro-batches."""
    root, out = Path(__file__).parents[2], tmp_path / "out"
    config = settings_of(folders, "Qwen3Moe", out, lora=EXPERTS, plan={"kind": "ddp"}, run={"timeout_seconds": 240.0})
    Path(f"{out}.yaml").write_text(settings.to_yaml(config))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(root / "tests" / "support" / "fault_program.py"), str(out), "1", "2=memory"]
    done = subprocess.run(
        [sys.executable, *torchrun, *program],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found = written(out)
    assert [kind for kind, _ in found["events"]] == ["out of memory", "resumed"]
    assert found["events"][0][1].startswith("rank 1 in step 2; it is redone with micro-batches: 2")
    changes: dict[str, Any] = {"lora": EXPERTS, "plan": {"kind": "ddp"}}
    whole = ranks(2).run(run, settings_of(folders, "Qwen3Moe", tmp_path / "whole", **changes), None, 0, True)[0]
    losses = [[line["loss"] for line in lines] for lines in (found["metrics"], whole["metrics"])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


class Toy(nn.Module):
    """A module of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.tokens(tokens)))  # type: ignore[no-any-return]


def toy() -> nn.Module:
    """For model.module."""
    return Toy()


def tied() -> nn.Module:
    """For model.module, with one weight as embedding and head."""
    toy = Toy()
    toy.head.weight = toy.tokens.weight
    return toy


def toy_with_loss() -> tuple[nn.Module, Any]:
    """For model.module, with half the loss that it has by itself."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2

    return Toy(), loss


class WithLoss(Toy):
    """Takes the batch, and returns a dict with a loss, as Trainer's models do."""

    def forward(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits, labels = super().forward(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        summed = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": summed / batch["items"]}


def with_loss() -> tuple[nn.Module, Any]:
    """For model.module."""
    return WithLoss(), lambda model, batch: model(batch)["loss"]


def with_loss_undone() -> tuple[nn.Module, Any]:
    """For model.module: the loss function leaves the dict to others."""
    return WithLoss(), lambda model, batch: model(batch)


def without_logits() -> nn.Module:
    """For model.module: neither logits nor a loss of its own."""
    toy = Toy()
    toy.register_forward_hook(lambda *found: {"hidden": found[-1]})
    return toy


def with_logits() -> nn.Module:
    """For model.module: a dict of logits."""
    toy = Toy()
    toy.register_forward_hook(lambda *found: {"logits": found[-1]})
    return toy


def of_module(name: str, out: Path, **changes: Any) -> TrainConfig:
    return settings.build(
        TrainConfig,
        {
            "model": {"module": f"tests.train.test_any_model:{name}"},
            "data": {"seq_len": 16},
            "plan": {},
            "optimizer": {"lr": 1e-2, "weight_decay": 0.0, "warmup_steps": 0, "final_lr": 1.0, "clip_norm": None},
            "run": {"steps": STEPS, "global_batch": ROWS, "eval_batches": 1, "out": str(out)},
            **changes,
        },
    )


def test_a_run_on_a_running_text_keeps_the_length_of_its_rows(tmp_path: Path) -> None:
    """As it does on rows of a file, which are themselves compared, and as our own GPT does by its settings."""
    config = of_module("toy", tmp_path / "out")
    data = config.load_data()
    longer = replace(config, data=replace(config.data, seq_len=32))
    assert configs.identity(config, data) != configs.identity(longer, longer.load_data())
    assert configs.identity(config, data)["data.seq_len"] == 16


def test_a_module_trains_on_bytes_as_in_a_plain_loop(ranks: Ranks, tmp_path: Path) -> None:
    config = of_module("toy", tmp_path / "out")
    torch.manual_seed(0)
    model, data = Toy(), config.load_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(1, STEPS + 1):
        tokens = data.batch(seed=0, step=step, rows=ROWS)[:, 0]
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = ranks(1).run(run, config, None, 0, True)[0]
    assert [line["loss"] for line in found["metrics"]] == losses
    half = ranks(2).run(run, of_module("toy_with_loss", tmp_path / "half"), None, 0, True)[0]
    assert half["metrics"][0]["loss"] == pytest.approx(losses[0] / 2, rel=1e-6)
    told = export(tmp_path / "out")
    assert told.what == "full" and told.difference == 0
    written = load_file(Path(told.out) / "model.safetensors")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(written[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lora", [{}, {"lora": {"r": 2, "targets": ["head"]}}], ids=["full", "adapter"])
def test_a_module_that_returns_a_loss_is_exported_and_compared_by_it(
    lora: dict[str, Any], ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of_module("with_loss", tmp_path / "out", **lora)
    found = ranks(1).run(run, config, None, 0, True)[0]
    assert found["ended"] == ""
    if not lora:
        plain = ranks(1).run(run, of_module("toy", tmp_path / "plain"), None, 0, True)[0]
        assert [line["loss"] for line in found["metrics"]] == [line["loss"] for line in plain["metrics"]]
    told = export(tmp_path / "out")
    assert (told.compared, told.what) == ("losses", "adapter" if lora else "full") and told.difference <= 1e-5
    assert told.largest > 1 and (told.change is None) == (not lora)
    with pytest.raises(ConfigError, match=r"run.sample_bytes: .* has a loss of its own"):
        of_module("with_loss", tmp_path / "out", run={**asdict(config.run), "sample_bytes": 3}).check_ranks(1)

    def spoilt(self: ModuleRecipe, folder: str | None) -> nn.Module:
        model = WithLoss()
        nn.init.ones_(model.tokens.weight)
        return model

    monkeypatch.setattr(ModuleRecipe, "plain", spoilt)
    with pytest.raises(CheckpointError, match="has other losses than the run's model"):
        export(tmp_path / "out", tmp_path / "spoilt")


def test_an_output_that_is_neither_logits_nor_a_loss_is_told(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(1).run(run, of_module("without_logits", tmp_path / "a"), None, 0, True)[0]["ended"]
    assert (
        "without_logits returned a dict of hidden for a tensor (4, 16) of tokens; expected logits of (4, 16, 'V')"
        in said
    )
    said = ranks(1).run(run, of_module("with_loss_undone", tmp_path / "b"), None, 0, True)[0]["ended"]
    assert "with_loss_undone must be a scalar tensor, got a dict of loss" in said
    found = ranks(1).run(run, of_module("with_logits", tmp_path / "c"), None, 0, True)[0]
    plain = ranks(1).run(run, of_module("toy", tmp_path / "d"), None, 0, True)[0]
    assert [line["loss"] for line in found["metrics"]] == [line["loss"] for line in plain["metrics"]]


def test_a_module_that_returns_logits_writes_a_sample(ranks: Ranks, tmp_path: Path) -> None:
    base = of_module("toy", tmp_path / "out").run
    config = of_module("toy", tmp_path / "out", run={**asdict(base), "sample_bytes": 5})
    assert ranks(1).run(run, config, None, 0, True)[0]["ended"] == ""
    assert (tmp_path / "out" / "sample.txt").read_text()


def test_our_own_gpt_has_any_vocabulary_by_a_tokenizer_and_is_exported(
    folders: Path, ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    sections: dict[str, Any] = {
        "model": {"seq_len": 16, "n_layers": 1, "d_model": 16, "n_heads": 2, "vocab_size": 39},
        "data": {"paths": [str(tmp_path / "text.txt")], "tokenizer": str(folders / "Llama")},
        "plan": {},
        "run": {"steps": 2, "global_batch": 4, "eval_batches": 1, "sample_bytes": 3, "out": str(tmp_path / "out")},
    }
    found = ranks(1).run(run, settings.build(TrainConfig, sections), None, 0, True)[0]
    assert found["ended"] == "" and "tokens to train on" in found["said"] and "bigram" not in found["said"]
    assert (tmp_path / "out" / "sample.txt").read_text().replace(" ", "")
    rows = sections | {"data": {"file": str(folders / "rows.jsonl"), "tokenizer": str(folders / "Llama")}}
    rows["run"] = sections["run"] | {"out": str(tmp_path / "rows")}
    ended = ranks(1).run(run, settings.build(TrainConfig, rows), None, 0, True)[0]
    assert ended["ended"] == "" and "rows of 17 tokens" in ended["said"]
    assert export(tmp_path / "out").difference < 1e-6


def test_our_own_mixture_is_exported_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """Its experts were on two ranks."""
    sections: dict[str, Any] = {
        "model": {"seq_len": 16, "n_layers": 1, "d_model": 16, "n_heads": 2, "experts": [4], "ep": [2]},
        "plan": {},
        "run": {"steps": 1, "global_batch": 4, "eval_batches": 1, "sample_bytes": 0, "out": str(tmp_path / "out")},
    }
    assert ranks(2).run(run, settings.build(TrainConfig, sections), None, 0, True)[0]["ended"] == ""
    assert export(tmp_path / "out").difference < 1e-6


PACKS = {
    "Llama": {},
    "Qwen3Moe": CONFIGS["Qwen3Moe"],
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "MiniMax": {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@pytest.mark.parametrize("kind", PACKS)
def test_rows_are_packed_where_no_text_sees_another(kind: str, tmp_path: Path) -> None:
    """The logits of a second text change with the first one, or else the model packs."""
    folder = model_folder(tmp_path / kind, kind, **PACKS[kind])
    model = HuggingFaceRecipe(str(folder)).plain(None).eval()
    row, positions = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    other = torch.tensor([[11, 12, 13, 8, 9, 10]])
    with torch.no_grad():
        found = [model(input_ids=t, position_ids=positions, use_cache=False).logits[:, 3:] for t in (row, other)]
    apart = torch.equal(*found)
    assert apart == (kind in ("Llama", "Qwen3Moe"))
    assert HuggingFaceRecipe(str(folder)).restarts == apart
    if not apart:
        with pytest.raises(ConfigError, match="cannot tell the texts of a row apart"):
            HuggingFaceRecipe(str(folder), packed=True)


@pytest.mark.parametrize("fused", [False, True])
def test_a_validation_loss_is_that_of_the_tokens_alone(fused: bool, tmp_path: Path) -> None:
    """The loss to train by has the auxiliary loss of the routers, here a tenth of their own."""
    folder = model_folder(tmp_path / "M", "Qwen3Moe", output_router_logits=True, router_aux_loss_coef=0.1)
    recipe = HuggingFaceRecipe(str(folder), packed=False, fused=fused)
    model = recipe.plain(None).eval()
    tokens = torch.randint(5, 20, (2, 8))
    batch = torch.stack([tokens, tokens, torch.arange(8).expand(2, 8)], 1)
    with torch.no_grad():
        logits = recipe.compared(model, batch)
        wanted = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        torch.testing.assert_close(recipe.validation_loss(model, batch, 14), wanted)
        assert recipe.loss(model, batch, 14) > wanted + 0.05


@pytest.mark.parametrize(
    ("kernels", "shape"),
    [("flash_attention_2", (1, 16)), ("kernels-community/flash-attn2", (1, 16)), ("sdpa", (2, 8))],
)
def test_kernels_of_texts_of_several_lengths_get_one_row(kernels: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """By either name: transformers takes the kernels from its hub where flash_attn is not installed."""
    recipe = HuggingFaceRecipe(str(model_folder(tmp_path / "M", "Llama")))
    recipe.config._attn_implementation_internal = kernels
    model = Mock(return_value=SimpleNamespace(loss=torch.zeros(())))
    recipe.loss(model, torch.zeros(2, 3, 8, dtype=torch.long), 1.0)
    assert {value.shape for value in model.call_args.kwargs.values() if isinstance(value, torch.Tensor)} == {shape}


def test_a_model_with_a_loss_of_its_own_is_refused(tmp_path: Path) -> None:
    """BART's decoder compares each token with its own logits, averaged over the rank."""
    small = {"d_model": 16, "decoder_layers": 1, "decoder_ffn_dim": 16, "decoder_attention_heads": 2}
    folder = model_folder(tmp_path / "Bart", "Bart", is_decoder=True, is_encoder_decoder=False, **small)
    with pytest.raises(ConfigError, match="BartForCausalLM has a loss that takes no num_items_in_batch"):
        HuggingFaceRecipe(str(folder))


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Llama"])
def test_a_run_says_what_all_linear_adapts(kind: str, folders: Path, ranks: Ranks, tmp_path: Path) -> None:
    """Counted in a model of plain peft, whose all-linear has the routers of mixtures."""
    config = settings_of(folders, kind, tmp_path / "out", lora={"r": 2}, run={"steps": 1})
    said = ranks(1).run(run, config, None, 0, True)[0]["said"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folders / kind)
    plain = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules="all-linear"))
    modules = [module for module in plain.modules() if hasattr(module, "lora_A")]
    (line,) = [line for line in said.splitlines() if line.startswith("adapters    model.layers: ")]
    assert "2 self_attn.q_proj, 2 self_attn.k_proj" in line
    assert sum(int(part.split()[0]) for part in line.partition(": ")[2].split(", ")) == len(modules)
    if kind == "Llama":
        assert "routers" not in said
        return
    assert "2 gate.weight" in line and "lora.targets=q_proj,k_proj,v_proj,o_proj,experts" in said
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]
    config = settings_of(folders, kind, tmp_path / "without", lora={"r": 2, "targets": targets}, run={"steps": 1})
    said = ranks(1).run(run, config, None, 0, True)[0]["said"]
    assert "2 experts.down_proj" in said and "gate.weight" not in said and "routers are" not in said


def test_a_router_that_peft_takes_for_a_linear_layer_is_refused() -> None:
    """peft adds its product to the tuple that such a router returns: a raw error in the first step."""
    small = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.PhimoeConfig(**small, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.router' as a linear layer.*such as q_proj,k_proj,v_proj"):
        adapted(model, Lora(r=2))


def test_a_folder_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    """An image model has no vocabulary."""
    transformers.ViTConfig(hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"\(vit\) is not a causal language model"):
        HuggingFaceRecipe(str(tmp_path), read=False)


def said_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


WRONG: list[tuple[list[str], str]] = [
    (["--model.hf", "FOLDER/none"], "model.hf: no config.json in"),
    (["--model.hf", "FOLDER/bare"], "has no weights (model.safetensors"),
    (["--model.hf", "FOLDER/mute"], "data.tokenizer: there is none in"),
    (["--model.hf", "FOLDER/small"], "small has 20 tokens, but the data has token"),
    (["--model.hfs", "FOLDER/Llama"], "unknown setting 'model.hfs'; did you mean 'model.hf'?"),
    (["--model.hf", "FOLDER/Llama", "--model.d_model", "8"], "model.d_model means nothing with model.hf"),
    (["--model.weights", "false"], "model.weights means nothing without model.hf"),
    (["--model.hf", "FOLDER/Llama", "--quantize", "nf4"], "quantize=nf4 leaves nothing to train"),
    (["--model.hf", "FOLDER/Llama", "--quantize", "nf5"], "quantize: expected 'nf4' | 'mxfp4'"),
    (["--model.hf", "FOLDER/Llama", "--lora.r", "0"], "lora.r: expected at least 1, got 0"),
    (["--model.hf", "FOLDER/Llama", "--lora.rank", "4"], "unknown setting 'lora.rank'; it is called 'lora.r' here"),
    (["--model.hf", "FOLDER/Llama", "--lora.targets", "q_prj"], "q_prj matches nothing in LlamaForCausalLM; did you"),
    (["--model.hf", "FOLDER/Llama", "--lora.targets", "experts"], "experts matches nothing"),
    (["--model.hf", "FOLDER/Llama", "--data.seq_len", "65"], "data.seq_len=65: Llama has 64 positions"),
    (["--model.hf", "FOLDER/Llama", "--run.tp", "2", "--nproc", "2"], "run.tp=2: only our own GPT is cut"),
    (["--model.hf", "FOLDER/Llama", "--model.ep", "2", "--nproc", "2"], "LlamaForCausalLM has no fused experts"),
    (["--model.hf", "FOLDER/Qwen3Moe", "--model.ep", "2"], "model.ep=2 does not divide the 1 ranks of this run"),
    (["--model.hf", "FOLDER/Llama", "--data.paths", "x"], "data.file and data.paths are two kinds of data"),
    (["--model.hf", "FOLDER/Llama", "--data.file", "FOLDER/empty.jsonl"], "is empty"),
    (["--lora.r", "4"], "lora is for model.hf and model.module"),
    (["--data.tokenizer", "FOLDER/empty"], "data.tokenizer: there is none in"),
    (["--model.module", "nothing"], "model.module: expected package.module:function, got 'nothing'"),
    (["--model.module", "no_such_package:f"], "model.module: there is no module 'no_such_package'"),
    (["--model.module", "json:dunp"], "model.module: json has no function 'dunp'; did you mean 'dump'"),
    (["--model.module", "json:dumps"], "json:dumps wants an argument 'obj'"),
    (["--model.module", "os:getcwd"], "os:getcwd returned str"),
]


ON_H100 = ["--gpu", "h100", "--gpus", "1", "--seq", "8", "--batch", "1"]


def folder_with_code(folder: Path) -> Path:
    """A model and a tokenizer whose classes are Python files in their folder; returns the file that these write."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").touch()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    return folder / "ran"


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["train", "--run.out", "FOLDER/out", "--model.hf", "FOLDER"], "config.json"),
        (["train", "--run.out", "FOLDER/out", "--data.tokenizer", "FOLDER"], "tokenizer_config.json"),
        (["plan", "--config", "FOLDER", *ON_H100], "config.json"),
        (["plan", "--config", "FOLDER/config.json", *ON_H100], "config.json"),
        (["sft", "--model_name_or_path", "FOLDER", "--dataset_name", "FOLDER/rows.jsonl", "--use_cpu"], "config.json"),
    ],
)
def test_code_of_a_folder_is_not_run(
    words: list[str], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where transformers would ask whether to run it, the answer may be a key that somebody has pressed too early."""
    ran = folder_with_code(tmp_path / "model")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("FOLDER", str(tmp_path / "model")) for word in words]) == 2
    err = capsys.readouterr().err
    assert "'auto_map' in" in err and f"{tmp_path / 'model' / file} " in err and "trust_remote_code" in err
    assert not ran.exists()


@pytest.fixture(scope="module")
def wrong(folders: Path) -> Path:
    """Folders that lack something."""
    for name, changes in {"bare": {}, "mute": {}, "small": {"vocab_size": 20}}.items():
        model_folder(folders / name, "Llama", **changes)
    (folders / "bare" / "model.safetensors").unlink()
    for path in (folders / "mute").glob("tok*"):
        path.unlink()
    (folders / "empty.jsonl").touch()
    (folders / "empty").mkdir()
    return folders


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(a)[:60] for a, _ in WRONG])
def test_a_mistake_is_told_before_any_work(
    arguments: list[str], said: str, wrong: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.replace("FOLDER", str(wrong)) for argument in arguments]
    if "--data.file" not in given:
        given += ["--data.file", str(wrong / "rows.jsonl")]
    assert said in said_of(["train", "--run.out", str(tmp_path / "out"), *given], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["full", "merged"])
def test_an_export_says_what_the_folder_said_of_generation(what: str, ranks: Ranks, tmp_path: Path) -> None:
    """Of two ends of text, and ways to sample that are not used, which transformers does not write itself."""
    folder = model_folder(tmp_path / "model", "Llama", tie_word_embeddings=True)
    write_rows(tmp_path / "rows.jsonl", some_rows())
    said = {"eos_token_id": [1, 3], "pad_token_id": 0, "do_sample": False, "temperature": 0.3}
    (folder / "generation_config.json").write_text(json.dumps(said))
    lora = {"lora": {"r": 2}} if what == "merged" else {}
    config = settings_of(tmp_path, "model", tmp_path / "out", run={"steps": 1, "sample_bytes": 2}, **lora)
    assert ranks(1).run(run, config, None, 0, True)[0]["ended"] == ""
    written = Path(export(tmp_path / "out", what=what).out)
    assert json.loads((written / "generation_config.json").read_text()) == said
    assert json.loads((written / "config.json").read_text())["use_cache"] is True


def test_adapters_that_change_little_are_compared_all_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Merged into a weight that is the embedding too, they change logits twice; the largest logit is far above both."""
    config = of_module("tied", tmp_path / "out", optimizer={"lr": 1e-4}, lora={"r": 2, "targets": ["head"]})
    assert ranks(1).run(run, config, None, 0, True)[0]["ended"] == ""
    told = export(tmp_path / "out")
    assert told.change is not None and told.difference <= told.change / 2 < 1e-3 * told.largest
    with pytest.raises(CheckpointError, match="a weight that is used twice"):
        export(tmp_path / "out", what="merged")


def test_what_cannot_be_exported_is_told(folders: Path, ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        export(tmp_path)
    config = settings_of(folders, "Llama", tmp_path / "out", lora={"r": 2}, run={"steps": 1})
    ranks(1).run(run, config, None, 0, True)
    with pytest.raises(ConfigError, match="has trained adapters alone; give adapter or merged"):
        export(tmp_path / "out", what="full")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists: name another folder"):
        export(tmp_path / "out", tmp_path / "there")


def test_a_folder_with_other_logits_is_not_kept(
    folders: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings_of(folders, "Llama", tmp_path / "out", lora={"r": 2}, run={"steps": 1})
    ranks(1).run(run, config, None, 0, True)

    def spoilt(model: Any, folder: Path) -> Any:
        found = peft.PeftModel.from_pretrained(model, folder)
        with torch.no_grad():
            next(p for name, p in found.named_parameters() if "lora_B" in name).add_(1.0)
        return found

    monkeypatch.setattr("elixir_moe.train.export._with_adapters", spoilt)
    with pytest.raises(CheckpointError, match="has other logits than the run's model"):
        export(tmp_path / "out")
    assert not list((tmp_path / "out" / "export").iterdir())


def test_the_command_says_what_it_wrote(
    folders: Path, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(1).run(run, settings_of(folders, "Llama", tmp_path / "out", lora={"r": 2}, run={"steps": 1}), None, 0, True)
    assert main(["export", str(tmp_path / "out"), "--json", "--out", str(tmp_path / "adapter")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["what"] == "adapter" and told["difference"] <= 1e-4 * told["largest"]
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2

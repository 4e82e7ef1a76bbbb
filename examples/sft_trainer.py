"""Trains adapters of a mixture with TRL: `torchrun --nproc-per-node 2 examples/sft_trainer.py`, or just python.

The model is sharded and offloaded by a plan; everything else is TRL's. Plain peft then reads the adapters.
"""

import string
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig
from trl import SFTConfig, SFTTrainer

import elixir_moe as em
from elixir_moe.hf.trainer import ElixirMixin
from elixir_tools.train.data import python_help_text


class Trainer(ElixirMixin, SFTTrainer):
    """TRL's trainer, under a plan."""


def base() -> torch.nn.Module:
    """A tiny Qwen3-MoE. With weights: AutoModelForCausalLM.from_pretrained(folder)."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    words = ["<pad>", "<end>", "<new>", *string.printable]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<new>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<new>")


ranks, text = em.init_mesh().size(), python_help_text().decode()
lora = LoraConfig(
    r=8, target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        get_peft_model(base(), lora),
        SFTConfig(
            folder, max_steps=8, per_device_train_batch_size=8 // ranks, learning_rate=1e-2, max_length=64,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, bf16=False,
            use_cpu=not torch.accelerator.is_available(),
        ),
        train_dataset=Dataset.from_dict({"text": [text[i : i + 60] for i in range(0, 6000, 60)]}),
        processing_class=tokenizer(),
        plan=em.Plan.offload(host_checkpoints="all"),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(folder)  # only the adapters
    if trainer.args.should_save:
        losses = [f"{entry['loss']:.3f}" for entry in trainer.state.log_history if "loss" in entry]
        print("losses:", *losses)
    prompt = torch.arange(3, 19, device=trainer.args.device)[None]
    with torch.no_grad():
        ours = trainer.model.eval()(input_ids=prompt).logits.cpu()
    if trainer.args.should_save:
        theirs = PeftModel.from_pretrained(base(), folder)(input_ids=prompt.cpu()).logits
        print(f"plain peft's logits differ by {(ours - theirs).abs().max().item():.1e} at most")

"""The figures in the text of "LLM finetuning: memory requirements" (Birch, 2023): part of ``make paper-table``.

DeepSpeed's bytes a parameter are compared with those of the planner's ZeRO-1, and the totals of the conclusion with
`fit/estimate`. The blog's measurements of plain PyTorch are in tests/benchmarks/test_paper_blog.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.paper_table import MACHINE, task_of
from elixir_moe.planner.hardware import Hardware
from elixir_tools.fit import strategies
from elixir_tools.fit.estimate import PlainStrategy

BLOG_MODELS = {
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "openllama-3b": 3_426_473_600,
    "llama-2-7b": 6_738_415_616,
}
"""Parameters of the models the blog measures."""
MODEL = "opt-6.7b"
"""Ours. The blog gives DeepSpeed's bytes for no model of its own."""


def compared() -> Iterator[tuple[str, float, float]]:
    """(what, printed, ours) of each figure."""
    task = task_of(MODEL, 1, 1, Hardware.named(MACHINE))
    for what, printed, backwards in (("one backward", 8, 1), ("several", 8 + 4, 2)):
        device, _ = strategies.needs(replace(task, moments=0, accumulation=backwards), "zero-1")
        yield f"DeepSpeed, fused optimizer without state, {what}", printed, device / task.profile.parameters
    plain = PlainStrategy(amp=True, ddp=True, accumulate=True)
    adamw = replace(plain, adamw=True)
    yield "PyTorch with AMP, DDP, several backwards", 15, plain.bytes_per_parameter()
    yield "the same with AdamW", 23, adamw.bytes_per_parameter()
    yield "the same of LLaMA 7B, GiB", 145, adamw.peak_bytes(trained=BLOG_MODELS["llama-2-7b"]) / 2**30


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the comparison; there are no arguments."""
    print("LLM finetuning, memory requirements: bytes a parameter")
    for what, printed, ours in compared():
        print(f"{printed:8g} {ours:8.4g} {ours / printed - 1:+7.1%}  {what}")
    print("No plan has the 4 bytes of DeepSpeed's unfused optimizer, nor its bucket of 477 MiB")


if __name__ == "__main__":
    main()

"""Several texts in one row, with positions that restart, under four plans: beside each text in a row of its own.

Tolerance as in `tests.support.parity`: attention over a row of several texts sums the same terms, and zeros.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from tests.support.cases import with_further
from tests.support.hf_cases import FAMILIES
from tests.support.parity import TOLERANCE, assert_alike, make_optimizer, trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
PLANS = {"ddp": em.Plan.ddp(), "zero2": em.Plan.zero2(), "zero3": em.Plan.zero3(), "offload": em.Plan.offload()}
LENGTHS = (5, 9, 3, 12, 7, 4)


def texts(step: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in LENGTHS]


def flattened(rows: list[list[int]]) -> list[dict[str, Any]]:
    """One row, by the collator that Trainer has for training without padding."""
    from transformers import DataCollatorWithFlattening

    return [dict(DataCollatorWithFlattening()([{"input_ids": row} for row in rows], return_tensors="pt"))]


def best_fit(rows: list[list[int]]) -> list[dict[str, Any]]:
    """Rows of at most 16 tokens, packed and collated as SFTTrainer does with ``packing=True``."""
    from datasets import Dataset
    from trl.data_utils import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    packed = pack_dataset(Dataset.from_dict({"input_ids": rows}), seq_length=16, strategy="bfd")
    assert len(packed) < len(rows)
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return [collate(list(packed))]


PACKED = {"flattened": flattened, "best fit": best_fit}


def run(how: str, attention: str, plan: em.Plan | None) -> dict[str, Any]:
    """Three steps on all texts; one text a row in plain torch."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if plan is not None else (0, 1)

    def build() -> tuple[nn.Module, Any]:
        model = FAMILIES["qwen3-moe"].build(attn_implementation=attention)
        return model, make_optimizer(model)

    def backward(model: Any, step: int) -> None:
        rows = texts(step)
        items = sum(len(row) - 1 for row in rows)
        if plan is None:
            for row in rows:
                tokens = torch.tensor([row])
                model(input_ids=tokens, labels=tokens, num_items_in_batch=items).loss.backward()
            return
        (batch,) = PACKED[how](rows[rank::world])
        assert len(batch["input_ids"]) == 1 and int((batch["position_ids"] == 0).sum()) == len(rows[rank::world])
        allowed = ("input_ids", "position_ids", "labels")
        given = {name: value for name, value in batch.items() if name in allowed}
        # Without a cache, as Trainer runs a model: with one, transformers does not look for several texts in a row.
        (world * model(**given, num_items_in_batch=items, use_cache=False).loss).backward()

    return trained(build, backward, plan, 3)


@pytest.mark.parametrize("attention", with_further(("sdpa", "eager"), ("sdpa",)))
@pytest.mark.parametrize("how", PACKED)
def test_packed_texts_train_as_each_in_its_own_row(how: str, attention: str, ranks: Ranks) -> None:
    for package in ("datasets", "trl") if how == "best fit" else ():
        pytest.importorskip(package, reason=f"{package} packs the rows")
    wanted = run(how, attention, None)
    for case, plan in PLANS.items():
        for found in ranks(2).run(run, how, attention, plan):
            assert_alike(found, wanted, case, TOLERANCE, rel=1e-4)

"""Accelerate's verbs under a plan beside Accelerate's own: clipping of parts, hooks, folders, full weights."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_moe.errors import CheckpointError, ConfigError, UsageError
from elixir_moe.hf.accelerate import checkpoint_in
from tests.hf.test_one_pass import PLAN, with_passes
from tests.hf.test_trainer import counted, data, launched, mixture
from tests.optim.test_modes import ScheduleFree
from tests.state.test_checkpoint_files import write_small
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


@contextmanager
def prepared(**options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(rank) An accelerator, and what it made of a model and its optimizer."""
    from elixir_moe.hf.accelerate import ElixirAccelerator

    with launched():
        accelerator = ElixirAccelerator(cpu=True, plan=em.Plan.zero3(), **options)
        model, optimizer = accelerator.prepare(*parts())
        yield accelerator, model, optimizer
        optimizer.optimizer.close()


def clipped(ours: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(rank) Norms of parts, some of them clipped, and the weights after steps on the same rows for all ranks."""
    from accelerate import Accelerator

    from elixir_moe.hf.accelerate import ElixirAccelerator

    norms = []
    with launched():
        accelerator: Any = ElixirAccelerator(cpu=True) if ours else Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(*parts())
        layers = accelerator.unwrap_model(model)
        for step in range(2):
            accelerator.backward((model(batch(step)) ** 2).sum())
            accelerator.clip_grad_value_(layers[0].parameters(), 2.0)
            norms.append(accelerator.clip_grad_norm_(layers[2].parameters(), 1.0).item())
            norms.append(accelerator.clip_grad_norm_([layers[0].weight], torch.inf).item())
            norms.append(accelerator.clip_grad_norm_(iter(list(layers.parameters())), torch.inf).item())
            optimizer.step()
            optimizer.zero_grad()
        values = em.full_state_dict(model, all_ranks=True) if ours else layers.state_dict()
        if ours:
            optimizer.optimizer.close()
    return norms, values


@pytest.mark.parametrize("world", [1, 2])
def test_some_of_the_parameters_are_clipped(ranks: Ranks, world: int) -> None:
    wanted, values = ranks(world).run(clipped, False)[0]
    for norms, weights in ranks(world).run(clipped, True):
        assert norms == pytest.approx(wanted, rel=1e-5)
        torch.testing.assert_close(weights, values, rtol=1e-5, atol=1e-6)


def two(ours: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(rank) The weights that Muon and SGD train, and their rates, which one scheduler changes."""
    from elixir_moe.hf.accelerate import ElixirAccelerator

    with launched():
        model = parts()[0]
        muon = torch.optim.Muon([model[0].weight, model[2].weight], lr=0.1)
        sgd = torch.optim.SGD([p for p in model.parameters() if p.dim() == 1], lr=0.1)
        accelerator: Any = ElixirAccelerator(cpu=True)
        optimizers: Any = (muon, sgd)
        if ours:
            model, *optimizers = accelerator.prepare(model, (muon, sgd))
        schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in optimizers]
        for step in range(3):
            loss = (model(batch(step)) ** 2).sum()
            accelerator.backward(loss) if ours else loss.backward()
            for each in (*optimizers, *schedules):
                each.step()
            model.zero_grad()
        values = em.full_state_dict(model) if ours else model.state_dict()
        rates = [group["lr"] for each in optimizers for group in each.param_groups]
        if ours:
            optimizers[0].optimizer.close()
    return values, rates


def test_two_optimizers_are_one_argument(ranks: Ranks) -> None:
    (wanted,), (found,) = ranks(1).run(two, False), ranks(1).run(two, True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def early(folder: str, on: bool) -> tuple[int, list[dict[str, torch.Tensor]]]:
    """(rank) How many updates began in backward; the weights behind each step of two micro-batches, then resumed."""
    from elixir_moe.hf.accelerate import ElixirAccelerator

    found = []
    plan = em.Plan.offload(chunk_numel=160)
    with launched(), counted() as begun:
        accelerator: Any = ElixirAccelerator(cpu=True, plan=plan, gradient_accumulation_steps=2, update_in_backward=on)
        model = parts()[0]
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in (0, 1, 2, 3, 4, 5, 4, 5):
            if (step, len(found)) == (4, 2):
                accelerator.save_state(folder)
            elif (step, len(found)) == (4, 3):
                accelerator.load_state(folder)
            before = len(begun)
            with accelerator.accumulate(model):
                accelerator.backward((model(batch(step)) ** 2).sum())
                assert (len(begun) > before) == (on and step % 2 == 1)
                optimizer.step()
                optimizer.zero_grad()
            if step % 2:
                found.append(em.full_state_dict(model, all_ranks=True))
        optimizer.optimizer.close()
    return len(begun), found


@pytest.mark.parametrize("world", [1, 2])
def test_updates_begin_in_the_last_backward_of_a_step(ranks: Ranks, tmp_path: Path, world: int) -> None:
    wanted, found = (ranks(world).run(early, str(tmp_path / str(on)), on) for on in (False, True))
    for (none, late), (some, states) in zip(wanted, found, strict=True):
        assert none == 0 and some >= 4, "there are 4 steps"
        torch.testing.assert_close(states, late, rtol=0, atol=0)
        torch.testing.assert_close(states[3], states[2], rtol=0, atol=0)


def averaged(folder: str, ours: bool) -> list[Any]:
    """(rank) Losses and weights of a schedule-free optimizer in both modes, then of a state saved in each of them."""
    from accelerate import Accelerator

    from elixir_moe.hf.accelerate import ElixirAccelerator

    found: list[Any] = []
    with launched():
        given: dict[str, Any] = {"plan": em.Plan.offload(chunk_numel=160)} if ours else {}
        accelerator = (ElixirAccelerator if ours else Accelerator)(cpu=True, gradient_accumulation_steps=2, **given)
        model = parts()[0]
        model, optimizer = accelerator.prepare(model, ScheduleFree(model.parameters(), lr=0.1))

        def train(first: int, last: int) -> None:
            for step in range(first, last):
                optimizer.train()
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch(step)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()

        def look() -> None:
            with torch.no_grad():
                loss = model(batch(100)).square().mean()
            state = accelerator.get_state_dict(model)
            found.append({"loss": loss, "weights": {n: v.clone() for n, v in state.items() if "running" not in n}})

        train(0, 4)
        for mode in ("eval", "train"):
            getattr(optimizer, mode)()
            look()
            accelerator.save_state(f"{folder}/{mode}")
        train(4, 8)
        optimizer.eval()
        look()
        for mode in ("eval", "train"):
            accelerator.load_state(f"{folder}/{mode}")
            look()
            train(4, 8)
            optimizer.eval()
            look()
        if ours:
            optimizer.optimizer.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_schedule_free_optimizer_evaluates_its_averages(ranks: Ranks, tmp_path: Path, world: int) -> None:
    wanted = ranks(world).run(averaged, str(tmp_path / "plain"), False)[0]
    found = ranks(world).run(averaged, str(tmp_path / "ours"), True)[0]
    assert wanted[0]["loss"] != wanted[1]["loss"]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def hooked(folder: str) -> None:
    """(rank) Hooks of save_state and load_state see the models as under Accelerate; a teacher is saved as it does."""
    with prepared() as (accelerator, model, _):
        teacher = accelerator.prepare(nn.Linear(2, 2).requires_grad_(False))
        assert accelerator._models == [model, teacher]
        seen: list[Any] = []
        saving = accelerator.register_save_state_pre_hook(lambda *given: seen.append([list(given[0]), list(given[1])]))
        loading = accelerator.register_load_state_pre_hook(lambda models, folder: seen.append([list(models), folder]))
        before = em.full_state_dict(model, all_ranks=True)
        accelerator.save_state(folder)
        with em.unsharded(model[0].weight, write=True), torch.no_grad():
            model[0].weight.zero_()
        teacher.weight.zero_()
        accelerator.load_state(folder)
        (models, weights), (loaded, place) = seen
        assert models == loaded == [model, teacher]
        assert place == folder
        torch.testing.assert_close(weights[0], before if dist.get_rank() == 0 else {}, rtol=0, atol=0)
        assert set(weights[1]) == {"weight", "bias"}
        torch.testing.assert_close(em.full_state_dict(model, all_ranks=True), before, rtol=0, atol=0)
        assert teacher.weight.any()
        assert sorted(os.listdir(folder))[:2] == ["elixir_moe", "model.safetensors"]  # the latter is the teacher's
        saving.remove()
        loading.remove()
        accelerator.register_load_state_pre_hook(lambda models, folder: models.pop(0))
        accelerator.save_state(folder)
        with pytest.raises(UsageError, match="load_state"):
            accelerator.load_state(folder)
        assert len(seen) == 2
        assert accelerator._models == [model, teacher]


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_see_the_models(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world).run(hooked, str(tmp_path / "state"))


def named(folder: str) -> tuple[list[str], list[float]]:
    """(rank) Automatic folders: two are kept, the last one is loaded."""
    from accelerate.utils import ProjectConfiguration

    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    with prepared(project_config=config) as (accelerator, model, optimizer):
        schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        signs = []
        for step in range(4):
            accelerator.backward((model(batch(step)) ** 2).sum())
            optimizer.step()
            schedule.step()
            signs.append(float(em.full_state_dict(model, all_ranks=True)["0.weight"].sum()))
            if step < 3:
                accelerator.save_state()
        accelerator.load_state()
        signs.append(float(em.full_state_dict(model, all_ranks=True)["0.weight"].sum()))
        accelerator.save_state()  # the number goes on, as Accelerate's does
        signs.append(schedule.get_last_lr()[0])
        accelerator.wait_for_everyone()
        return sorted(os.listdir(os.path.join(folder, "checkpoints"))), signs


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_automatic_names_of_checkpoints(ranks: Ranks, tmp_path: Path, world: int) -> None:
    for names, (*_, third, fourth, loaded, rate) in ranks(world).run(named, str(tmp_path)):
        assert names == ["checkpoint_2", "checkpoint_3"]
        assert loaded == third != fourth
        assert rate == pytest.approx(0.1 * 0.5 ** (3 * world))


def exported(folder: str) -> None:
    """(rank) The whole model in files, and objects that are prepared twice or freed."""
    from accelerate.utils import load_checkpoint_in_model

    with prepared() as (accelerator, model, optimizer):
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
        assert model._is_accelerate_prepared
        assert optimizer._is_accelerate_prepared
        assert accelerator.prepare(model, optimizer) == (model, optimizer)
        assert (accelerator._models, accelerator._optimizers) == ([model], [optimizer])
        wanted = em.full_state_dict(model, all_ranks=True)
        for name, size in (("whole", "1GB"), ("split", 300)):
            for safe in (True, False):
                place = os.path.join(folder, f"{name}-{safe}")
                accelerator.save_model(model, place, max_shard_size=size, safe_serialization=safe)
                accelerator.wait_for_everyone()
                plain = parts()[0]
                nn.init.zeros_(plain[0].weight)
                load_checkpoint_in_model(plain, place)
                torch.testing.assert_close(dict(plain.state_dict()), wanted, rtol=0, atol=0)
                assert (len(os.listdir(place)) > 1) == (name == "split")
        assert accelerator.free_memory() == []
        with pytest.raises(UsageError, match="call prepare with both first"):
            accelerator.save_state(folder)
        assert accelerator.prepare(model, optimizer) == (model, optimizer)
        assert (accelerator._models, accelerator._optimizers) == ([model], [optimizer])


@pytest.mark.parametrize("world", [1, 2])
def test_full_weights_in_files(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world).run(exported, str(tmp_path))


def spoken() -> list[list[int]]:
    """(rank) Texts of another length on each rank, by spread experts beside weights that are whole on each rank."""
    from elixir_moe.hf.accelerate import ElixirAccelerator

    def texts(model: Any) -> list[list[int]]:
        model.generation_config.eos_token_id = list(range(24))
        prompts = torch.randint(24, 64, (3, 2, 4), generator=torch.Generator().manual_seed(1))
        mine = (prompt[dist.get_rank(), None] for prompt in prompts)
        return [model.eval().generate(p, max_new_tokens=12, do_sample=False)[0].tolist() for p in mine]

    wanted = texts(mixture())
    with launched():
        model = em.spread_experts(mixture(), em.expert_mesh(em.init_mesh(device_type="cpu"), 2))
        accelerator = ElixirAccelerator(cpu=True, plan=em.Plan.ddp())
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert texts(model) == wanted
        optimizer.optimizer.close()
    return wanted


def test_spread_experts_generate_until_the_last_rank_has_ended(ranks: Ranks) -> None:
    first, second = ranks(2).run(spoken)
    assert [len(text) for text in first] != [len(text) for text in second], "ranks end together"


def cut_over_ranks(order: str) -> list[str]:
    """(rank) What is said of a model whose ranks need the same rows, with data loaders of Accelerate."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from elixir_moe.hf.accelerate import ElixirAccelerator

    said = []
    rows = torch.utils.data.DataLoader([batch(step)[0] for step in range(8)], batch_size=2)
    with launched():
        accelerator = ElixirAccelerator(cpu=True)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        mesh = em.init_mesh(tp=2, device_type="cpu")["tp"]
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if order == "loader first":
            accelerator.prepare(rows)
        with pytest.raises(ConfigError) as error:
            accelerator.prepare(model, optimizer, *([rows] if order == "together" else []))
            accelerator.prepare(rows)
        said.append(str(error.value))
        accelerator.release()
    return said


@pytest.mark.parametrize("order", ["together", "loader first", "loader last"])
def test_ranks_that_need_the_same_rows_are_not_given_others(ranks: Ranks, order: str) -> None:
    for said in ranks(2).run(cut_over_ranks, order):
        assert said[0].startswith(
            "2 ranks at a time need the same rows, since weights are cut over them, and Accelerate"
        )


def checkpoints_found(folder: str) -> list[tuple[str, list[str]]]:
    """(rank) The checkpoint that is found, and what is left, by what a kill has left of a replacement."""
    found = []
    for left in (["", ".new"], [".old", ".new"], ["", ".old"], [".new"], []):
        there = Path(folder) / f"rank {dist.get_rank()} {left}"
        for end in left:
            write_small(there / f"elixir_moe{end}", 1)
            (there / f"elixir_moe{end}" / "which").write_text(end or "first")
        path = Path(checkpoint_in(str(there)))
        found.append((path.joinpath("which").read_text() if left else "", [p.name for p in there.glob("*")]))
    other = Path(folder) / "somebody's" / "elixir_moe.old"
    write_small(other.with_suffix(""), 1)
    other.mkdir()
    (other / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"elixir_moe\.old is not removed: its manifest.json"):
        checkpoint_in(str(other.parent))
    assert (other / "manifest.json").exists()
    return found


def test_a_replacement_that_a_kill_has_stopped_is_ended(ranks: Ranks, tmp_path: Path) -> None:
    whole = ["elixir_moe"]
    wanted = [("first", whole), (".new", whole), ("first", whole), (".new", whole), ("", [])]
    assert ranks(1).run(checkpoints_found, str(tmp_path)) == [wanted]


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def accumulated(ours: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(rank) Norms and weights of a loop of four micro-batches a step, which under a plan pass each layer together."""
    from accelerate import Accelerator

    from elixir_moe.hf.accelerate import ElixirAccelerator

    with launched():
        accelerator: Any = ElixirAccelerator(cpu=True, plan=PLAN) if ours else Accelerator(cpu=True)
        model = mixture()
        loader = torch.utils.data.DataLoader(data(), batch_size=8 // dist.get_world_size())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        batches, norms = list(loader), []
        for mine in (batches[:4], batches[4:]):
            if ours:
                em.accumulate(model, loss_of, mine)
            for batch in mine if not ours else ():
                accelerator.backward(loss_of(model, batch) / 4)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        if ours:
            optimizer.optimizer.close()
    return norms, state


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_micro_batches_of_accelerate_in_one_pass(ranks: Ranks, world: int) -> None:
    plain, _ = ranks(world).run(with_passes, accumulated, False)[0]
    ours, found = ranks(world).run(with_passes, accumulated, True)[0]
    assert ours[0] == pytest.approx(plain[0], rel=1e-5) and found == [4, 4]
    torch.testing.assert_close(ours[1], plain[1], rtol=0, atol=1e-4)

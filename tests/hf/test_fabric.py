"""Lightning Fabric under a plan: a loop of its verbs beside plain torch, saved, loaded, and what is refused."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import elixir_moe as em
from elixir_moe.errors import CheckpointError, ConfigError, ElixirError, UsageError
from tests.hf.test_one_pass import with_passes
from tests.optim.test_modes import ScheduleFree
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS, ROWS, WIDTH = 4, 8, 16


@contextlib.contextmanager
def fabric(**options: Any) -> Iterator[Any]:
    """(rank) A Fabric on the ranks of this pool, as under torchrun."""
    from lightning_fabric import Fabric

    from elixir_moe.hf.fabric import ElixirStrategy

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    names |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    names["OMP_NUM_THREADS"] = "1"  # or Fabric takes all cores, for what runs in this process later too
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        precision = options.pop("precision", None)
        strategy = ElixirStrategy(**options)
        made = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision=precision)
        made.launch()
        yield made


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def batch(step: int, micro: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))


def plain(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer, schedule = parts()
    norms = []
    for step in range(steps):
        for micro in range(2):
            x = batch(step, micro)
            F.mse_loss(model(x), x).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return norms, model.state_dict()


def ours(
    plan: em.Plan, steps: range, load: str = "", save: str = "", *, at_once: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(rank) Steps of a run; loaded from a folder before them, saved in one afterwards.

    `at_once`: the micro-batches of a step pass each layer together.
    """
    with fabric(plan=plan) as found:
        model, optimizer, schedule = parts()
        model, optimizer = found.setup(model, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": -1}
        if load:
            assert found.load(load, state) == {}
            assert state["step"] == steps.start
        norms = []
        for step in steps:
            mine = [batch(step, micro).chunk(dist.get_world_size())[dist.get_rank()] for micro in range(2)]
            if at_once:
                em.accumulate(model.module, lambda module, x: F.mse_loss(module(x), x), mine, weights=[1, 1])
            for micro, x in enumerate(mine if not at_once else ()):
                with found.no_backward_sync(model, enabled=not micro):
                    found.backward(F.mse_loss(model(x), x))
            norms.append(float(found.clip_gradients(model, optimizer, max_norm=0.5)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if save:
            found.save(save, state | {"step": steps.stop})
        values = em.full_state_dict(model.module, all_ranks=True)
        optimizer.optimizer.close()
    return norms, values


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loop_of_fabric_is_that_of_plain_torch(ranks: Ranks, tmp_path: Path, world: int) -> None:
    norms, values = plain(STEPS)
    folder = str(tmp_path / "half")
    ranks(world).run(ours, em.Plan.zero3(), range(STEPS // 2), save=folder)
    for found, weights in ranks(1).run(ours, em.Plan.offload(), range(STEPS // 2, STEPS), load=folder):
        assert found == pytest.approx(norms[STEPS // 2 :], rel=1e-5)
        torch.testing.assert_close(weights, values, rtol=1e-5, atol=1e-6)


def test_micro_batches_of_fabric_in_one_pass(ranks: Ranks) -> None:
    norms, values = plain(STEPS)
    plan = em.Plan.offload(chunk_numel=544, rcache_blocks=2)
    (found, weights), found_passes = ranks(1).run(with_passes, ours, plan, range(STEPS), at_once=True)[0]
    assert found == pytest.approx(norms, rel=1e-5) and found_passes == [2] * STEPS
    torch.testing.assert_close(weights, values, rtol=1e-5, atol=1e-6)


def averaged() -> list[torch.Tensor]:
    """(rank) The answers of a model under a schedule-free optimizer of Fabric's, and of plain torch, in both modes."""
    found = []
    with fabric(plan=em.Plan.zero3()) as made:
        for ours in (True, False):
            model: Any = parts()[0]
            optimizer: Any = ScheduleFree(model.parameters())
            if ours:
                model, optimizer = made.setup(model, optimizer)
            optimizer.train()
            for step in range(3):
                loss = F.mse_loss(model(batch(step, 0)), batch(step, 1))
                made.backward(loss) if ours else loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            for mode in ("eval", "train"):
                getattr(optimizer, mode)()
                with torch.no_grad():
                    found.append(model(batch(9, 0)))
            if ours:
                optimizer.optimizer.close()
    return found


def test_a_schedule_free_optimizer_changes_its_mode(ranks: Ranks) -> None:
    ours_eval, ours_train, evaluated, trained = ranks(1).run(averaged)[0]
    torch.testing.assert_close((ours_eval, ours_train), (evaluated, trained), rtol=1e-5, atol=1e-6)
    assert not torch.equal(evaluated, trained)


def in_bf16(**options: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """(rank) Losses and weights of a run that feeds bf16 by hand where Fabric does not."""
    with fabric(**options) as found:
        model, optimizer, _ = parts()
        masters = {name: value.clone() for name, value in model.state_dict().items()}
        model, optimizer = found.setup(model, optimizer)
        torch.testing.assert_close(em.full_state_dict(model.module), masters, rtol=0, atol=0)
        losses = []
        for step in range(STEPS):
            x = batch(step, 0) if "precision" in options else batch(step, 0).bfloat16()
            losses.append(F.mse_loss(model(x).float(), batch(step, 0)))
            found.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        values = em.full_state_dict(model.module)
        optimizer.optimizer.close()
    return [loss.detach() for loss in losses], values


def test_fabrics_bf16_is_the_compute_dtype(ranks: Ranks) -> None:
    (ours,) = ranks(1).run(in_bf16, plan=em.Plan.zero3(), precision="bf16-true")
    (line,) = ranks(1).run(in_bf16, plan=em.Plan.zero3(), wrap={"compute_dtype": torch.bfloat16})
    torch.testing.assert_close(ours, line, rtol=0, atol=0)


def errors(folder: str) -> dict[str, str]:
    """(rank) The message of each mistake."""
    said: dict[str, str] = {}

    @contextlib.contextmanager
    def noted(name: str, kind: type[ElixirError]) -> Iterator[None]:
        with pytest.raises(kind) as error:
            yield
        said[name] = str(error.value)

    with fabric(precision="bf16-mixed") as found, noted("precision", ConfigError):
        found.setup(*parts()[:2])
    twice = {"precision": "bf16-true", "wrap": {"compute_dtype": None}}
    with fabric(**twice) as found, noted("twice", ConfigError):
        found.setup(*parts()[:2])
    with fabric() as found:
        model, optimizer, _ = parts()
        with noted("alone", UsageError):
            found.setup(model)
        with noted("two", UsageError):
            found.setup(model, optimizer, torch.optim.SGD(model.parameters(), lr=0.1))
        model, optimizer = found.setup(model, optimizer)
        with noted("norm", UsageError):
            found.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1.0)
        with noted("half", UsageError):
            found.save(folder, {"model": model})
        found.save(folder, {"model": model, "optimizer": optimizer})
        with noted("lacks", CheckpointError):
            found.load(folder, {"model": model, "optimizer": optimizer, "epoch": 0})
        optimizer.optimizer.close()
    return said


def test_mistakes_are_named(ranks: Ranks, tmp_path: Path) -> None:
    (said,) = ranks(1).run(errors, str(tmp_path / "saved"))
    assert "write Fabric(precision='bf16-true')" in said["precision"]
    assert "compute_dtype=None: leave one of them out" in said["twice"]
    assert "fabric.setup(model, optimizer)" in said["alone"]
    assert "2 optimizers" in said["two"]
    assert "degree 2" in said["norm"]
    assert "1 and 0" in said["half"]
    assert "has no ['epoch']" in said["lacks"]


def cut_over_ranks(order: str) -> str:
    """(rank) What is said of a model whose ranks need the same rows, with a data loader of Fabric."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rows = torch.utils.data.DataLoader([batch(0, 0)[i] for i in range(ROWS)], batch_size=2)
    with fabric(plan=em.Plan.zero2()) as made:
        model = parts()[0]
        mesh = em.init_mesh(tp=2, device_type="cpu")["tp"]
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        made.setup_dataloaders(rows, use_distributed_sampler=False)
        with pytest.raises(ConfigError) as error:
            if order == "loader first":
                made.setup_dataloaders(rows)
            _, optimizer = made.setup(model, optimizer)
            made.setup_dataloaders(rows)
        if order == "loader last":
            optimizer.optimizer.close()
    return str(error.value)


@pytest.mark.parametrize("order", ["loader first", "loader last"])
def test_ranks_that_need_the_same_rows_are_not_given_others(ranks: Ranks, order: str) -> None:
    for said in ranks(2).run(cut_over_ranks, order):
        assert said.startswith("2 ranks at a time need the same rows, since weights are cut over them, and Fabric")

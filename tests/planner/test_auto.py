"""`Plan.auto`: exact like any other plan, holding what it said, and refusing what it cannot plan."""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.errors import PlanError
from elixir_moe.planner import measure, prediction
from elixir_moe.planner.cost import Seconds
from elixir_moe.planner.hardware import Fitted, Hardware
from elixir_moe.planner.measure import cache_path, describe
from elixir_moe.planner.profile import Sent
from elixir_moe.planner.trace import trace
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from elixir_tools.train.config import PlanConfig
from tests.chunks.test_plan import storages_of
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.hf_cases import LLAMA, Family
from tests.support.parity import compare, make_optimizer, mesh_of_world, plain, run, tokens
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
MACHINE = "a100-80g-pcie-x4"
SHAPE: dict[str, Any] = {"vocab_size": 32, "seq_len": 8, "n_layers": 4, "d_model": 16, "n_heads": 2, "mlp_ratio": 1}
CONFIGS = {
    "dense": GPTConfig(**SHAPE),
    "checkpointed": GPTConfig(**SHAPE, checkpoint="non_reentrant"),
    "pr-moe": GPTConfig(**SHAPE, experts=(0, 4, 4, 8), residual=True, tie_embeddings=True),
}
LLAMA_FAMILY = Family("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "vocab_size": 32})


def spread(config: GPTConfig) -> GPTConfig:
    """Experts of a different degree in every layer, where there are ranks for it."""
    world = torch.distributed.get_world_size()
    ep = tuple(world if n and i % 2 else 1 for i, n in enumerate(config.experts))
    return GPTConfig(**{**SHAPE, "checkpoint": config.checkpoint, "experts": config.experts, "ep": ep,
                        "residual": config.residual, "tie_embeddings": config.tie_embeddings})  # fmt: skip


def held(optimizer: Any) -> int:
    """Bytes of every storage the optimizer can reach, but for parameters and the one NaN they are between uses."""
    return sum(storages_of(optimizer).values())


def least_budget(model: nn.Module, step: Any, sample: Any) -> int:
    """A budget that is too small for the whole model: read from the refusal of one that is too small for anything."""
    for budget in (50_000, 100_000, 200_000, 400_000):
        try:
            found, _, _ = auto(model, step, sample, budget)
        except PlanError:
            continue
        if found.host_bytes:
            return budget
    raise AssertionError("no budget moves a chunk to the host")


def auto(model: nn.Module, step: Any, sample: Any, budget: int, **wanted: Any) -> Any:
    from elixir_moe.planner.auto import SearchRequest, forecast

    return forecast(
        model,
        SearchRequest(
            wanted=em.Plan.auto(step, sample, hardware=MACHINE, budget=budget, **wanted),
            device=torch.device("cpu"),
            compute_dtype=None,
            moments=2,
            adam=True,
            updates_on_disk=True,
            over_gloo=True,
        ),
    )


def trained(name: str, tight: bool) -> dict[str, Any]:
    """(rank) The parity run under the plan that was found."""
    config = spread(CONFIGS[name])
    mesh = mesh_of_world()
    torch.manual_seed(5)
    model = GPT(config, mesh)
    em.annotate(model, gpt_patterns(model))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sample = tokens(0, 0, config.seq_len, config.vocab_size)[: 4 // world]
    budget = least_budget(model, lm_loss, sample) if tight else None
    model, optimizer = em.wrap(
        model,
        make_optimizer(model),
        plan=em.Plan.auto(lm_loss, sample, hardware=MACHINE, budget=budget),
    )
    found = run(model, optimizer, config, 1, 0.5, rank, world)
    losses = torch.tensor(found["loss"], dtype=torch.float64)
    torch.distributed.all_reduce(losses)
    result = {
        **found,
        "loss": (losses / world).tolist(),
        "state": em.full_state_dict(model, all_ranks=True),
        "predicted": (em.inspect(model).prediction.device_bytes, em.inspect(model).prediction.host_bytes),
        "counted": em.inspect(model).held_bytes,
        "held": held(optimizer),
        "gradients": em.inspect(model).footprint.gradient_bytes,
        "plan": em.inspect(model).plan,
        "statistics": em.inspect(model).statistics.as_dict(),
    }
    optimizer.close()
    return result


@pytest.fixture(scope="module")
def oracle() -> dict[str, dict[str, Any]]:
    return {name: plain(config, 1, 0.5) for name, config in CONFIGS.items()}


QUICK = [("dense", False, 2), ("checkpointed", True, 1), ("pr-moe", True, 2)]


@pytest.mark.parametrize(
    ("name", "tight", "world"),
    with_further([*QUICK, ("dense", False, 1), ("checkpointed", True, 2), ("pr-moe", True, 1)], QUICK),
)
def test_exact_and_to_the_byte(world: int, name: str, tight: bool, ranks: Ranks, oracle: dict[str, Any]) -> None:
    for found in ranks(world).run(trained, name, tight):
        compare(found, oracle[name], f"{name} on {world}")
        device, host = found["predicted"]
        assert found["counted"] == {"device": device, "host": host, "disk": 0}
        assert found["held"] == device + host - found["gradients"], "between two steps"
        assert (host > 0) == tight and found["plan"].offloaded == tight
        assert found["statistics"]["off_schedule"] == 0 and found["statistics"]["blocks_replaced"] == 0


def ids_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def trained_llama(wrapped: bool) -> list[float]:
    """(rank) Losses of an unmodified Hugging Face model nobody annotated; ranks see halves of the batch."""
    model = LLAMA_FAMILY.build()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    batch = torch.randint(3, 32, (4, 12), generator=torch.Generator().manual_seed(1))
    mine = batch[rank * 4 // world : (rank + 1) * 4 // world] if wrapped else batch
    if wrapped:
        model, optimizer = em.wrap(model, optimizer, plan=em.Plan.auto(ids_loss, mine, hardware=MACHINE))
        found = em.inspect(model)
        assert held(optimizer) == found.prediction.device_bytes
    losses = []
    for _ in range(4):
        loss = ids_loss(model, mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double() / (world if wrapped else 1)
        if wrapped:
            torch.distributed.all_reduce(total)
        losses.append(total.item())
    if wrapped:
        optimizer.close()
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_a_hugging_face_model(world: int, ranks: Ranks) -> None:
    wanted = ranks(1).run(trained_llama, False)[0]
    for found in ranks(world).run(trained_llama, True):
        assert found == pytest.approx(wanted, abs=2e-4)


def refused(options: dict[str, Any]) -> tuple[str, str]:
    """(rank) The error of a wrap, and that the model can be wrapped after it."""
    torch.manual_seed(0)
    model = GPT(CONFIGS["dense"])
    optimizer = torch.optim.AdamW(model.parameters())
    sample = tokens(0, 0, 8, 32)
    given = {"sample": sample, "step": lm_loss, "hardware": MACHINE, **options}
    try:
        em.wrap(model, optimizer, plan=em.Plan.auto(**given))
    except em.ElixirError as error:
        before = type(error).__name__, str(error)
    model, sharded = em.wrap(model, optimizer, plan=em.Plan.zero2())
    lm_loss(model, sample).backward()
    sharded.step()
    sharded.close()
    return before


def reads_a_value(model: nn.Module, batch: Tensor) -> Tensor:
    return lm_loss(model, batch) * batch.sum().item()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"step": None}, "PlanError", "step=None: expected a function of model and batch"),
        ({"sample": None}, "PlanError", "Plan.auto needs a sample"),
        ({"hardware": "a100-80g-pcie"}, "ConfigError", "did you mean 'a100-80g-pcie-x4'"),
        ({"hardware": 3}, "PlanError", "hardware=3"),
        ({"budget": 1000}, "PlanError", "too little device memory; give the device"),
        ({"budget": 1 << 60}, "ConfigError", "bytes of cpu memory for each of its ranks"),
        ({"budget": 0.5}, "PlanError", "budget=0.5: expected bytes"),
        ({"accumulation": 0}, "PlanError", "accumulation=0"),
        ({"chunk_numel": (0, 900)}, "PlanError", "chunk_numel=(0, 900): expected a number of elements"),
        ({"chunk_numel": (900, 800)}, "PlanError", "chunk_numel=(900, 800): expected a number of elements"),
        ({"chunk_numel": (900,)}, "PlanError", "chunk_numel=(900,): expected a number of elements"),
        ({"chunk_numel": "900"}, "PlanError", "chunk_numel='900': expected a number of elements"),
        (
            {"chunk_numel": (1, 700)},
            "PlanError",
            "chunk_numel=(1, 700): parameter 'blocks.0.attention.qkv.weight' needs chunks of at least 768 elements",
        ),
        ({"step": reads_a_value}, "ConfigError", "cannot run on tensors without data"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_cannot_be_planned_says_why(options: dict[str, Any], kind: str, message: str, ranks: Ranks) -> None:
    for found in ranks(2).run(refused, options):
        assert found[0] == kind and message in found[1], found


def test_a_rank_alone_in_its_wishes_fails_all(ranks: Ranks) -> None:
    for kind, message in ranks(2).run(refused_alone):
        assert kind == "ConfigError" and "the arguments of wrap: budget is None on rank 0, 1000000 on rank 1" in message


def refused_alone() -> tuple[str, str]:
    return refused({"budget": None if torch.distributed.get_rank() == 0 else 1_000_000})


def refused_range_alone() -> tuple[str, str]:
    return refused({"chunk_numel": (1000, 2000 + torch.distributed.get_rank())})


def test_a_range_of_chunk_lengths_of_one_rank_alone_fails_all(ranks: Ranks) -> None:
    for kind, message in ranks(2).run(refused_range_alone):
        assert kind == "ConfigError" and "chunk_numel[1] is 2000 on rank 0, 2001 on rank 1" in message


def length_found(given: Any) -> int:
    """(rank) The chunk length of the plan that is found for a small model."""
    model, sample = GPT(CONFIGS["dense"]), tokens(0, 0, 8, 32)
    plan = em.Plan.auto(lm_loss, sample, hardware=MACHINE, chunk_numel=given)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    found = em.inspect(model).plan.chunk_numel
    optimizer.close()
    assert isinstance(found, int)
    return found


def test_a_chunk_length_is_found_in_the_range_that_is_given(ranks: Ranks) -> None:
    (anywhere,) = ranks(1).run(length_found, None)
    (above,) = ranks(1).run(length_found, (anywhere + 1, 10 * anywhere))
    assert anywhere < above <= 10 * anywhere
    assert ranks(1).run(length_found, 5000) == [5000]


class Rows(tuple[Tensor, ...]):
    """A batch that cannot be made from a list, as `trace` tries to."""

    def __new__(cls, first: Tensor, second: Tensor) -> "Rows":
        return super().__new__(cls, (first, second))


def refused_rows() -> tuple[str, str]:
    return refused({"sample": Rows(torch.zeros(1), torch.zeros(1))})


def test_whatever_goes_wrong_on_the_rank_that_searches_fails_all(ranks: Ranks) -> None:
    first, second = ranks(2).run(refused_rows)
    assert first == second
    assert first[0] == "ElixirError" and "[rank 0] TypeError: " in first[1] and "__new__" in first[1]


class Skipping(nn.Module):
    """Equal layers, of which forward leaves one out; its parameters come last, in one chunk with others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == 2 else x + layer(x)
        return x


def skipped(budget: int) -> None:
    """(rank) Two steps of a plan with as few blocks as forward asks for."""
    model, sample = Skipping(), torch.randn(4, 16)
    plan = em.Plan.auto(mean_square, sample, hardware=MACHINE, budget=budget)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    for _ in range(2):
        mean_square(model, sample).backward()
        optimizer.step()
    assert em.inspect(model).schedule is not None
    assert em.inspect(model).schedule.least_blocks() <= em.inspect(model).plan.rcache_blocks
    assert em.inspect(model).held_bytes["device"] == em.inspect(model).prediction.device_bytes
    optimizer.close()


@pytest.mark.parametrize("budget", [8_000, 12_500, 15_500])
def test_a_layer_that_forward_leaves_out_asks_for_no_block(budget: int, ranks: Ranks) -> None:
    ranks(1).run(skipped, budget)


def early(**wanted: bool) -> bool:
    """(rank) Whether the task of a search has updates that begin in backward."""
    _, task, _ = auto(Skipping(), mean_square, torch.randn(4, 16), 15_500, **wanted)
    return task.updates_in_backward


def test_a_search_hides_updates_behind_backward_where_the_loop_does(ranks: Ranks) -> None:
    assert ranks(1).run(early) == [False]
    assert ranks(1).run(early, update_in_backward=True) == [True]
    with pytest.raises(PlanError, match="update_in_backward='yes'"):
        em.Plan.auto(mean_square, torch.ones(1), update_in_backward="yes")


def accumulated() -> tuple[dict[str, int], tuple[int, int]]:
    model = GPT(CONFIGS["dense"])
    optimizer = torch.optim.AdamW(model.parameters())
    sample = tokens(0, 0, 8, 32)
    model, sharded = em.wrap(
        model,
        optimizer,
        plan=em.Plan.auto(lm_loss, sample, hardware=MACHINE, accumulation=2),
        compute_dtype=torch.bfloat16,
    )
    for _ in range(2):
        lm_loss(model, sample).backward()
    expected = em.inspect(model).prediction
    found = em.inspect(model).held_bytes, (expected.device_bytes, expected.host_bytes)
    sharded.close()
    return found


def test_sums_of_several_backwards_are_planned_for(ranks: Ranks) -> None:
    ((counted, (device, host)),) = ranks(1).run(accumulated)
    assert counted == {"device": device, "host": host, "disk": 0}


def on_disk(folder: str, hardware: str | None, layers: int = 4, budget: int = 0) -> dict[str, Any]:
    """(rank) A training whose host memory is too small for what its budget leaves over, with a disk beside it."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=32, seq_len=8, n_layers=layers, d_model=64, n_heads=2, tie_embeddings=False)
    model, plainer = GPT(config), GPT(config)
    plainer.load_state_dict(model.state_dict())
    sample, budget = tokens(0, 0, 8, 32), budget or 300_000 * layers
    room = budget + 1_600_000
    wanted = em.Plan.auto(lm_loss, sample, hardware=hardware, budget=budget)
    with mock.patch("elixir_moe.planner.auto.host_bytes_left", return_value=room):
        with pytest.raises(PlanError, match=r"or [\d.]+ [KMG]iB more on a disk"):
            em.wrap(plainer, make_optimizer(plainer), plan=wanted)
        model, optimizer = em.wrap(model, make_optimizer(model), plan=replace(wanted, disk=folder))
    plain = make_optimizer(plainer)
    for step in range(3):
        for each, stepped in ((model, optimizer), (plainer, plain)):
            lm_loss(each, tokens(step, 0, 8, 32)).backward()
            stepped.step()
            stepped.zero_grad()
    found = em.full_state_dict(model, all_ranks=True)
    worst = max((found[name] - value).abs().max().item() for name, value in plainer.state_dict().items())
    result = {"worst": worst, "plan": em.inspect(model).plan, "counted": em.inspect(model).held_bytes}
    result |= {"chunks": len(em.inspect(model).layout.chunks), "budget": budget}
    expected = em.inspect(model).prediction
    result["predicted"] = {"device": expected.device_bytes, "host": expected.host_bytes, "disk": expected.disk_bytes}
    optimizer.close()
    return result


@pytest.mark.parametrize(("layers", "whole"), [(4, False), (8, True)])
def test_what_host_memory_cannot_take_goes_to_disk(layers: int, whole: bool, ranks: Ranks, tmp_path: Path) -> None:
    """Values too, only where host memory is too small for those of a deeper model."""
    (found,) = ranks(1).run(on_disk, str(tmp_path), MACHINE, layers)
    assert found["plan"].disk_chunks > 0 and found["plan"].values_on_disk == whole
    assert found["counted"] == found["predicted"]
    assert found["counted"]["disk"] > 0
    assert found["worst"] < 1e-6


def test_one_memory_is_counted_once_and_what_it_cannot_hold_goes_to_disk(ranks: Ranks, tmp_path: Path) -> None:
    """The budget is all there is: what the disk needs in host memory is a part of it."""
    data = json.loads(Hardware.named(MACHINE).to_json()) | {"one_memory": True}
    data["cpu_bytes"] = data["gpus_per_node"] * data["gpu_bytes"]
    (tmp_path / "one.json").write_text(json.dumps(data))
    (found,) = ranks(1).run(on_disk, str(tmp_path), str(tmp_path / "one.json"), 4, 2_900_000)
    plan, counted = found["plan"], found["counted"]
    assert plan.disk_chunks and plan.device_chunks + plan.disk_chunks == found["chunks"], "none in host memory"
    assert counted == found["predicted"] and counted["host"] > 0 and found["worst"] < 1e-6
    assert counted["device"] + counted["host"] <= found["budget"]


def test_work_of_microseconds_is_timed_in_long_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long on each rank: those that time a collective must run it equally often."""
    clock, runs = [0.0], [0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def work() -> None:
        clock[0] += 1e-5 if runs[0] > 1000 else 3e-5  # slower at first, as a GPU that has rested
        runs[0] += 1

    assert measure._fastest(work, torch.device("cpu")) == pytest.approx(1e-5)
    runs[0] = 0
    measure._fastest(work, torch.device("cpu"), lambda seconds: 1.0)  # what all ranks have found together
    assert runs[0] == 2 + measure._REPEATS


def measured(folder: str) -> list[dict[str, Any]]:
    """(rank) Two starts of the same training on a machine nobody has measured, until a step is."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = GPT(CONFIGS["dense"])
        sample = tokens(0, 0, 8, 32)
        with mock.patch.dict("os.environ", {"XDG_CACHE_HOME": folder}):
            model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.auto(lm_loss, sample))
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # what a machine learns is no warning
                for _ in range(prediction.WARM_UP + prediction.MEASURED):
                    lm_loss(model, sample).backward()
                    optimizer.step()
        found.append(
            {
                **em.inspect(model).prediction.as_dict(),
                "plan": json.loads(em.inspect(model).plan.to_json()),
                "fitted": em.inspect(model).prediction.forecast.hardware.fitted,
                "machine": describe(torch.device("cpu"), torch.float32),
            }
        )
        optimizer.close()
    return found


def test_the_step_of_a_small_model_is_predicted_as_it_was_timed() -> None:
    """Ten seconds a step, the test says, and so does the cost model with the efficiency that was found."""
    device = torch.device("cpu")
    with mock.patch.object(measure, "_at_once", lambda run, device: (run(), 10.0)[1]):
        reached = measure._efficiency(device, torch.float32, 1e-3, 1.0)
        assert measure._efficiency(device, torch.float32, 1e-9, 1.0) == 1.0, "at most what was timed alone"
    batch = torch.zeros(measure._ROWS, measure._LENGTH + 1, dtype=torch.int64)
    needed = trace(measure._SmallMixture(), measure._loss, batch)
    assert needed.flops / (reached * 1e-3 * 1e12) + needed.traffic_bytes / (reached * 1e9) == pytest.approx(10.0)


def test_a_machine_is_measured_once_and_learns_from_real_steps(ranks: Ranks, tmp_path: Path) -> None:
    one, other = ranks(2).run(measured, str(tmp_path))
    assert [start["measured_step_seconds"] for start in one] == [start["measured_step_seconds"] for start in other]
    (path,) = (tmp_path / "elixir-moe").iterdir()
    kept = json.loads(path.read_text())
    first, second = one
    off = abs(first["measured_step_seconds"] / first["predicted_step_seconds"] - 1)
    assert (off > prediction.TOLERANCE) == (second["fitted"] != first["fitted"])
    slower = first["measured_step_seconds"] > first["predicted_step_seconds"]  # compute alone can be the reason
    if off > prediction.TOLERANCE and second["plan"] == first["plan"] and slower:
        assert second["predicted_step_seconds"] == pytest.approx(first["measured_step_seconds"], rel=1e-3)
    assert kept["machine"]["ranks"] == 2 and len(kept["hardware"]["wires"]) == 1


def measured_on_hosts(hosts: list[str]) -> Hardware:
    """(rank) What is measured where each rank is on the host of that name; rates of one rank are not looked at."""
    rates = dict.fromkeys(("_host_adam_rates", "_copy_rates", "_temporary_rates"), (1.0, 1.0))
    rates |= dict.fromkeys(("_product_rate", "_memory_rate", "_unit_seconds", "_efficiency"), 1.0)  # type: ignore[arg-type]
    device = torch.device("cpu")
    with ExitStack() as stack:
        for name, rate in rates.items():
            stack.enter_context(mock.patch.object(measure, name, lambda *_, rate=rate: rate))
        stack.enter_context(mock.patch("socket.gethostname", lambda: hosts[dist.get_rank()]))
        return measure._measured(describe(device, torch.float32), device)


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a", "b", "b"], ["b", "a", "b", "a"]], ids="".join)
def test_several_hosts_are_measured(hosts: list[str], ranks: Ranks) -> None:
    each, *others = ranks(len(hosts)).run(measured_on_hosts, hosts)
    assert every(other == each for other in others)
    assert each.gpus_per_node == len(hosts) // 2 and each.node_bandwidth is not None
    assert (len(hosts) // 2 in each.by_gpus) and (each.by_gpus[each.gpus_per_node].b_g2g is None) == (len(hosts) == 2)


def steps_of_a_clock() -> tuple[int, float | None]:
    """(rank) After how many steps there is a measurement, and it, if step k takes k seconds."""
    expected = SimpleNamespace(seconds=SimpleNamespace(step=5.0), device_bytes=0, host_bytes=0, disk_bytes=0)
    measuring = prediction.Prediction(expected, None, None)  # type: ignore[arg-type]
    wrapped: Any = SimpleNamespace(
        held_bytes=dict,
        groups=SimpleNamespace(control=dist.group.WORLD),
        spec=SimpleNamespace(parameters=[torch.zeros(1)]),
    )
    taken, clock = 0, SimpleNamespace(perf_counter=accumulate(range(1, 20)).__next__)
    with mock.patch.object(prediction, "time", clock):
        while measuring.measured_seconds is None:
            measuring.observe(wrapped)
            taken += 1
    return taken, measuring.measured_seconds


def test_steps_are_measured_right_after_those_of_warm_up(ranks: Ranks) -> None:
    (found,) = ranks(1).run(steps_of_a_clock)
    assert found == (7, 5.0), "the median of steps 3 to 7"


def test_what_compute_explains_is_corrected() -> None:
    fitted = Fitted(
        device_efficiency=0.5, exposed_collectives=1.0, host_update_slowdown=1.0, overhead_ns_per_parameter=0.1
    )
    expected = Seconds(
        compute=1.0,
        fetch=0.5,
        offload=0.0,
        collectives=0.2,
        exposed=0.2,
        device_update=0.1,
        host_update=0.0,
        disk_update=0.0,
    )
    assert prediction.corrected(fitted, expected, 2.3).device_efficiency == pytest.approx(0.25)
    assert prediction.corrected(fitted, expected, 0.4).device_efficiency == pytest.approx(1.0), "transfers stay"
    partly = replace(fitted, exposed_collectives=0.25)
    busy = replace(expected, collectives=4.0, exposed=3.0)  # more than a quarter, as compute takes 1 of the 4 seconds
    assert prediction.corrected(partly, busy, 5.1).device_efficiency == pytest.approx(0.125), "4 + 0.25 * 4 + 0.1"


@pytest.mark.parametrize("damage", ["machine", "format", "figure", "constant", "deep", "json"])
@pytest.mark.fault(41)
def test_figures_of_another_machine_are_ignored_with_a_notice(damage: str, tmp_path: Path, ranks: Ranks) -> None:
    from elixir_moe.planner import measure

    with mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(tmp_path)}):
        machine = {"ranks": 1, "gpu": None, "processor": "any"}
        hardware = json.loads(Path(measure.__file__).with_name("machines").joinpath(f"{MACHINE}.json").read_text())
        data: dict[str, Any] = {"format": measure._FORMAT, "machine": machine, "hardware": hardware}
        path = cache_path(machine)
        path.parent.mkdir()
        path.write_text(json.dumps(data))
        assert measure._read(machine)["hardware"]["gpus_per_node"] == 4
        if damage == "machine":
            data["machine"] = {**machine, "ranks": 2}
        elif damage == "format":
            data["format"] = 0
        elif damage == "constant":
            data["fitted"] = {"a step": {**hardware["fitted"], "device_efficiency": 0}}
        elif damage == "figure":
            del data["hardware"]["by_gpus"]
        path.write_text({"json": "{", "deep": "[" * 200_000}.get(damage) or json.dumps(data))
        with pytest.warns(UserWarning, match="is ignored, and the machine is measured again"):
            assert measure._read(machine) == {}


def test_a_plan_says_why_it_was_chosen(ranks: Ranks) -> None:
    (plan,) = ranks(1).run(found_plan)
    said = plan.explain()
    assert "blocks" in said and "saves" in said and "U_allowed" in said
    assert em.Plan.from_json(plan.to_json()) == plan
    assert em.Plan.zero2().explain().startswith("given, not searched for: Plan(scatter=True")


def found_plan() -> em.Plan:
    model = GPT(CONFIGS["dense"])
    return auto(model, lm_loss, tokens(0, 0, 8, 32), 1 << 30)[0].plan


TINY = """
model: {seq_len: 16, n_layers: 2, d_model: 16, n_heads: 2}
plan: {kind: auto, hardware: a100-80g-pcie-x4}
run: {steps: 8, global_batch: 2, accumulation: 2, eval_every: 8, eval_batches: 1, sample_bytes: 0, out: %s}
"""


@pytest.mark.slow
def test_training_prints_predicted_beside_measured(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(TINY % (tmp_path / "run"))
    command = [sys.executable, "-m", "elixir_moe", "train", "--config", str(config), "--json", "--details"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=200, text=True)
    found = json.loads(done.stdout)["prediction"]
    assert found["held_device_bytes"] == found["predicted_device_bytes"] > 0
    assert found["measured_step_seconds"] > 0 and found["predicted_step_seconds"] > 0
    assert "bytes held: device" in done.stderr and "U_allowed" in done.stderr
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["scatter"] is True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "auto", "rcache_blocks": 2}, "plan.rcache_blocks has no effect for plan.kind=auto"),
        ({"kind": "zero2", "budget": "1 GiB"}, "plan.budget has no effect for plan.kind=zero2"),
        ({"kind": "auto", "budget": 0}, "plan: budget=0: expected at least 1 byte"),
        ({"kind": "auto", "budget": "lots"}, "plan: budget='lots': expected bytes"),
        ({"kind": "offload", "host": "1 GiB"}, "disk="),
    ],
)
def test_settings_of_other_plans_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(em.ConfigError, match=message):
        PlanConfig(**given)


def tensor_parallel(plan: Any) -> list[float]:
    """(rank) Losses of a model cut by torch's own `parallelize_module`."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = em.init_mesh(tp=2, device_type="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sample = torch.randn(4, 16)
    searched = plan == "auto"
    plan = em.Plan.auto(mean_square, sample, hardware=MACHINE) if searched else plan
    model, sharded = em.wrap(model, optimizer, plan=plan)
    if searched:
        found = em.inspect(model)
        assert found.held_bytes == {"device": found.prediction.device_bytes, "host": 0, "disk": 0}
    losses = []
    for _ in range(3):
        loss = mean_square(model, sample)
        loss.backward()
        sharded.step()
        losses.append(loss.item())
    sharded.close()
    return losses


def sent() -> Any:
    """(rank) What the trace of such a model says that it sends."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = em.init_mesh(tp=2, device_type="cpu")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return trace(model, mean_square, torch.randn(4, 16), world=2, rank=torch.distributed.get_rank()).sent


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def test_a_model_of_dtensors(ranks: Ranks) -> None:
    pool = ranks(2)
    assert pool.run(tensor_parallel, "auto") == pool.run(tensor_parallel, em.Plan.zero2())
    reductions = 2 * 2 * 4 * 16 * 4  # of the output, and of the gradient of what goes into the cut layers
    assert pool.run(sent) == [(Sent(ranks=(0, 1), nbytes=reductions, times=2),)] * 2

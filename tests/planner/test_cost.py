"""The planner's arithmetic: bytes, seconds, hardware files, and the measured table of the paper."""

import csv
import json
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
import torch

from benchmarks.paper_table import TABLE, planned, predicted
from elixir_moe.chunks.packing import build_layout
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec
from elixir_moe.chunks.plan import Plan
from elixir_moe.errors import ConfigError
from elixir_moe.planner import cost
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile, SentCollective
from elixir_moe.planner.solve import Task, price, with_sharing
from tests.support.cases import with_further

MACHINE = "a100-80g-pcie-x4"
DISK = {"disk_read": 2.0, "disk_write": 1.0}


def machine_file() -> dict[str, Any]:
    text = resources.files("elixir_moe.planner").joinpath("machines", f"{MACHINE}.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def profile(
    ranks: int = 2, exchanges: tuple[SentCollective, ...] = (), reduce_dtype: torch.dtype = torch.float32
) -> Profile:
    key = ChunkGroupKey(
        ranks=tuple(range(ranks)), dtype=torch.bfloat16, trainable=True, divisor=ranks, reduce_dtype=reduce_dtype
    )
    return Profile(
        params=tuple(ParamSpec(name=f"p{i}", shape=(1 << 20,), key=key) for i in range(4)),
        order=(0, 1, 2, 3),
        parts=(),
        events=(),
        parameters=4 << 20,
        tokens=1000,
        flops=10**12,
        traffic_bytes=10**9,
        activation_bytes=10**9,
        buffer_bytes=10**6,
        exchanges=exchanges,
    )


def test_six_bytes_a_parameter() -> None:
    """2 up in forward, 2 up in backward unless it was still in a block, 2 down; nothing for a chunk on the device."""
    layout = build_layout(profile().params, 1 << 20)
    shard = (1 << 20) // 2
    host = cost.traffic(Plan.offload(rcache_blocks=1, device_chunks=1), layout, [0, 1, 2, 3, 3, 2, 1, 0])
    assert host.fetched_bytes == 3 * 2 * 2 * shard
    assert host.offloaded_bytes == 3 * 2 * shard
    assert (host.host_numel, host.device_numel) == (3 * shard, shard)
    cached = cost.traffic(Plan.offload(rcache_blocks="all", device_chunks=1), layout, [0, 1, 2, 3])
    assert cached.fetched_bytes == 3 * 2 * shard


@pytest.mark.parametrize("accumulation", [1, 3])
def test_values_on_the_device_come_up_once(accumulation: int) -> None:
    """2 up in a step, however often they are gathered; 2 down for each gradient; the rest as without them."""
    shard, layout = (1 << 20) // 2, build_layout(profile().params, 1 << 20)
    plan, loads = Plan.offload(rcache_blocks=1, device_chunks=1), accumulation * [0, 1, 2, 3, 3, 2, 1, 0]
    without = cost.traffic(plan, layout, loads, passes=accumulation)
    moved = cost.traffic(replace(plan, values_on_device=True), layout, loads, passes=accumulation)
    assert without.fetched_bytes == accumulation * 3 * 2 * 2 * shard
    assert replace(moved, fetched_bytes=0) == replace(without, fetched_bytes=0)
    assert moved.fetched_bytes == 3 * 2 * shard
    assert cost.traffic(replace(plan, values_on_device=True), layout, [3, 3]).fetched_bytes == 0


@pytest.mark.parametrize("accumulation", [1, 3])
def test_values_on_disk_are_read_and_gradients_written_there(accumulation: int) -> None:
    """bf16: 2 read for each gather, 4 written for each gradient, 4 read for each but the first; 16 and 14 an update."""
    shard = (1 << 20) // 2
    layout, hardware = build_layout(profile().params, 1 << 20), replace(Hardware.named(MACHINE), **DISK)
    plan = Plan.offload(rcache_blocks=1, device_chunks=1, disk_chunks=2, values_on_disk=True)
    loads = accumulation * [0, 1, 2, 3, 3, 2, 1, 0]
    moved = cost.traffic(plan, layout, loads, passes=accumulation)
    assert moved.fetched_bytes == accumulation * 3 * 2 * 2 * shard
    assert moved.read_bytes == accumulation * 2 * 2 * 2 * shard
    assert (moved.disk_read_bytes, moved.disk_written_bytes) == (2 * 16 * shard, 2 * 14 * shard)
    seconds = cost.seconds(profile(), moved, hardware, 2, accumulation=accumulation)
    reads, writes = accumulation * 8 * shard + (accumulation - 1) * 8 * shard, accumulation * 8 * shard
    assert seconds.disk == pytest.approx(2 * (reads / 2e9 + writes / 1e9))
    assert seconds.fetch < seconds.disk == seconds.overlapped
    assert seconds.disk_update == pytest.approx(2 * (32 * shard / 2e9 + 28 * shard / 1e9))
    kept = cost.traffic(replace(plan, values_on_disk=False), layout, [0, 1, 2, 3, 3, 2, 1, 0])
    assert kept.read_bytes == kept.summed_bytes == 0
    assert kept.disk_read_bytes == kept.disk_written_bytes == 2 * 12 * shard


def frozen(ranks: int = 4) -> Profile:
    """A frozen model, but for its last parameter."""
    given = profile(ranks)
    *rest, last = given.params
    key = replace(last.key, trainable=False)
    return replace(given, params=(*(replace(p, key=key) for p in rest), last))


def test_a_shared_chunk_is_fetched_whole_and_not_gathered() -> None:
    params = frozen().params
    plan = Plan.offload(rcache_blocks=2, chunk_numel=1 << 20)
    layout, loads = plan.layout(params), [0, 1, 2, 3, 2, 1, 0]
    apart = cost.traffic(plan, layout, loads)
    shared = cost.traffic(replace(plan, shared_frozen=True), layout, loads)
    whole = 2 << 20
    assert apart.fetched_bytes == 7 * whole // 4
    assert shared.fetched_bytes == 6 * whole + whole // 4, "six gathers of frozen chunks, one of the other"
    ((_, nbytes, times),), ((_, fewer, left),) = apart.collectives, shared.collectives
    assert (nbytes - fewer, times - left) == (6 * whole, 6)
    assert left == 2, "a gather and a reduction of what is trained"


def test_without_peer_access_what_is_gathered_crosses_the_host_link_both_ways() -> None:
    given, plan = frozen(), Plan.offload(rcache_blocks=2, chunk_numel=1 << 20)
    layout, near = plan.layout(given.params), Hardware.named(MACHINE)
    moved = cost.traffic(plan, layout, [0, 1, 2, 3, 2, 1, 0])
    links, ((_, nbytes, _),) = near.links(4), moved.collectives
    seconds = [cost.seconds(given, moved, replace(near, peer_to_peer=p), 4) for p in (True, False)]
    crossing = nbytes * 3 // 4
    assert seconds[1].fetch - seconds[0].fetch == pytest.approx(crossing * 4 / (links.b_c2g * 1e9))
    assert seconds[1].offload - seconds[0].offload == pytest.approx(crossing * 4 / (links.b_g2c * 1e9))


@pytest.mark.parametrize(("peer_to_peer", "per_node"), [(True, 4), (False, 4), (False, 2)])
def test_the_search_shares_frozen_chunks_where_that_is_faster_and_one_host_has_them(
    peer_to_peer: bool, per_node: int
) -> None:
    given = replace(frozen(), flops=1, traffic_bytes=1, activation_bytes=1 << 20)  # nothing hides a transfer
    machine = replace(Hardware.named(MACHINE), peer_to_peer=peer_to_peer, gpus_per_node=per_node, node_bandwidth=10.0)
    task = Task(profile=given, hardware=machine, gpus=4, capacity_bytes=1, host_bytes=1 << 40)
    plan = Plan.offload(rcache_blocks=2, chunk_numel=1 << 20)
    layout, loads = plan.layout(given.params), [0, 1, 2, 3, 2, 1, 0]
    apart, shared = (price(task, replace(plan, shared_frozen=s), layout, loads) for s in (False, True))
    better = with_sharing(apart)
    assert better.plan.shared_frozen == (per_node == 4)
    assert better == (shared if per_node == 4 else apart)
    assert (shared.seconds.step < apart.seconds.step) or peer_to_peer


def test_a_step_is_the_sum_of_what_is_written_in_the_docs() -> None:
    hardware = Hardware.named(MACHINE)
    links, fitted = hardware.links(2), hardware.fitted
    layout = build_layout(profile().params, 1 << 20)
    moved = cost.traffic(Plan.offload(rcache_blocks=1, device_chunks=1), layout, [0, 1, 2, 3, 3, 2, 1, 0])
    seconds = cost.seconds(profile(), moved, hardware, 2)
    compute = (10**12 / 312e12 + 10**9 / 1935e9) / fitted.device_efficiency
    assert seconds.compute == pytest.approx(compute + (4 << 20) * fitted.overhead_ns_per_parameter / 1e9)
    assert seconds.fetch == pytest.approx(moved.fetched_bytes * 2 / (links.b_c2g * 1e9))
    collective = (
        (8 * 2 + 4 * 4) * (1 << 20) / (201 * 1e9)
    )  # eight gathers of 2 MiB and four reductions of 4 MiB, half of it sent by each
    assert seconds.collectives == pytest.approx(collective)
    units = cost.seconds(profile(), replace(moved, units=7), replace(hardware, unit_us=50.0), 2)
    assert (units.compute, units.units) == (seconds.compute, pytest.approx(7 * 50e-6))
    assert units.step - seconds.step == pytest.approx(units.units), "the device has nothing to hide it behind"
    narrow = cost.traffic(Plan.zero2(), build_layout(profile(reduce_dtype=torch.bfloat16).params, 1 << 20), range(4))
    assert narrow.collectives == (((0, 1), (4 + 4) * (2 << 20), 4 + 4),)
    assert seconds.step == pytest.approx(
        max(seconds.compute, seconds.fetch, seconds.offload)
        + fitted.exposed_collectives * collective
        + seconds.device_update
        + seconds.host_update
    )


def test_a_step_is_never_shorter_than_its_collectives_and_the_updates() -> None:
    hardware = Hardware.named(MACHINE)
    moved = cost.traffic(Plan.zero2(), build_layout(profile().params, 1 << 20), range(4))
    fast = cost.seconds(profile(), moved, hardware, 2)
    links = replace(hardware.links(2), b_g2g=0.1)
    slow = cost.seconds(profile(), moved, replace(hardware, by_gpus={2: links}), 2)
    assert fast.collectives < fast.overlapped and fast.exposed == hardware.fitted.exposed_collectives * fast.collectives
    assert slow.collectives > slow.overlapped == fast.overlapped
    assert slow.step == pytest.approx(slow.collectives + slow.device_update)


def test_a_busier_rank_takes_longer_and_holds_more() -> None:
    exchange = SentCollective(ep=2, nbytes=10**6, times=6, expert_flops=4 * 10**11, row_bytes=10**8)
    given = profile(exchanges=(exchange,))
    moved = cost.traffic(Plan.zero2(), build_layout(given.params, 1 << 20), [0, 1, 2, 3])
    even, busy = (cost.seconds(given, moved, Hardware.named(MACHINE), 2, imbalance) for imbalance in (1.0, 1.5))
    fitted = Hardware.named(MACHINE).fitted
    more = 0.5 * 4e11 / (fitted.device_efficiency * 312e12) + 0.5 * 6 * 1e6 / 201e9
    assert busy.compute - even.compute == pytest.approx(more)
    assert cost.activations(given, 1.5) - cost.activations(given, 1.0) == 5 * 10**7


def test_what_is_wrong_with_a_hardware_file_is_named() -> None:
    data = machine_file()
    del data["by_gpus"]["2"]["v_c"], data["fitted"]["device_efficiency"], data["cpu_bytes"]
    data |= {"gpu_bytes": "much", "gpus_per_node": -1, "node_bandwith": 3, "xyzzy": 3}
    with pytest.raises(ConfigError) as error:
        Hardware.parse(json.dumps(data), "mine")
    assert str(error.value) == (
        "hardware 'mine': unknown figure 'node_bandwith'; did you mean 'node_bandwidth'?; unknown figure 'xyzzy'; "
        "gpu_bytes: expected int, got 'much'; cpu_bytes is missing: give int; "
        "gpus_per_node: expected at least 1, got -1; fitted.device_efficiency is missing: give float; "
        "by_gpus.2.v_c is missing: give float"
    )
    with pytest.raises(ConfigError, match=r"one_memory, cpu_bytes must be gpus_per_node x gpu_bytes = \d+, got 9{9}"):
        Hardware.parse(json.dumps(machine_file() | {"one_memory": True, "cpu_bytes": 999999999}), "mine")
    many = machine_file() | {"gpus_per_node": 1, "node_bandwidth": None}
    with pytest.raises(ConfigError, match=r"by_gpus .*\d GPUs.* gpus_per_node is 1"):
        Hardware.parse(json.dumps(many), "mine")
    with pytest.raises(ConfigError, match=r"hardware 'mine': figure: expected a section with keys, got \[\]"):
        Hardware.parse("[]", "mine")
    with pytest.raises(ConfigError, match=r"no hardware or file is called 'a100-80g-pcie'; did you mean '\S+-x4'\?"):
        Hardware.named("a100-80g-pcie")
    with pytest.raises(ConfigError, match=r"no hardware or file is called 'xyzzy'\. There are: "):
        Hardware.named("xyzzy")
    with pytest.raises(ConfigError, match=r"lacks by_gpus\.8: it has figures for 1, 2, 4 GPUs"):
        Hardware.named(MACHINE).links(8)


def test_between_two_figures_of_a_file_lies_the_line() -> None:
    assert Hardware.named(MACHINE).links(3).b_c2g == 60
    assert Hardware.named(MACHINE).host_bytes_per_rank(4) == 429496729600 // 4


@pytest.mark.parametrize("row", with_further([0, 16, 20, 31, 35, 43], [0, 31]))
def test_rows_of_the_measured_table_are_predicted(row: int) -> None:
    """The whole table is `make paper-table`; these rows are of each model, number of GPUs and kind of plan."""
    with TABLE.open() as file:
        wanted = list(csv.DictReader(file))[row]
    hardware = Hardware.named(MACHINE)
    task, choice = planned(wanted["model"], int(wanted["gpus"]), int(wanted["batch_per_gpu"]), hardware)
    assert predicted(task, choice, hardware.fitted) == pytest.approx(float(wanted["elixir"]), rel=0.2)


def test_the_update_of_cut_matrices_costs_their_joins() -> None:
    """Two ranks share eight experts of 64 x 32, of which each of two others has a half: four joins of two slices."""
    key = ChunkGroupKey(ranks=(0, 2), dtype=torch.bfloat16, trainable=True, divisor=2, optimizer="Muon")
    cut = ParamSpec(name="p", shape=(8, 64, 16), key=key, matrix=(64, 32), joined_over=((0, 1),))
    joined, whole = (replace(profile(), params=(one,)) for one in (cut, replace(cut, joined_over=())))
    hardware = Hardware.named(MACHINE)
    moved = cost.traffic(Plan.zero3(rcache_blocks=1), build_layout((cut,), 8 * 64 * 16), [0, 0])
    found, without = (cost.seconds(one, moved, hardware, 2).device_update for one in (joined, whole))
    assert found - without == pytest.approx(hardware.gather_seconds((0, 1), 4 * 2 * 64 * 32, 4), rel=1e-6)
    assert found > without > 0
    twice = replace(cut, shape=(1, 32, 16), joined_over=((0, 1, 2, 3), (0, 1)))
    assert replace(joined, params=(twice,)).joins == (((0, 1, 2, 3), 64 * 32, 0.5), ((0, 1), 64 * 32 // 4, 0.5))

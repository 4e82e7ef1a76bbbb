"""The baselines of Elixir v2, Table 8, measured and as predicted by the planner: part of ``make paper-table``.

Prints for each row whether a baseline fits and its throughput, measured and predicted, then Elixir's speedup over the
fastest baseline that is modelled, in the paper and by the planner. Baselines are plans of `fit/strategies` on this
library's chunks, and `Peer` has what they do differently. ``--fit`` fits the two constants of DeepSpeed's host again.
Megatron on several GPUs is not modelled: it cuts the vocabulary too, which this library's GPT does not. Last come the
neighbouring batches of a baseline that cannot both be right, since the larger one would exceed the GPU's peak.

In the paper's text four cells cannot be read. Elixir with 10b on one GPU at batch 16 is empty; the three without a
decimal are those of the paper's Tables 2 and 3.
"""

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from benchmarks.paper_table import MACHINE, TABLE, of_row, profile_of, task_of
from elixir_moe.chunks.ledger import Footprint
from elixir_moe.planner import cost
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import PlanCandidate, Task, price
from elixir_tools.fit import strategies

PROCESS_BYTES = 16 * 10**9
"""Host memory of a DeepSpeed process besides the states. ZeRO-3's rows in which 20b fits on two GPUs and does not on
four leave 12 to 22e9 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A baseline: the plan that stands for it, and what it does otherwise. The parameters of a rank are its shard's."""

    strategy: str
    """In `strategies.plans`."""
    more_device_bytes: int = 0
    """On the device, for each parameter of a rank, beyond the plan's."""
    whole_device_bytes: int = 0
    """On each of several devices, for each parameter of the model."""
    buffer_bytes: int = 0
    """Buffers on the device."""
    pinned_bytes: tuple[int, ...] = ()
    """Pinned arrays in host memory, in bytes for each parameter of a rank. torch's allocator rounds each up to a power
    of two."""
    paged_bytes: int = 0
    """Other host memory, in bytes for each parameter of a rank."""
    gathers_late: bool = False
    """Weights are gathered after the update, when nothing hides it."""
    waits_for_copies: bool = False
    """Copies to and from the host add to compute."""
    update: float = 1.0
    """Time of an update in host memory, over this library's."""
    serial_ns: float = 0.0
    """Nanoseconds that one thread of the process takes for each parameter of a rank."""

    def host_bytes(self, numel: int) -> int:
        """Host memory of a process with so many parameters."""
        if not self.paged_bytes:
            return 0
        pinned = sum(1 << (nbytes * numel - 1).bit_length() for nbytes in self.pinned_bytes)
        return pinned + self.paged_bytes * numel + PROCESS_BYTES

    def fits(self, task: Task, size: Footprint, numel: int) -> bool:
        """Whether a plan with so many parameters of a rank fits: all of a device, without the reserves of a search."""
        held = task.held_bytes(size)[0] + self.more_device_bytes * numel + self.buffer_bytes
        if task.gpus > 1:
            held += self.whole_device_bytes * numel * task.gpus
        device = cost.device_peak(task.profile, held, task.imbalance)
        return device <= task.capacity_bytes and self.host_bytes(numel) <= task.host_bytes

    def step(
        self, seconds: cost.Seconds, numel: int, *, update: float | None = None, serial_ns: float | None = None
    ) -> float:
        """Seconds of a step with so many parameters of a rank.

        Args:
            seconds: those of this library's runtime with the baseline's plan.
            numel: the parameters.
            update: instead of the peer's own constant, as `serial_ns`.
        """
        update = self.update if update is None else update
        serial_ns = self.serial_ns if serial_ns is None else serial_ns
        step = seconds.step + (update - 1) * seconds.host_update + serial_ns * numel / 1e9
        if self.gathers_late:  # half of the collectives: the other half are reductions, of as many bytes
            step += (seconds.collectives - seconds.exposed) / 2
        if self.waits_for_copies:
            device = seconds.compute + seconds.units
            step += device + seconds.fetch + seconds.offload - max(device, seconds.fetch, seconds.offload)
        return step


PEERS = {
    "megatron": Peer(strategy="ddp", more_device_bytes=2),
    # gradients in addition to the weights (Table 1: 16 bytes a parameter), and gathers without a limit: at worst the
    # weights and gradients of the whole model
    "fsdp": Peer(strategy="zero-3", more_device_bytes=2, whole_device_bytes=2 + 2),
    # gradients, a copy of them in fp32 for the step, and two buckets of 5e8 elements, DeepSpeed's default
    "ds_z2": Peer(strategy="zero-2", more_device_bytes=2 + 4, buffer_bytes=2 * 2 * 5 * 10**8, gathers_late=True),
    "ds_z3": Peer(strategy="zero-3", more_device_bytes=2),
    # masters and their gradients are pinned, moments are not
    "ds_z2_o": Peer(strategy="zero-2-offload", pinned_bytes=(4, 4), paged_bytes=8, gathers_late=True, update=1.12),
    # weights are pinned; a thread casts gradients to fp32 and masters down, one group of parameters after the other
    "ds_z3_o": Peer(
        strategy="zero-3-offload", pinned_bytes=(2,), paged_bytes=16, waits_for_copies=True, serial_ns=0.81
    ),
}
"""By column of the table."""
FITTED = {"ds_z2_o": "update", "ds_z3_o": "serial_ns"}
"""The constant of each offloaded baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A baseline in a row."""

    row: dict[str, str]
    peer: str
    fits: bool
    """By the planner."""
    profile: Profile
    seconds: cost.Seconds
    """Seconds of this library's runtime under the baseline's plan."""

    @property
    def measured(self) -> float | None:
        """TFLOPS of a GPU; None if out of memory."""
        return None if self.row[self.peer] == "oom" else float(self.row[self.peer])

    def predicted(self, **constants: float) -> float:
        """TFLOPS of a GPU, whether it fits or not; `constants` of the peer are its own if left out."""
        numel = self.profile.parameters // int(self.row["gpus"])
        return cost.tflops_per_gpu(self.profile, PEERS[self.peer].step(self.seconds, numel, **constants))


@cache
def _plan(peer: str, model: str, gpus: int) -> PlanCandidate:
    """The plan of a peer with its chunks, which do not depend on the batch."""
    task = task_of(model, gpus, 4, Hardware.named(MACHINE))
    return price(task, strategies.plans(task)[PEERS[peer].strategy][0])


def table() -> list[dict[str, str]]:
    """The rows of the paper."""
    with TABLE.open() as file:
        return list(csv.DictReader(file))


def cell(row: dict[str, str], peer: str) -> Cell:
    """The planner's answer for a baseline in a row."""
    model, gpus, batch = row["model"], int(row["gpus"]), int(row["batch_per_gpu"])
    task, plan = task_of(model, gpus, batch, Hardware.named(MACHINE)), _plan(peer, model, gpus)
    found = price(task, plan.plan, plan.layout, plan.loads, plan.size, plan.moved.units)
    fits = PEERS[peer].fits(task, found.size, task.profile.parameters // gpus)
    return Cell(row=row, peer=peer, fits=fits, profile=task.profile, seconds=found.seconds)


def cells(rows: Sequence[dict[str, str]]) -> Iterator[Cell]:
    """All baselines of all rows, but Megatron on several GPUs."""
    for row in rows:
        yield from (cell(row, peer) for peer in PEERS if peer != "megatron" or row["gpus"] == "1")


def errors(found: Sequence[Cell], **constants: float) -> list[float]:
    """Relative errors of the throughputs that were measured."""
    return [one.predicted(**constants) / one.measured - 1 for one in found if one.measured]


def _best(loss: Callable[[float], float], start: float) -> float:
    """The constant with the least loss, by steps that shrink."""
    best, step = start, 0.2 * start
    while step > 0.001 * start:
        winner = min((best, best - step, best + step), key=loss)
        best, step = winner, step if winner != best else step / 2
    return best


def _fitted(found: Sequence[Cell], peer: str) -> float:
    name = FITTED[peer]

    def loss(value: float) -> float:
        sizes = [abs(e) for e in errors([one for one in found if one.peer == peer], **{name: value})]
        return sum(sizes) / len(sizes) + 0.1 * max(sizes)

    return _best(loss, getattr(PEERS[peer], name))


def printed_speedup(row: dict[str, str]) -> float | None:
    """The paper's speedup over the fastest baseline that is modelled; None where it has none."""
    rivals = {peer: float(row[peer]) for peer in PEERS if row[peer] != "oom"}
    if not rivals:
        return None
    if row["gpus"] == "1" or max(rivals, key=lambda peer: rivals[peer]) != "megatron":
        return float(row["speedup"])
    del rivals["megatron"]
    return float(row["elixir"]) / max(rivals.values())


def too_fast(rows: Sequence[dict[str, str]]) -> Iterator[tuple[str, dict[str, str], dict[str, str], float, float]]:
    """(column, rows of two neighbouring batches, their seconds) whose difference no GPU can compute at its peak."""
    peak = Hardware.named(MACHINE).peak_tflops * 1e12
    for column in ("elixir", *PEERS):
        for pair in pairwise(rows):
            first, second = pair
            alike = all(first[key] == second[key] for key in ("model", "gpus"))
            if not alike or any(row[column] in ("oom", "") for row in pair):
                continue
            if column == "megatron" and first["gpus"] != "1":
                continue  # its GPUs share a model
            profiles = [profile_of(row["model"], int(row["gpus"]), int(row["batch_per_gpu"])) for row in pair]
            less, more = (
                8 * profile.parameters * profile.tokens / float(row[column]) / 1e12
                for profile, row in zip(profiles, pair, strict=True)
            )
            if (more - less) * peak < 8 * profiles[0].parameters * (profiles[1].tokens - profiles[0].tokens):
                yield column, first, second, less, more


def _speedup(row: dict[str, str], found: Sequence[Cell]) -> float | None:
    """Elixir over the fastest baseline that fits; None where the paper has none."""
    rivals = [one.predicted() for one in found if one.fits]
    if not rivals or not row["speedup"]:
        return None
    task, choice = of_row(row["model"], int(row["gpus"]), int(row["batch_per_gpu"]))
    return cost.tflops_per_gpu(task.profile, choice.seconds.step) / max(rivals)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit the two constants of DeepSpeed's host again")
    known = parser.parse_args(arguments)
    rows = table()
    found = list(cells(rows))
    if known.fit:
        for peer, name in FITTED.items():
            print(f"{peer}: {name} {_fitted(found, peer):.3g}")
    print("Elixir v2, Table 8: baselines, TFLOPS of a GPU as measured/predicted; oom: out of memory; !: fits otherwise")
    print(
        f"{'model':10} {'GPUs':>4} {'batch':>5} "
        + " ".join(f"{peer:>12}" for peer in PEERS)
        + "  speedup   ours   error"
    )
    speedups = list[float]()
    for row in rows:
        its = [one for one in found if one.row is row]
        shown = {
            one.peer: f"{row[one.peer]}/{f'{one.predicted():.1f}' if one.fits else 'oom'}"
            + "!" * (one.fits is (one.measured is None))
            for one in its
        }
        texts = [f"{shown.get(peer, row[peer]):>12}" for peer in PEERS]
        speedup, faster = _speedup(row, its), f"{row['speedup'] or '-':>6}"
        printed = printed_speedup(row)
        if speedup is not None and printed is not None:
            speedups.append(abs(speedup / printed - 1))
            faster += f" {speedup:6.2f} {speedup / printed - 1:+7.1%}"
        print(f"{row['model']:10} {row['gpus']:>4} {row['batch_per_gpu']:>5} {' '.join(texts)}   {faster}")
    for peer in PEERS:
        off = [abs(error) for error in errors([one for one in found if one.peer == peer])]
        print(f"{peer:10} mean error {sum(off) / len(off):5.1%}, largest {max(off):5.1%}, {len(off)} throughputs")
    print(f"speedups   mean error {sum(speedups) / len(speedups):5.1%}, largest {max(speedups):5.1%}, {len(speedups)}")
    for says, those in (
        ("ran in the paper fit by the planner", [one.fits for one in found if one.measured]),
        ("were out of memory in the paper are so by the planner", [not one.fits for one in found if not one.measured]),
    ):
        print(f"{sum(those)} of {len(those)} cells that {says}")
    print("Megatron on several GPUs is not modelled, neither in cells nor among the rivals of a speedup")
    impossible = list(too_fast(rows))
    for column, first, second, less, more in impossible:
        batches = f"batch {first['batch_per_gpu']} takes {less:.2f} s, {second['batch_per_gpu']} {more:.2f} s"
        print(f"{column:7} {first['model']} on {first['gpus']} GPUs: {batches}")
    columns = dict.fromkeys(column for column, *_ in impossible)
    print(f"{len(impossible)} such pairs of batches, in {', '.join(columns)}: the difference exceeds the GPU's peak")


if __name__ == "__main__":
    main()

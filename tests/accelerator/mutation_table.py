"""Which tests notice which mutations of `mutations`: ``make mutations``.

Tests are in three groups: those on the accelerator of threads, those of `tests.lanes`, and all others that run the
library. Each file of tests runs once with marks, which say what a test reaches. The tests that reach a mutation then
run with it, group by group, until one fails. All that is found is kept in ``build/mutations`` as it comes, by the state
of the library, and not done again; what nobody has noticed is tried again.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

from tests.accelerator import changed
from tests.accelerator.build import build
from tests.accelerator.changed import Ran
from tests.accelerator.mutations import Mutation, mutations
from tests.support import preloaded  # noqa: F401  # what tests import is there before they begin
from tests.support.rules import ROOT

KEPT = ROOT / "build" / "mutations"
UNSEEN = {
    ("elixir_moe.memory.host_sums", "self._given += 1"): "three buffers are taken in turn by ones and by twos",
    ("elixir_moe.runtime.reductions", "self._streams.enter_compute()"): "autograd orders the end of a backward itself",
    ("elixir_moe.optim.muon_update", "chunk.shard.finish_sum()"): "whoever reads the gradient waits, too",
    ("elixir_moe.runtime.reductions", "self.issued += 1"): "only whether it has changed counts",
    (
        "elixir_moe.runtime.whole_updates",
        "block.vacate(self._streams.all_compute())",
    ): "the end of a step orders all fetches behind compute",
    ("elixir_moe.chunks.cache_policy", "self._clock += 1"): "only the order of its numbers counts",
    ("elixir_moe.chunks.step_machine", "self.clock += 1"): "only the order of its numbers counts",
    (
        "elixir_moe.optim.agreement",
        "communicator.all_reduce(squares, lambda *_: None, of='the gradient norm').wait()",
    ): "on a device the stream itself waits for an all-reduce",
}
"""Why no test can notice a mutation, by module and statement."""
GROUPS = {
    "device": ["tests/accelerator"],
    "lanes": ["tests/lanes"],
    "others": [
        f"tests/{name}"
        for name in (
            *(
                "chunks",
                "memory",
                "runtime",
                "optim",
                "state",
                "distributed",
                "wrapping",
                "parallel",
                "quantized",
                "moe",
            ),
            *("hf", "faults/test_faults.py", "test_inspect.py"),
        )
    ],
}
BROKEN = 3
"""So many times as long as without a mutation may tests take, and `PATIENCE` seconds more."""
PATIENCE = 60.0


@cache
def _folder() -> Path:
    """The folder of what is found with this library."""
    return KEPT / _hash(*sorted((ROOT / "elixir_moe").rglob("*.py")))


def _hash(*paths: Path) -> str:
    return sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def files(group: str) -> Iterator[str]:
    """The files of tests of a group."""
    for place in GROUPS[group]:
        path = ROOT / place
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            yield str(file.relative_to(ROOT))


def reaching(groups: Sequence[str], write: Callable[[str], None]) -> dict[str, list[Ran]]:
    """By group, what each test takes and reaches."""
    found: dict[str, list[Ran]] = {}
    for group in groups:
        found[group] = []
        for file in files(group):
            kept = _folder() / f"{file.replace('/', '.')}-{_hash(ROOT / file)}"
            if not kept.exists():
                since = time.monotonic()
                ran = changed.run([file], None, 1800)
                write(f"{file}: {len(ran)} tests, {time.monotonic() - since:.0f} s")
                for one in ran:
                    if one.failure:
                        write(f"without a mutation: {one}")
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps([asdict(one) for one in ran if not one.failure]))
            found[group] += [Ran(**one) for one in json.loads(kept.read_text())]
    return found


def in_turn(tests: list[Ran], most: float) -> list[Ran]:
    """The quickest test of each file, then the second of each, as many as take so many seconds."""
    by_file = defaultdict(list)
    for one in sorted(tests, key=lambda one: one.seconds):
        by_file[one.test.partition("::")[0]].append(one)
    found, total = [], 0.0
    for one in (one for round_ in zip_longest(*by_file.values()) for one in round_ if one is not None):
        total += one.seconds
        if total > most and found:
            break
        found.append(one)
    return found


def attempt(number: int, tests: list[Ran], most: float) -> str:
    """The test that notices a mutation, and how; why none does."""
    tests = [one for one in tests if number in one.reached]
    if not tests:
        return "not reached"
    chosen = in_turn(tests, most)
    seconds = BROKEN * sum(one.seconds for one in chosen) + PATIENCE
    ran = changed.run([one.test for one in chosen], number, seconds, "-x")
    for one in ran:
        if one.failure:
            name = one.test or chosen[len(ran) - 1].test
            return f"{name.removeprefix('tests/')}: {one.failure[:80]}"
    return f"nobody of {len(ran)}" + (f", of {len(tests)}" if len(chosen) < len(tests) else "")


def main() -> int:
    """Writes the table of the mutations whose line contains one of the arguments, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="text in a line of --list, as streams.py:87")
    parser.add_argument("--list", action="store_true", help="show the mutations and try none")
    parser.add_argument("--groups", nargs="*", default=[*GROUPS], choices=[*GROUPS], help="try only these tests")
    parser.add_argument("--seconds", type=float, default=40, help="how long a group's tests may take unchanged")
    arguments = parser.parse_args()
    every = [*mutations()]
    chosen = [n for n, m in enumerate(every) if not arguments.only or any(text in str(m) for text in arguments.only)]
    write = partial(print, flush=True)
    if arguments.list:
        write(*(every[number] for number in chosen), sep="\n")
        return 0
    build()
    write("| mutation |", " | ".join(GROUPS), "|\n|---|" + "---|" * len(GROUPS))
    ran = reaching(arguments.groups, partial(print, file=sys.stderr, flush=True))
    kept = _folder() / "noticed.jsonl"
    known = dict(_known(kept))
    for number in chosen:
        for group in arguments.groups:
            name = str(every[number])
            if not _sees(known.get((name, group), "nobody")):
                known[name, group] = by = attempt(number, ran[group], arguments.seconds)
                with open(kept, "a") as file:
                    file.write(json.dumps([name, group, by]) + "\n")
        write(_line(every[number], known))
    for group in arguments.groups:
        seen = sum(_sees(known[str(every[number]), group]) for number in chosen)
        write(f"{group}: {seen} of {len(chosen)} noticed")
    missed = [every[n] for n in chosen if not any(_sees(known[str(every[n]), group]) for group in arguments.groups)]
    write(f"noticed by no group: {len(missed)}", *(f"{one} ({_why(one)})" for one in missed), sep="\n")
    return 0


def _why(mutation: Mutation) -> str:
    why = UNSEEN.get((mutation.module, mutation.text))
    return f"accepted: {why}" if why else "a test is missing"


def _sees(by: str) -> bool:
    return not by.startswith(("nobody", "not reached"))


def _known(kept: Path) -> Iterator[tuple[tuple[str, str], str]]:
    for line in kept.read_text().splitlines() if kept.exists() else []:
        name, group, by = json.loads(line)
        yield (name, group), by


def _line(mutation: Mutation, known: dict[tuple[str, str], str]) -> str:
    cells = (known.get((str(mutation), group), "").replace("|", "/") for group in GROUPS)
    return f"| {mutation} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())

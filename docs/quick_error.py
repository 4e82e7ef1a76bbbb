"""How far `elixir-moe plan --quick` is off: ``python docs/quick_error.py`` compares it with the exact predictions.

Owns the comparison with docs/speed_of_light.json: each of its predictions was traced and searched, and those since
`SINCE` are asked again by formulas.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import speed_of_light as exact

from elixir_moe.chunks.param_spec import Precision
from elixir_tools.fit.figures import USUAL_ERROR, Figures
from elixir_tools.fit.quick import Step, quick, step_of
from elixir_tools.fit.tasks import DTYPES, machine_task, model_of

SINCE = "2026-11-27"
"""The date of the first predictions that count one pass of decoders and the updates that a forward hides."""
_GIBI = 2**30


def cells(kept: dict[str, Any]) -> Iterator[tuple[str, Figures, dict[str, Any]]]:
    """(model, way and machine; the answer by formulas; the newest exact one) of each prediction since then."""
    steps: dict[tuple[str, str, int], Step] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, ways in kept["predictions"].items():
            for way, machines in ways.items():
                for name, found in machines.items():
                    machine, newest = exact.MACHINES[name], found[-1]
                    if newest["date"] < SINCE:
                        continue
                    batch = newest.get("sequences_per_gpu") or exact.BATCHES[-1]
                    known = exact.asked(model, way, batch, machine, Path(folder))
                    dtype = DTYPES[known.dtype]
                    if (model, way, batch) not in steps:
                        steps[model, way, batch] = step_of(model_of(known, None).model, batch, exact.SEQ, dtype=dtype)
                    step = steps[model, way, batch]
                    task = machine_task(known, machine.hardware, step.profile)
                    rough = quick(step, task, precision=Precision(), itemsize=dtype.itemsize)
                    yield f"{model} {way} {name}", rough, newest


def main() -> None:
    """Prints the errors of all cells, and of each."""
    errors: dict[str, list[float]] = {"step": [], "VRAM": []}
    agree = total = 0
    for name, rough, newest in cells(json.loads(exact.KEPT.read_text())):
        total, agree = total + 1, agree + (rough.fits == newest["fits"])
        if not (rough.fits and newest["fits"]):
            print(f"{name}: fits {rough.fits}, exactly {newest['fits']}")
            continue
        off = {
            "step": rough.seconds.step / newest["seconds"] - 1,
            "VRAM": rough.device_bytes / _GIBI / newest["vram_gib_per_gpu"] - 1,
        }
        ram = f"RAM {rough.host_bytes * rough.task.gpus / _GIBI:.1f} for {newest['ram_gib']}"
        print(f"{name}: step {off['step']:+.0%}, VRAM {off['VRAM']:+.0%}, {ram} GiB")
        for key, value in off.items():
            errors[key].append(abs(value))
    print(f"fits or not: {agree} of {total} as exactly")
    for key, found in errors.items():
        print(f"{key}: {_spread(found)}; {sum(e <= USUAL_ERROR for e in found)} within {USUAL_ERROR:.0%}")


def _spread(found: Sequence[float]) -> str:
    tenths = statistics.quantiles(found, n=10)
    return f"{len(found)} answers, median {statistics.median(found):.1%}, nine of ten within {tenths[-1]:.1%}"


if __name__ == "__main__":
    main()

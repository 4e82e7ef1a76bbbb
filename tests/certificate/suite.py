"""All rows of the certificate: which there are, what each of them finds, and the file that keeps it.

Owns the cover of families, plans and ways of training, the order of rows, and what makes a changed file noticed. A row
is run by `training` and judged by `certificate`. Prints nothing.
"""

import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from elixir_moe.errors import ConfigError, ElixirError
from elixir_tools.names import PLANS
from elixir_tools.verify import training
from elixir_tools.verify.certificate import Check, certify
from elixir_tools.verify.plans import asked
from elixir_tools.verify.ranks import on_ranks
from tests.certificate.families import FAMILIES, LENGTH, ROWS, Drawn, Inputs, hashes

MODES = {"full": "all weights", "lora": "adapters", "nf4": "adapters of a base in nf4"}
"""What is trained."""
_STEPS = 2
"""Before the save, and as many after the load."""
_OPTIONS = "; ".join(", ".join(f"{k} {v}" for k, v in group.items()) for group in training.GROUPS)
TRAINED = (
    f"AdamW, {len(training.GROUPS)} param_groups ({_OPTIONS}), learning rates times {training.DECAY} after each step"
)
"""What each row is trained with; a row keeps it."""
_TRAINED_BEFORE = (
    "AdamW, one param_group (lr 0.01, eps 0.0001, weight_decay 0.1) and constant learning rates, by a `verify` that "
    "decoded weights in 4 bits by this library in both runs, and did not compare options, schedule, buffers and random "
    "generators after the load"
)
"""Rows that do not say what they were trained with."""
_WAYS = tuple(product((False, True), (1, 2), ((2, 2), (2, 1), (1, 2))))
"""(checkpointing, micro-batches of a step, (ranks that save, ranks that load)); every row exports at its end."""

_ABOUT = (
    "A row trains a small model twice: under a plan on CPU ranks, and in plain PyTorch, transformers and peft in one",
    "process. It compares both at each step, through a save and a load on other ranks, up to what plain peft or",
    "transformers computes from the exported files. [verify.md](verify.md) says what is compared and derives bounds.",
    "",
    "- `make certificate` runs the rows that the file has not, and goes on where it stopped; `FRESH=1` runs all anew.",
    "- `python -m tests.certificate --only NAME` repeats one row; `*` in a name stands for any text.",
    "- `python -m tests.certificate --check docs/certificate.json` tells whether the file is as it was written.",
)

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison of a run under a plan with plain PyTorch."""

    family: str
    plan: str
    mode: str
    checkpointing: bool
    accumulation: int
    ranks: tuple[int, int]
    """That train and save, and that load and go on."""

    @property
    def name(self) -> str:
        """Such as ``llama.zero3.lora.recomputed.2-micro.2-to-1``."""
        kept = "recomputed" if self.checkpointing else "kept"
        ways = f"{kept}.{self.accumulation}-micro.{self.ranks[0]}-to-{self.ranks[1]}"
        return f"{self.family}.{self.plan}.{self.mode}.{ways}"

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python -m tests.certificate --only {self.name}"

    def source(self) -> Drawn:
        """Its model."""
        lora, quantized = self.mode != "full", self.mode if self.mode not in ("full", "lora") else None
        return FAMILIES[self.family].source(lora=lora, quantized=quantized, checkpointing=self.checkpointing)


def rows() -> list[Row]:
    """Each family under each plan in each mode, once; the first third has every pair of a family, a plan and a mode.

    The ways of training go round, so that each of them meets every family, every plan and every mode.
    """
    found: dict[int, list[Row]] = {0: [], 1: [], 2: []}
    modes = list(MODES)
    for (f, family), (p, plan), (m, mode) in product(enumerate(FAMILIES), enumerate(PLANS), enumerate(modes)):
        way = _WAYS[(f + 2 * p + m) % len(_WAYS)]
        found[(m - f - p) % len(modes)].append(Row(family, plan, mode, *way))
    return [row for third in found.values() for row in third]


def modules_of_families() -> list[str]:
    """What the families are made of, for whoever imports it once for all rows."""
    kinds = {str(part["model_type"]) for family in FAMILIES.values() for part in _configs(family.settings)}
    renamed = {"gemma3_text": "gemma3", "clip_vision_model": "clip"}
    names = sorted({renamed.get(kind, kind) for kind in kinds})
    return [f"transformers.models.{name}.modeling_{name}" for name in names]


def _configs(settings: Answer) -> Iterator[Answer]:
    yield settings
    yield from (part for part in settings.values() if isinstance(part, dict) and "model_type" in part)


def left_out() -> str:
    """What the rows do not have, and why."""
    whole = len(FAMILIES) * len(PLANS) * len(MODES) * len(_WAYS)
    return (
        f"{len(rows())} of {whole:,} combinations: every family under every plan in every mode, and every way of "
        f"training (activations recomputed or kept, 1 or 2 micro-batches, 2 or 1 ranks before and after the load) "
        f"with every family, every plan and every mode. All of them would take {whole // len(rows())} times as long."
    )


def chosen(pattern: str | None) -> list[Row]:
    """The rows whose names match a shell pattern, or begin with it. Raises ConfigError if none does."""
    found = [r for r in rows() if pattern is None or fnmatchcase(r.name, pattern) or r.name.startswith(pattern)]
    if not found:
        raise ConfigError(f"--only {pattern!r} matches no row: names are as {rows()[0].name}; * stands for any text")
    return found


def run_row(row: Row) -> Answer:
    """What a row finds; an error of the library is an answer too."""
    began = time.monotonic()
    facts: Answer = {"row": row.name, "command": row.command, "seed": training.SEED}
    source = row.source()
    try:
        with tempfile.TemporaryDirectory() as folder:
            setup = training.Setup(
                source=source,
                backend=training.Planned(asked(row.plan, Path(folder), accumulation=row.accumulation)),
                ranks=row.ranks[0],
                resumed_ranks=row.ranks[1],
                steps=_STEPS,
                accumulation=row.accumulation,
                compute_dtype=None,
                folder=Path(folder),
            )
            training.run_on_ranks(setup, on_ranks)
            checks, inputs = on_ranks(1, _judged, setup, source)
    except ElixirError as error:
        return facts | {"ok": False, "error": str(error), "seconds": round(time.monotonic() - began, 1)}
    wrong = [check for check in checks if not check.ok]
    facts["first"] = f"{wrong[0].name}: {wrong[0].where}" if wrong else None
    return facts | {
        "ok": not wrong,
        "inputs": asdict(inputs),
        "checks": worst_of(checks),
        "seconds": round(time.monotonic() - began, 1),
    }


def _judged(setup: training.Setup, source: Drawn) -> tuple[list[Check], Inputs]:
    return certify(setup), hashes(source, training.SEED)


def worst_of(checks: Sequence[Check]) -> dict[str, list[float | str]]:
    """{what was compared, whatever the step: [the worst difference, its bound]}."""
    found: dict[str, Check] = {}
    for check in checks:
        kind = re.sub(r" (of|in|after) step \d+.*", "", check.name)
        before = found.get(kind)
        if before is None or _badness(check) > _badness(before):
            found[kind] = check
    return {
        kind: [one.difference if math.isfinite(one.difference) else str(one.difference), one.tolerance]
        for kind, one in found.items()
    }


def _badness(check: Check) -> float:
    return math.inf if check.tolerance == 0 and check.difference else check.difference / (check.tolerance or 1.0)


# ---------------------------------------------------------------------------------------------------------- the file


def run_suite(
    asked_for: Sequence[Row],
    file: Path,
    facts: Answer,
    jobs: int,
    tell: Callable[[Answer], None],
    *,
    again: bool = False,
    fresh: bool = False,
) -> Answer:
    """Runs the rows that `file` has not as equal, `jobs` at a time, and writes each as it ends; returns the content.

    `facts` are of this run: "commit" goes with each row, rows of other "versions" are not kept, and "packages" are
    told beside them. Rows that were trained otherwise than `TRAINED` are run again. `again`: rows that `file` has are
    run too; `fresh`: nothing of the file is kept.

    Raises:
        ConfigError: `file` is there and is no certificate, or has been changed.
    """
    before = read(file) if file.exists() and not fresh else {"versions": facts["versions"], "rows": []}
    kept = before["rows"] if before["versions"] == facts["versions"] else []
    done = {answer["row"]: answer for answer in kept if answer["ok"] and answer.get("trained") == TRAINED}
    content = _content(facts, done)
    todo = [row for row in asked_for if again or row.name not in done]
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(run_row, row) for row in todo]
        try:
            for one in as_completed(waiting):
                answer = one.result() | {"commit": facts["commit"], "trained": TRAINED}
                done[answer["row"]] = answer
                content = _content(facts, done)
                write(file, content)
                tell(answer)
        finally:
            for one in waiting:
                one.cancel()
    write(file, content)
    return content


def _content(facts: Answer, done: dict[str, Answer]) -> Answer:
    every = rows()
    return {
        "what": "python -m tests.certificate",
        "versions": facts["versions"],
        "packages": facts["packages"],
        "steps": {"before the save": _STEPS, "after the load": _STEPS, "rows": ROWS, "tokens of a row": LENGTH},
        "left out": left_out(),
        "not run": [row.name for row in every if row.name not in done],
        "rows": [done[row.name] for row in every if row.name in done],
    }


def write(file: Path, content: Answer) -> None:
    """Writes a certificate with the hash of its content, whole or not at all."""
    content = {**content, "digest": digest(content)}
    beside = file.with_name(f"{file.name}.tmp{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(file)


def digest(content: Answer) -> str:
    """SHA-256 of all that a certificate says but the digest itself, however the file is laid out."""
    said = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(file: Path) -> Answer:
    """The content of a certificate. Raises ConfigError if it is none, or has been changed."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a certificate: {error}") from error
    if not isinstance(content, dict) or not {"digest", "rows", "versions"} <= set(content):
        raise ConfigError(f"{file}: no certificate: expected what `make certificate` has written")
    found = digest(content)
    if found != content["digest"]:
        raise ConfigError(
            f"{file} has been changed since it was written: its content has the hash {found}, and it says "
            f"{content['digest']}; run `make certificate FRESH=1` for a new one"
        )
    return content


# ---------------------------------------------------------------------------------------------------------- the page


def page(content: Answer, name: str) -> str:
    """The certificate as a page of Markdown; `name` is that of its file."""
    return "\n".join(_lines(content, name)) + "\n"


def _lines(content: Answer, name: str) -> Iterator[str]:
    answers = {answer["row"]: answer for answer in content["rows"]}
    equal = sum(answer["ok"] for answer in answers.values())
    commits = sorted({answer["commit"] for answer in answers.values()})
    yield from ("# The certificate", "")
    yield (
        f"Made by `make certificate` from [{name}]({name}); do not edit. {equal} of {len(rows())} rows are equal, "
        f"{len(answers) - equal} differ or fail, and {len(content['not run'])} have not been run."
    )
    if content["not run"]:
        yield "The run was stopped before those: they are listed below, and the same command goes on with them."
    yield from ("", *_ABOUT, "", f"- Rows: {content['left out']}")
    yield f"- Versions: {', '.join(f'{package} {version}' for package, version in content['versions'].items())}"
    trained = Counter(answer.get("trained", _TRAINED_BEFORE) for answer in answers.values())
    yield from (f"- Trained with, in {count} rows: {how}" for how, count in trained.items())
    yield f"- Commits: {', '.join(commits) or 'none'}"
    yield f"- SHA-256 of the content: `{content.get('digest') or digest(content)}`"
    yield from ("", "## Families and plans", "", "A cell names the modes whose row is equal.", "")
    yield f"| family | {' | '.join(PLANS)} |"
    yield f"|---|{'---|' * len(PLANS)}"
    cells = _cells(answers)
    for family in FAMILIES:
        yield f"| {family} | {' | '.join(cells.get((family, plan), '-') for plan in PLANS)} |"
    yield from ("", f"Modes: {'; '.join(f'`{mode}` {words}' for mode, words in MODES.items())}.")
    yield from ("", "## Worst differences", "", "| check | rows | worst | bound there |", "|---|---|---|---|")
    yield from _worst(list(answers.values()))
    wrong = [answer for answer in answers.values() if not answer["ok"]]
    if wrong:
        yield from ("", "## What differs or fails", "", "| row | what |", "|---|---|")
        yield from (f"| `{a['row']}` | {_one_line(a.get('error') or a['first'])} |" for a in wrong)
    yield from (
        "",
        "## Rows",
        "",
        "The hashes of config, batches and weights of each; it is equal unless it says otherwise.",
        "",
        "```",
    )
    for row in rows():
        yield _row_line(row, answers.get(row.name))
    yield "```"


def _cells(answers: dict[str, Answer]) -> dict[tuple[str, str], str]:
    """The modes that have an answer, of each family under each plan."""
    said = defaultdict(list)
    for row in rows():
        if answer := answers.get(row.name):
            said[row.family, row.plan].append(row.mode if answer["ok"] else f"**{row.mode} differs**")
    return {cell: ", ".join(modes) for cell, modes in said.items()}


def _worst(answers: list[Answer]) -> Iterator[str]:
    kinds = dict.fromkeys(kind for answer in answers for kind in answer.get("checks", {}))
    for kind in kinds:
        found = [answer["checks"][kind] for answer in answers if kind in answer.get("checks", {})]
        worst = max(found, key=lambda pair: float(pair[0]) / pair[1] if pair[1] else float(pair[0]) * 1e30)
        bound = f"{worst[1]:.2g}" if worst[1] else "bit exact"
        yield f"| {kind} | {len(found)} | {float(worst[0]):.2g} | {bound} |"


def _row_line(row: Row, answer: Answer | None) -> str:
    if answer is None:
        return f"{row.name}  not run"
    inputs = "/".join(value[:8] for value in answer.get("inputs", {}).values())
    return f"{row.name}  {inputs}{'' if answer['ok'] else '  differs or fails'}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:400]

"""Writes the planner's answer into the head of each recipe: ``python recipes/answers.py [--quick] [NAME ...]``.

Owns the command of `elixir-moe plan` for a recipe, and the form of a head: title, command, machine, date, question and
answer, all of them comments. The rest of a recipe is for `elixir-moe VERB --config FILE` and stays unchanged.
"""

import datetime
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from elixir_tools.models.known import find

HERE = Path(__file__).parent
RECIPES = sorted(HERE.glob("*.yaml"))
_END = ("Run:", "In a script:")
"""Where the answer begins to say what to run; the recipe has that itself."""
QUICK = " --quick"
_UNSPREAD = "(asked without spread_experts, for which plan has no word)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The parts of a recipe's file."""

    title: str
    """The lines of its head that this file does not write."""
    verb: str
    """The command that it is for."""
    machine: str
    """The arguments of `elixir-moe plan` for its machine."""
    settings: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """The shipped part of its model's config.json."""
        file = find(self.settings["model_name_or_path"]).config
        assert file is not None, "recipes name models whose shapes ship"
        found: dict[str, Any] = json.loads(Path(file).read_text())
        return found


def read(recipe: Path) -> Recipe:
    """Reads a recipe."""
    lines = recipe.read_text().splitlines()
    title = lines[: next(i for i, line in enumerate(lines) if line.startswith("# machine: ")) + 1]
    verb = next(line for line in title if "elixir-moe" in line).partition("elixir-moe ")[2].split()[0]
    machine = title[-1].removeprefix("# machine: ")
    settings = yaml.safe_load(recipe.read_text())
    return Recipe(title="\n".join(title), verb=verb, machine=machine, settings=settings)


def asked(recipe: Recipe) -> str:
    """The command that prices a recipe. A row of `dpo` has two sequences; `dpo` and `kto` compute whole logits."""
    given = recipe.settings
    rows = given["per_device_train_batch_size"] * (2 if recipe.verb == "dpo" else 1)
    words = [given["model_name_or_path"], recipe.machine, "--seq", given["max_length"], "--batch", rows]
    words += ["--accumulation", given["gradient_accumulation_steps"]]
    words += [] if recipe.verb == "sft" else ["--loss", "whole"]
    if given.get("use_peft"):
        targets = given["lora_target_modules"]
        targets = targets if isinstance(targets, str) else ",".join(targets)
        words += ["--lora", f"r={given['lora_r']},alpha={given['lora_alpha']},targets={targets}"]
        words += ["--quantize", given["quantize"]] if "quantize" in given else []
    else:
        words.append("--full")
    for name in ("master", "moments"):
        words += [f"--{name}", given[f"plan_{name}"]] if f"plan_{name}" in given else []
    return f"elixir-moe plan {' '.join(map(str, words))}"


def answer(found: Recipe, question: str) -> str:
    """Returns the comment that answers a question about a recipe."""
    command = [sys.executable, "-m", "elixir_moe", *shlex.split(question)[1:], "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{question}\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    lines = lines[: next((i for i, line in enumerate(lines) if line.startswith(_END)), len(lines))]
    lines += [_UNSPREAD] * ("spread_experts" in found.settings)
    return "".join(f"#   {line}\n" for line in lines)


def head(recipe: Path) -> tuple[str, str]:
    """The question in the head of a recipe, and its date."""
    written = recipe.read_text().removeprefix(read(recipe).title).lstrip("#\n ")
    date, _, question = written.partition("\n")[0].partition(": ")
    return question, date


def write(recipe: Path, *, quick: bool) -> None:
    """Writes the answer into the head of a recipe; `quick`: that by formulas."""
    found, text = read(recipe), recipe.read_text()
    rest = text[text.index("\nmodel_name_or_path:") + 1 :]
    question = asked(found) + QUICK * quick
    said = f"#\n# {datetime.date.today().isoformat()}: {question}\n{answer(found, question)}"
    recipe.write_text(f"{found.title}\n{said}\n{rest}")


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word != QUICK.strip()]
    for file in RECIPES:
        if not named or any(word in file.stem for word in named):
            write(file, quick=QUICK.strip() in sys.argv)
            print(file.read_text().partition("\n\n")[0], flush=True)

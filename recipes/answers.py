"""What the planner says of each recipe: ``python recipes/answers.py [NAME ...]`` writes it into the heads of the files.

Owns the way from a recipe to the words of `elixir-moe plan`, and the form of a head: title, command, machine, date,
question and answer, all of them comments. The rest of a recipe is for `elixir-moe VERB --config FILE` and stays.
"""

import datetime
import json
import runpy
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RECIPES = sorted(HERE.glob("*.yaml"))
_MODELS = runpy.run_path(str(HERE.parent / "docs" / "speed_of_light.py"))["MODELS"]
_ALIKE = {"Llama-3.1-8B-Instruct": "Llama-3.1-8B", "Llama-3.3-70B-Instruct": "Llama-3.3-70B"}
_ALIKE |= {"Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B"}
_END = ("By command:", "In a script:")
"""Where the answer begins to say what to run, which the recipe itself says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe as it is read."""

    title: str
    """The lines of its head that this file does not write."""
    verb: str
    """The command that it is for."""
    machine: str
    """The words of `elixir-moe plan` for its machine."""
    settings: dict[str, Any]

    @property
    def model(self) -> str:
        """The last part of its model's name."""
        return str(self.settings["model_name_or_path"]).rpartition("/")[2]

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of its model."""
        found: dict[str, Any] = _MODELS[_ALIKE.get(self.model, self.model)]
        return found


def read(recipe: Path) -> Recipe:
    """The recipe of a file."""
    lines = recipe.read_text().splitlines()
    title = lines[: next(i for i, line in enumerate(lines) if line.startswith("# machine: ")) + 1]
    verb = next(line for line in title if "elixir-moe" in line).partition("elixir-moe ")[2].split()[0]
    machine = title[-1].removeprefix("# machine: ")
    settings = yaml.safe_load(recipe.read_text())
    return Recipe(title="\n".join(title), verb=verb, machine=machine, settings=settings)


def asked(recipe: Recipe) -> str:
    """The words of `elixir-moe plan` for a recipe."""
    given = recipe.settings
    pairs = 2 if recipe.verb == "dpo" else 1
    words = ["--hf", recipe.model, recipe.machine, "--seq", given["max_length"]]
    words += ["--batch", given["per_device_train_batch_size"] * pairs]
    words += ["--accumulation", given["gradient_accumulation_steps"]]
    words += ["--loss", "fused" if recipe.verb == "sft" else "whole"]
    if given.get("use_peft"):
        targets = given["lora_target_modules"]
        targets = targets if isinstance(targets, str) else ",".join(targets)
        words += ["--lora", f"r={given['lora_r']},alpha={given['lora_alpha']},targets={targets}"]
        words += ["--quantize", given.get("quantize", "mxfp4" if recipe.model.startswith("gpt-oss") else "none")]
    for name in ("master", "moments"):
        words += [f"--{name}", given[f"plan_{name}"]] if f"plan_{name}" in given else []
    return f"elixir-moe plan {' '.join(map(str, words))}"


def answer(recipe: Path) -> str:
    """The comment that answers a recipe."""
    found = read(recipe)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / found.model).mkdir()
        (Path(folder) / found.model / "config.json").write_text(json.dumps(found.config))
        command = [sys.executable, "-m", "elixir_moe", *shlex.split(asked(found))[1:], "--quiet"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{recipe.name}: {asked(found)}\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    lines = lines[: next((i for i, line in enumerate(lines) if line.startswith(_END)), len(lines))]
    if found.settings.get("spread_experts"):
        lines.append("(asked without spread_experts, for which plan has no word)")
    return "".join(f"#   {line}\n" for line in lines)


def head(recipe: Path) -> tuple[str, str]:
    """The question in the head of a recipe, and its date; both empty if there are none."""
    written = recipe.read_text().removeprefix(read(recipe).title).lstrip("#\n ")
    date, _, rest = written.partition("\n")[0].partition(": ")
    return (rest, date) if rest.startswith("elixir-moe plan") else ("", "")


def write(recipe: Path) -> None:
    """Writes the answer into the head of a recipe."""
    found, text = read(recipe), recipe.read_text()
    rest = text[text.index("\nmodel_name_or_path:") + 1 :]
    said = f"#\n# {datetime.date.today().isoformat()}: {asked(found)}\n{answer(recipe)}"
    recipe.write_text(f"{found.title}\n{said}\n{rest}")


if __name__ == "__main__":
    for file in RECIPES:
        if not sys.argv[1:] or any(word in file.stem for word in sys.argv[1:]):
            write(file)
            print(file.read_text().partition("\n\n")[0], flush=True)

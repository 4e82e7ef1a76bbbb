"""The documents: snippets and notebooks run, links lead somewhere, pages are short, quoted errors exist."""

import ast
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import tokenizers
import torch
import transformers

import elixir_moe as em
from elixir_moe.planner.solve import solve
from elixir_tools.cli.main import main
from elixir_tools.fit.tasks import model_of, task_of
from tests.support.documents import anchors, links, made_pages
from tests.support.every import every
from tests.support.hf_cases import forget_accelerate
from tests.support.rules import assert_none, place

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("design/*.md")])
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
WORDS = 1500
QUICK = "quickstart"
"""The notebook that the quick tests run."""


def test_no_page_is_long() -> None:
    assert {page.name: n for page in PAGES if (n := len(page.read_text().split())) > WORDS} == {}


def test_every_page_is_on_the_site() -> None:
    index = (DOCS / "index.md").read_text()
    listed = set(re.findall(r"(?m)^([a-z_/]+)$", index))
    assert {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"} | {
        f"api/{name}" for name in made_pages()
    } == listed


def test_every_public_name_is_on_one_page_of_the_site() -> None:
    named = [name for _, names in made_pages().values() for name in names]
    assert sorted(named) == sorted(em.__all__)


def broken_links(page: Path) -> Iterator[str]:
    """Links to a file that is not there, or not on the site, or to a heading that the file does not have."""
    text = page.read_text()
    for target in links(text):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        inside = not file.resolve().is_relative_to(DOCS) and page.parent == DOCS
        if not file.exists() or inside or (anchor and anchor not in anchors(file.read_text())):
            line = 1 + text[: text.index(target)].count("\n")
            yield f"{place(page, line)}: {target}"


def test_links_lead_somewhere() -> None:
    pages = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"))]
    assert_none(link for page in pages for link in broken_links(page))


def test_no_file_names_a_page_that_is_gone() -> None:
    folders = ("elixir_moe", "elixir_tools", "tests", "benchmarks", "examples", "packaging", "csrc")
    files = [
        file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".cpp", ".hpp")
    ]
    files += [ROOT / name for name in ("Makefile", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    gone = [
        f"{file.relative_to(ROOT)}: docs/{name}"
        for file in files
        for name in re.findall(r"docs/([\w/]+\.(?:md|py|ipynb))", file.read_text())
        if not (DOCS / name).exists()
    ]
    assert not gone


def _said() -> Iterator[str]:
    """Every string of the code but docstrings; what is filled in is one NUL."""
    for file in sorted([*(ROOT / "elixir_moe").rglob("*.py"), *(ROOT / "elixir_tools").rglob("*.py")]):
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def test_quoted_errors_are_those_of_the_code() -> None:
    rows = re.findall(r"(?m)^\| (`.*?`) \|", (DOCS / "errors.md").read_text())
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 25
    said = list(_said())
    for text in quoted:
        pattern = re.compile(r"\0".join(re.escape(part) for part in re.split(r"\.\.\.|\bN\b", text)))
        assert any(pattern.search(one) for one in said), text


def run_snippets(page: Path, scope: dict[str, object]) -> int:
    """Runs the Python of a page, one snippet after another; returns how many there are."""
    text = page.read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for snippet in snippets:
        line = text[: text.index(snippet)].count("\n")
        exec(compile("\n" * line + snippet, str(page), "exec"), scope)
    return len(snippets)


def test_every_snippet_is_python() -> None:
    for page in PAGES:
        for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            compile(snippet, str(page), "exec")


@pytest.mark.parametrize(
    ("name", "number", "printed"),
    [
        ("training_loop", 12, '"scatter": true'),
        ("weights", 3, ""),
        ("wrapped", 8, "host"),
        ("i_want_to", 1, "eval_loss"),
    ],
)
def test_the_snippets_run_one_after_another(
    name: str,
    number: int,
    printed: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_snippets(DOCS / f"{name}.md", {"__name__": "snippets"}) == number
    assert printed in capsys.readouterr().out


_BUILT = "model = build(); optimizer = torch.optim.AdamW(model.parameters())"
_SCHEDULED = f"{_BUILT}; schedule = torch.optim.lr_scheduler.LinearLR(optimizer)"
SETTINGS = {
    ("less_memory", 0): _BUILT,
    ("less_memory", 1): _BUILT,
    ("less_memory", 2): _BUILT,
    ("checkpoints", 0): f"{_SCHEDULED}; model, optimizer = em.wrap(model, optimizer, plan=em.Plan.ddp())",
    ("trainer", 2): "folder = 'base'",
    ("sft", 0): "model, data, arguments = build(), rows, Arguments('out', max_steps=2, use_cpu=True, report_to=[])",
    ("finetune", 0): "Path('base').rename('Qwen3-30B-A3B')",
    ("accelerate_fabric", 0): f"{_SCHEDULED}; loader = torch.utils.data.DataLoader(rows)",
}
"""{(page, number of a snippet): what its reader has}, without snippets that need two GPUs or another library."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), SETTINGS, ids=lambda value: str(value))
def test_snippets_run_with_what_their_reader_has(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    forget_accelerate()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)

    def build() -> transformers.PreTrainedModel:
        return transformers.AutoModelForCausalLM.from_config(config)

    build().save_pretrained("base")
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(4, 16)]
    data = [{key: value[None] for key, value in row.items()} for row in rows]
    scope = {"__name__": "snippet", "em": em, "torch": torch, "Path": Path, "build": build, "rows": rows, "data": data}
    scope |= {"Arguments": transformers.TrainingArguments}
    scope |= {"AutoConfig": transformers.AutoConfig, "AutoModelForCausalLM": transformers.AutoModelForCausalLM}
    scope |= {"AdamW": torch.optim.AdamW, "LoraConfig": peft.LoraConfig, "get_peft_model": peft.get_peft_model}
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.DOTALL)
    exec(SETTINGS[name, number], scope)
    exec(compile(snippets[number], f"{name}.md, snippet {number}", "exec"), scope)


def test_the_example_of_the_readme_fine_tunes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = ROOT / "examples" / "finetune.py"
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = iter(example.read_text().splitlines())
    assert shown and every(line in lines for line in shown[1].splitlines()), (
        "they are lines of the example, in its order"
    )
    letters = {letter: i for i, letter in enumerate("?abcdefgh")}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    before = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    before.save_pretrained(tmp_path)
    (tmp_path / "texts.txt").write_text("abcabc\n\na\nfedfed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["finetune.py", str(tmp_path), "texts.txt"])
    runpy.run_path(str(example))
    after = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32)
    moved = (after.lm_head.weight - before.lm_head.weight.bfloat16().float()).abs().max().item()
    assert 0 < moved < 1e-2, "two steps of at most 1e-5, rounded to bf16"


def test_the_readme_is_short_and_has_the_figures_of_the_certificate() -> None:
    readme = (ROOT / "README.md").read_text()
    said = re.sub(
        r"```\n\$ .*?```", "", readme, flags=re.DOTALL
    )  # what commands print is not counted, as tables are not
    assert len([word for line in said.splitlines() if not line.startswith("|") for word in line.split()]) <= 700
    page = (DOCS / "certificate.md").read_text()
    equal, rows = re.search(r"(\d+) of (\d+) rows are equal", page).groups()
    worst = {check: re.search(rf"(?m)^\| {check} \| \d+ \| (\S+) \|", page)[1] for check in ("loss", "weights")}
    assert f"{equal} of {rows} rows are equal" in readme.replace("\n", " ")
    assert every(difference in readme for difference in worst.values())


@pytest.mark.slow
def test_the_answer_in_the_readme_is_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"```\n\$ elixir-moe (plan .*?[^\\])\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert main(shlex.split(shown[1].replace("\\\n", ""))) == 0
    assert capsys.readouterr().out == shown[2]


@pytest.mark.parametrize(
    "notebook",
    [pytest.param(file, marks=[] if file.stem == QUICK else pytest.mark.slow) for file in NOTEBOOKS],
    ids=lambda file: file.stem,
)
def test_the_notebooks_run(notebook: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(cells) < 40 and not any(cell["outputs"] for cell in code), "notebooks are small, without outputs"
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "notebook"}
    for cell in code:
        exec(compile("".join(cell["source"]), str(notebook), "exec"), scope)


def test_there_are_five_notebooks() -> None:
    assert {f"notebooks/{file.name}" for file in NOTEBOOKS} == set(links((DOCS / "notebooks.md").read_text()))
    assert len(NOTEBOOKS) == 5


@pytest.mark.parametrize(
    "name",
    ["mixture", "step", "parameter", *(pytest.param(name, marks=pytest.mark.slow) for name in ("layers", "bytes"))],
)
def test_the_pictures_are_what_the_command_draws(name: str) -> None:
    draw = runpy.run_path(str(DOCS / "pictures.py"))["PICTURES"][name]
    assert (DOCS / "pictures" / f"{name}.svg").read_text() == draw(), "run: python docs/pictures.py"


SPEED = runpy.run_path(str(DOCS / "speed_of_light.py"))
"""The command that predicts the speed of known models."""


def test_the_tables_of_the_speed_of_light_are_what_the_command_writes() -> None:
    assert SPEED["write"](check=True) == [], "run: python docs/speed_of_light.py --write"
    assert every(
        f"<!-- speed of light: {name} -->" in (DOCS / "speed_of_light.md").read_text() for name in SPEED["MODELS"]
    )


def test_no_prediction_is_above_its_bound() -> None:
    everything = SPEED["kept"]()
    found = list(SPEED["entries"](everything))
    assert len(found) >= 60
    for model, way, machine, entry in found:
        step = SPEED["Step"](**everything["steps"][model][way][str(entry["sequences_per_gpu"])])
        least = SPEED["bound"](step, SPEED["MACHINES"][machine])
        assert entry["seconds"] >= max(least.values()) * 0.999, (model, way, machine)
        assert entry["tokens_per_second"] <= entry["bound_tokens_per_second"], (model, way, machine)


def test_a_bound_is_what_its_formula_says() -> None:
    step = SPEED["Step"](flops=10**15, trained=10**10, frozen_bytes=0, passed=10**10, passed_bytes=2 * 10**10)
    least = SPEED["bound"](step, SPEED["MACHINES"]["RTX 3060"])
    vram, ram = 12 * 2**30, 64 * 2**30
    moved = 10**10 - vram // 12
    assert least == pytest.approx(
        {
            "compute": 1e15 / 25.5e12,
            "link": max(2 * moved + 2e10 - vram, 2 * moved) / 31.5e9,
            "Adam": 28 * moved / 89.6e9,
            "disk": (12e10 - vram - ram) / 3e9,
        }
    )
    frozen = SPEED["Step"](flops=0, trained=0, frozen_bytes=10**11, passed=0, passed_bytes=10**11)
    least = SPEED["bound"](frozen, SPEED["MACHINES"]["RTX 3060"])
    assert least["link"] == pytest.approx(2 * (1e11 - vram) / 31.5e9), "once in forward, once in backward"
    assert least["disk"] == pytest.approx(2 * (1e11 - vram - ram) / 3e9)
    assert "link" not in SPEED["bound"](frozen, SPEED["MACHINES"]["GB10"])


def test_a_new_prediction_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        def __init__(self, *_given: object) -> None:
            self.steps: dict[int, object] = {}

        def on(self, _machine: object) -> dict[str, object]:
            return {"fits": False}

    scope = SPEED["compute"].__globals__
    old = {"date": "2000-01-01", "fits": False}
    (tmp_path / "kept.json").write_text(json.dumps({"steps": {}, "predictions": {"Qwen3-4B": {"full": {"T4": [old]}}}}))
    monkeypatch.setitem(scope, "KEPT", tmp_path / "kept.json")
    monkeypatch.setitem(scope, "Predictions", Stub)
    for again, numbers in ((False, [1, 1]), (True, [2, 1]), (True, [2, 1])):
        SPEED["compute"](["Qwen3-4B"], ["full"], ["T4", "L4"], again=again)
        found = SPEED["kept"]()["predictions"]["Qwen3-4B"]["full"]
        assert found["T4"][0] == old
        assert [len(found[machine]) for machine in ("T4", "L4")] == numbers


@pytest.mark.slow
def test_a_predicted_cell_is_that_of_the_planner(tmp_path: Path) -> None:
    """On two GPUs, where the step of one is taken for each of them."""
    predictions, machine = SPEED["Predictions"]("Qwen3-0.6B", "LoRA", tmp_path), SPEED["MACHINES"]["2 × RTX 4090"]
    entry = predictions.on(machine)
    known = SPEED["asked"]("Qwen3-0.6B", "LoRA", entry["sequences_per_gpu"], machine, tmp_path)
    task = task_of(known, machine.hardware, model_of(known, None), known.batch, known.seq)
    assert entry["seconds"] == pytest.approx(solve(task).seconds.step, rel=1e-3)
    assert entry["seconds"] >= max(entry["bound_seconds"].values())

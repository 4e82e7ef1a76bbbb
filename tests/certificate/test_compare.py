"""`python -m tests.certificate.compare`: what it says of another library, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.certificate.compare import main

CASES = "tests.support.verify_cases"


def test_a_peer_is_told_what_it_does_not_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    given = ("ddp", "--json", "--steps", "2", "--module", f"{CASES}:scaled", "--script", str(script))
    code = main(given)
    answer = json.loads(capsys.readouterr().out)
    assert (code, answer["with"], answer["script"]) == (1, "ddp", str(script))
    first = next(check for check in answer["checks"] if not check["ok"])
    assert answer["first"] == first["where"]
    assert "as if multiplied by the 2 ranks" in first["where"]
    assert answer["not_done"]["weights read from a folder"] == "it wraps a model that is there"
    assert {"bf16 compute", "quantized base"} < set(answer["not_done"])
    assert "from tests.support.verify_cases import scaled" in script.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fsdp3", "--module", f"{CASES}:sound"), "did you mean 'fsdp2'?"),
        (("ddp", "--module", f"{CASES}:sound", "--compute-dtype", "bf16"), "--compute-dtype bf16: not done by ddp: "),
        (("hf-ep", "--hf", "/any", "--lora", "r=8,q_proj"), "--lora: not done by hf-ep: "),
        (("deepspeed", "--module", f"{CASES}:sound"), "DS_BUILD_OPS=0 pip install deepspeed"),
        (("ddp", "--model", "opt-2.7b"), "other libraries have no model of this name"),
        (("ddp", "--module", f"{CASES}:sound", "--script", "/no/such/folder/file"), "there is no folder"),
    ],
)
def test_bad_input_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("elixir_tools.cli.verify.on_ranks", None)
    monkeypatch.setattr("tests.certificate.peers.find_spec", lambda name: None if name == "deepspeed" else name)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err

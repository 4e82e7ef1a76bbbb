"""The proof for GPUs: its steps, its journal, and what it computes from them; a part of it on the CPU."""

import fcntl
import gzip
import json
import os
import select
import socket
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import elixir_moe as em
from benchmarks.proof import __main__ as proof
from benchmarks.proof import build
from benchmarks.proof.bound import bound
from benchmarks.proof.plan import compared, trace_wanted
from benchmarks.proof.steps import FAILED, GOOD, LEFT_OUT, OVER_LIMIT, Journal, Step, run
from benchmarks.proof.table import _HEAD
from benchmarks.proof.trace import summary
from elixir_moe import _native
from elixir_moe.kernels import cpu_features
from tests.support.every import every

ROOT = Path(__file__).parents[3]


def shell(name: str, script: str, seconds: float = 60.0, **options: Any) -> Step:
    return Step(name=name, command=("/bin/sh", "-c", script), seconds=seconds, **options)


def told(**figures: Any) -> str:
    return f"echo 'figures: {json.dumps(figures)}'"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A proof of the steps that a test names; the machine is what `device` says."""
    plan: dict[str, Any] = {"device": None, "steps": []}
    directory = Path.cwd()
    monkeypatch.setattr(
        proof, "build_step", lambda *_: shell("build", told(device=plan["device"], library="fake", lacks=[]))
    )
    monkeypatch.setattr(proof, "steps", lambda *_: plan["steps"])
    monkeypatch.setattr(proof, "HERE", tmp_path / "here")
    monkeypatch.delenv("OUT", raising=False)
    yield plan
    os.chdir(directory)


def called(tmp_path: Path, *arguments: str) -> int:
    return proof.main(["--out", str(tmp_path / "out"), *arguments])


def test_a_second_call_runs_what_has_no_good_result(fake: dict[str, Any], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    fake["steps"] = [
        shell("good", f"echo good >>{runs}; {told(x=1)}"),
        shell("killed", f"echo killed >>{runs}; test -e {tmp_path}/met || {{ touch {tmp_path}/met; kill -9 $$; }}"),
        shell("absent", told(left_out="needs 3 GiB, 2 GiB are free")),
    ]
    assert called(tmp_path) == 1
    found = Journal(tmp_path / "out" / "results.jsonl", None).results
    assert [found[name]["outcome"] for name in ("good", "killed", "absent")] == [GOOD, FAILED, LEFT_OUT]
    assert found["killed"]["exit"] == -9
    assert found["good"]["figures"] == {"x": 1}
    assert {result["status"] for result in found.values()} == {"not measured (no GPU)"}
    assert called(tmp_path) == 0
    assert called(tmp_path) == 0
    assert runs.read_text().split() == ["good", "killed", "killed"]
    assert called(tmp_path, "--fresh") == 0
    assert runs.read_text().split() == ["good", "killed", "killed", "good", "killed"]


def test_a_result_that_was_cut_off_or_is_of_another_machine_is_none(fake: dict[str, Any], tmp_path: Path) -> None:
    runs, journal = tmp_path / "runs", tmp_path / "out" / "results.jsonl"
    fake["steps"] = [shell("a", f"echo a >>{runs}"), shell("b", f"echo b >>{runs}")]
    assert called(tmp_path) == 0
    journal.write_bytes(journal.read_bytes()[:-9])  # as if the machine had gone down while b's result was written
    assert called(tmp_path) == 0
    assert runs.read_text().split() == ["a", "b", "b"]
    fake["device"] = "a GPU"
    assert called(tmp_path) == 0
    assert runs.read_text().split() == ["a", "b", "b", "a", "b"]
    page = (tmp_path / "out" / "proof.md").read_text()
    fake["device"] = None
    assert called(tmp_path) == 0
    assert runs.read_text().split() == ["a", "b", "b", "a", "b"]
    assert "| a | good |" in page and "| measured |" in page and "not measured" not in page


def test_a_new_folder_goes_on_from_the_results_that_lie_here(fake: dict[str, Any], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    fake["steps"] = [shell("a", f"echo a >>{runs}")]
    assert proof.main(["--out", str(tmp_path / "here")]) == 0
    assert called(tmp_path) == 0
    assert runs.read_text().split() == ["a"]


def test_results_that_were_carried_here_are_gone_on_from(
    fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing is kept between calls: the option brings them in, and the folder takes them out."""
    runs, carried = tmp_path / "runs", tmp_path / "carried.jsonl"
    fake["steps"] = [shell("a", f"echo a >>{runs}")]
    assert called(tmp_path) == 0
    (tmp_path / "out" / "results.jsonl").rename(carried)
    fake["steps"].append(shell("b", f"echo b >>{runs}"))
    assert called(tmp_path, "--results", str(carried)) == 0
    assert runs.read_text().split() == ["a", "b"]
    assert set(Journal(tmp_path / "out" / "results.jsonl", None).results) == {"build", "a", "b"}
    with pytest.raises(SystemExit):
        called(tmp_path, "--results", str(tmp_path / "none"))
    assert "none: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize(("resolves", "said", "found"), [(True, "", None), (False, "", "lo"), (False, "eth7", None)])
def test_ranks_meet_on_a_host_that_cannot_resolve_its_own_name(
    resolves: bool, said: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: Any) -> list[Any]:
        if not resolves:
            raise socket.gaierror("no such name")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if said:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", said)
    assert proof._network().get("GLOO_SOCKET_IFNAME") == found


def test_a_step_beyond_its_limit_is_killed_with_its_children(fake: dict[str, Any], tmp_path: Path) -> None:
    fake["steps"] = [shell("hangs", "sleep 3600 & echo last words of $!; wait", seconds=1.0)]
    assert called(tmp_path) == 1
    found = Journal(tmp_path / "out" / "results.jsonl", None).results["hangs"]
    assert found["outcome"] == OVER_LIMIT and "last words of" in found["tail"]
    assert "last words of" in (tmp_path / "out" / "proof.md").read_text()
    assert ended(int(found["tail"].split()[-1]))


def ended(pid: int) -> bool:
    """Whether a process that was killed ends; the kernel may take a moment."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 60)[0])
    finally:
        os.close(handle)


def test_what_has_no_time_left_is_said_and_run_by_the_next_call(
    fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake["steps"] = [shell("long", told(x=1))]
    assert called(tmp_path, "--seconds", "5") == 3
    assert "no time was left for long: call again" in capsys.readouterr().out
    assert called(tmp_path) == 0


def test_what_is_not_there_is_said(fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake["steps"] = [shell("good", told(x=1))]
    assert called(tmp_path, "--only", "goood") == 2
    assert "no step has one of ['goood'] in its name" in capsys.readouterr().err
    assert called(tmp_path, "--wheels", str(tmp_path / "wheels")) == 0


def test_two_calls_do_not_share_a_folder(
    fake: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "log.txt").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert called(tmp_path) == 2
    assert "another call is at work" in capsys.readouterr().err
    assert called(tmp_path) == 0


def test_a_step_that_lacks_a_package_starts_no_process(tmp_path: Path) -> None:
    result = run(shell("none", f"touch {tmp_path}/ran", left_out="x is not installed"), tmp_path / "log", 1.0)
    assert (result["outcome"], result["figures"]) == (LEFT_OUT, {"left_out": "x is not installed"})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("ours", "peer", "wanted"), [(9.0, 6.1, True), (9.0, 5.9, False), (8.0, 1.0, True)])
def test_a_trace_is_wanted_where_ours_misses_what_it_should_reach(
    ours: float, peer: float, wanted: bool, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "results.jsonl", None)
    # the bound is 0.08 s: 9 tokens a second reach 90% of it, 8 reach 80%
    of_ours = row(10**9, 10**9, 16 * 10**9) | {"seconds": 0.8 / ours, "tokens_per_second": ours, "losses": [2.0, 1.0]}
    of_peer = of_ours | {"seconds": 1.0, "tokens_per_second": peer, "losses": [2.0, 1.01]}
    found = {"rates": RATES, "bench gpt2-4b ours x1": of_ours, "bench gpt2-4b fsdp2-offload x1": of_peer}
    for name, figures in found.items():
        journal.add({"step": name, "outcome": GOOD, "figures": figures})
    assert trace_wanted(journal, "gpt2-4b") == wanted
    against = compared(journal, "gpt2-4b", "fsdp2-offload", 1)
    assert against is not None and against["of_ours"] == peer / ours
    assert against["loss_gap"] == pytest.approx(0.01), "the largest of all steps"


def test_the_command_needs_the_standard_library_alone() -> None:
    code = "import benchmarks.proof.__main__, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_part_of_it_on_the_cpu(tmp_path: Path) -> None:
    """Really run: the build, the machine's rates, decoders, and one contender with its row."""
    only = ["bench gpt2-4b ours x1", "rates", "decoding", "plain gpt2-4b"]
    command = [sys.executable, "-m", "benchmarks.proof", "--out", str(tmp_path), "--fresh", "--only", *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert list(Journal(tmp_path / "results.jsonl", None).results) == ["build", *only], "not in the order of --only"
    decoders = [
        line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith(("| nf4", "| int8"))
    ]
    assert [float(rate) > 0 for _, *rates in decoders for rate in rates] == [True] * 4
    row = next(line for line in done.stdout.splitlines() if line.startswith("| gpt2-4b |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    of = dict(zip((cell.strip() for cell in _HEAD), cells, strict=True))
    assert of["contender"] == "ours" and of["limited by"] in ("compute", "PCIe", "host Adam")
    assert of["status"] == "not measured (no GPU)"
    assert float(of["of ours"]) == 1 and float(of["loss gap"]) == 0
    assert every(float(of[name]) > 0 for name in ("tokens/s", "s/step", "expected s", "host GiB", "bound s"))


def built(tmp_path: Path) -> dict[str, Any]:
    """The figures of a build with this environment's packages but not its library, nor anything that compiles it."""
    (tmp_path / "none").mkdir(exist_ok=True)
    (tmp_path / "none" / "scikit_build_core.py").write_text("raise ImportError('not here')")
    path = [str(tmp_path / "none"), str(ROOT), sysconfig.get_path("purelib")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    base = str(Path(sys.base_prefix) / "bin" / "python3")  # it reads no .pth file of this environment
    command = [base, "-m", "benchmarks.proof.build", str(tmp_path / "site"), str(tmp_path / "wheels")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1].removeprefix("figures: "))
    return figures


def make_wheel(folder: Path) -> None:
    """A wheel of the library as it is here, with the native part of this environment."""
    name = f"elixir_moe-{em.__version__}"
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in build._sources()}
    files["elixir_moe/" + Path(_native.__file__).name] = Path(_native.__file__).read_bytes()
    files[f"{name}.dist-info/METADATA"] = (
        f"Metadata-Version: 2.1\nName: elixir-moe\nVersion: {em.__version__}\n".encode()
    )
    files[f"{name}.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n"
    files[f"{name}.dist-info/RECORD"] = "".join(f"{file},,\n" for file in files).encode()
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)


@pytest.mark.slow
def test_where_the_library_comes_from_without_an_index(tmp_path: Path) -> None:
    """A wheel of the same sources, and without one the source tree."""
    (tmp_path / "wheels").mkdir()
    found = built(tmp_path)
    assert (found["library"], found["kernel"]) == ("this tree, without its native part", "torch")
    make_wheel(tmp_path / "wheels")
    found = built(tmp_path)
    assert (found["library"], found["kernel"]) == ("from a wheel of this tree", cpu_features())
    (tmp_path / "site" / "mark").touch()
    assert built(tmp_path) | {"host GiB free": 0} == found | {"host GiB free": 0}
    assert (tmp_path / "site" / "mark").exists(), "nothing has changed, and it was made again"


def test_a_wheel_of_other_sources_is_not_used(tmp_path: Path) -> None:
    make_wheel(tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert build._is_of_this_tree(wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("elixir_moe/former.py", "")
    assert not build._is_of_this_tree(wheel)


RATES = {"matmul_flops": 1e12, "up_bytes_per_second": 1e9, "host_adam_parameters_per_second": 1e8}
PLAIN = {"layers": 2, "seconds": 3.0, "layer_seconds": 0.5}


def row(parameters: int, trained: int, device_bytes: int) -> dict[str, Any]:
    sizes = {"parameters": parameters, "trained": trained, "active": parameters, "active_trained": trained}
    return sizes | {
        "tokens": 10,
        "micro_batches": 1,
        "recomputes": 1,
        "device_bytes": device_bytes,
        "activation_bytes": 0,
    }


@pytest.mark.parametrize(
    ("of", "seconds", "what"),
    [
        # all at home on the device: 8 M D flops
        (row(10**9, 10**9, 16 * 10**9), 8 * 1e9 * 10 / 1e12, "compute"),
        # 8e9 bytes too many are 5e8 parameters: 2 s of PCIe at 2 bytes each, up twice; 5 s of Adam
        (row(10**9, 10**9, 8 * 10**9), 5.0, "host Adam"),
        # frozen: 6 M D flops, and 5e8 of 1e9 parameters come twice in each micro-batch
        (row(10**9, 0, 10**9), 2.0, "PCIe"),
        (row(10**9, 0, 10**9) | {"micro_batches": 3}, 6.0, "PCIe"),
        (row(10**9, 0, 2 * 10**9) | {"activation_bytes": 10**9}, 2.0, "PCIe"),
        (row(10**9, 0, 2 * 10**9), 6 * 1e9 * 10 / 1e12, "compute"),
    ],
)
def test_the_bound_is_the_longest_of_what_must_be_done(of: dict[str, Any], seconds: float, what: str) -> None:
    assert bound(RATES, of) == (pytest.approx(seconds), what)


def test_the_bound_of_compute_is_that_of_plain_torch() -> None:
    """The shallow model, and each of its further layers, in every micro-batch."""
    of = row(10**9, 10**9, 16 * 10**9) | {"layers": 10, "micro_batches": 3}
    assert bound(RATES, of, PLAIN) == (pytest.approx(3 * (3.0 + 8 * 0.5)), "compute")


def test_the_summary_of_a_trace_adds_up(tmp_path: Path) -> None:
    def event(cat: str, name: str, begin: float, end: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": 1000 + begin, "dur": end - begin}

    events = [
        event("user_annotation", "proof: step", 0, 10_000),
        event("kernel", "gemm", 1_000, 3_000),
        event("kernel", "gemm", 2_000, 4_000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 3_000, 6_000),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 5_000, 7_000),
        event("cuda_runtime", "cudaStreamSynchronize", 7_000, 9_500),
        event("cpu_op", "aten::mm", 0, 500),
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "name": "a span of the profiler", "ts": 0, "dur": 20_000},
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert summary(path) == [
        "the step takes 10.0 ms",
        "kernels run for 3.0 ms",
        "HtoD copies run for 3.0 ms; no kernel hides 2.0 ms of it",
        "DtoH copies run for 2.0 ms; no kernel hides 2.0 ms of it",
        "the GPU does nothing for 4.0 ms",
        "its longest pause is 3.0 ms, 7.0 ms after the begin, in cudaStreamSynchronize",
        "the host waits in 1 cudaStreamSynchronize for 2.5 ms",
    ]

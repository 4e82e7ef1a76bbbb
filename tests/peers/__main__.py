"""The tests of peers with this library in the place of the plain class: ``python -m tests.peers FOLDER``.

Owns the comparison with the lists beside this file. A list has the names of the tests that pass with the plain class: a
name alone passes here too, and behind " | " stand words of the error that refuses it. Their sources are fetched by hand
beforehand; nothing of them is kept here.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
UNSTABLE = "tests/test_accelerator.py::AcceleratorTester::test_free_memory_dereferences_prepared_components"
"""This test compares the free memory of the machine, which other processes change."""
FETCH = """test-peers wants a folder with the sources of the peers' tests, fetched by hand:

    mkdir peers
    git clone https://github.com/huggingface/accelerate peers/accelerate
    git -C peers/accelerate checkout 16cb6eb8
    make test-peers PEERS=peers

They need the package parameterized beside what `make setup` installs.
"""


def expected(name: str) -> dict[str, str]:
    """The tests of a list, each with words of the error that refuses it, or with nothing."""
    lines = (line.split(" | ", 1) for line in (HERE / f"{name}.txt").read_text().splitlines() if line)
    return {test: "".join(words) for test, *words in lines}


def outcomes(source: Path, plugin: str, files: list[str]) -> dict[str, tuple[bool, str]]:
    """Runs files of a peer's tests with a plugin; returns whether each test passed, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "outcomes")
        found.touch()
        given = {"PEERS_OUTCOMES": str(found), "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", "--tb=short", *files]
        command += ["--deselect", UNSTABLE]
        subprocess.run(command, cwd=source, env={**os.environ, **given, "CUDA_VISIBLE_DEVICES": ""}, check=False)
        rows = [json.loads(line) for line in found.read_text().splitlines()]
        return {test: (passed, said) for test, passed, said in rows}


def differences(wanted: dict[str, str], found: dict[str, tuple[bool, str]]) -> list[str]:
    """A line for each test that did otherwise than its list says."""
    lines = [f"{test}: not in the list" for test in found.keys() - wanted.keys()]
    for test, words in wanted.items():
        passed, said = found.get(test, (None, ""))
        if passed is None:
            lines.append(f"{test}: did not run")
        elif passed == bool(words):
            lines.append(f"{test}: {'passed, is listed as refused' if passed else 'failed, is listed as passing'}")
        elif words not in said:
            lines.append(f"{test}: expected the error {words!r}, found another")
    return sorted(lines)


def main(arguments: list[str]) -> int:
    """Runs all suites; returns the exit code."""
    if len(arguments) != 1 or not arguments[0]:
        print(FETCH)
        return 2
    source = Path(arguments[0], "accelerate")
    if not (source / "tests").is_dir():
        print(f"{source} has no folder 'tests'\n\n{FETCH}")
        return 2
    wanted = expected("accelerate")
    files = sorted({test.partition("::")[0] for test in wanted})
    found = differences(wanted, outcomes(source.resolve(), "with_accelerator", files))
    print("\n".join(found) or f"{len(wanted)} tests of accelerate did what the list says")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

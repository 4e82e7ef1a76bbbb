"""The tests of peers with this library in the place of the plain class: ``python -m tests.peers FOLDER``.

Owns the comparison with the lists beside this file, one for each peer. A list has names of tests that pass with the
plain class: a name alone passes here too, and behind " | " stand words of the error that refuses it. Tests that measure
the machine are left out. The sources are fetched by hand beforehand; nothing of them is kept here.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PLUGINS = {"accelerate": "with_accelerator", "fabric": "with_strategy", "peft": "with_wrap"}
"""The plugin beside this file that puts the library into each peer's tests."""
FETCH = """test-peers wants a folder with the sources of the peers' tests, fetched by hand:

    mkdir peers
    git clone https://github.com/huggingface/accelerate peers/accelerate
    git -C peers/accelerate checkout 16cb6eb8
    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning peers/fabric
    find peers/fabric/tests/tests_fabric -name '*.py' -exec sed -i 's/lightning[.]fabric/lightning_fabric/g' {} +
    git clone --branch v0.20.0 https://github.com/huggingface/peft peers/peft
    make test-peers PEERS=peers

They need the packages parameterized, diffusers and scikit-learn beside what `make setup` installs. A folder with some
of the peers runs these alone.
"""


def expected(name: str) -> dict[str, str]:
    """The tests of a list, each with words of the error that refuses it, or with nothing."""
    lines = (line.split(" | ", 1) for line in (HERE / f"{name}.txt").read_text().splitlines() if line)
    return {test: "".join(words) for test, *words in lines}


def outcomes(source: Path, plugin: str, wanted: list[str]) -> dict[str, tuple[bool, str]]:
    """Runs tests of a peer with a plugin; returns whether each of them passed, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        found, names = Path(folder, "outcomes"), Path(folder, "wanted")
        found.touch()
        names.write_text("\n".join(wanted))
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        given = {"PEERS_OUTCOMES": str(found), "PEERS_WANTED": str(names), "PYTHONPATH": paths}
        given |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "reporting", "-p", plugin, "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, "--rootdir", ".", "--tb=short", *sorted({n.partition("::")[0] for n in wanted})]
        subprocess.run(command, cwd=source, env={**os.environ, **given}, check=False)
        rows = [json.loads(line) for line in found.read_text().splitlines()]
        return {test: (passed, said) for test, passed, said in rows}


def differences(wanted: dict[str, str], found: dict[str, tuple[bool, str]]) -> list[str]:
    """A line for each test that did otherwise than its list says."""
    lines = []
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
    """Runs the suites whose sources are there; returns the exit code."""
    sources = {name: Path(*arguments[:1], name).resolve() for name in PLUGINS}
    there = [name for name, source in sources.items() if (source / "tests").is_dir()]
    if len(arguments) != 1 or not arguments[0] or not there:
        print(FETCH)
        return 2
    said, failed = [], False
    for name in there:
        wanted = expected(name)
        found = differences(wanted, outcomes(sources[name], PLUGINS[name], list(wanted)))
        refused = sum(map(bool, wanted.values()))
        done = f"{len(wanted)} tests did what the list says: {len(wanted) - refused} pass, {refused} are refused"
        said += [f"{name}: {line}" for line in found or [done]]
        failed = failed or bool(found)
    print("\n".join(said))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

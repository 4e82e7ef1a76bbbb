"""`python -m benchmarks.proof.build SITE [WHEELS]`: makes the library importable, and looks at the machine.

Owns where the library comes from. Without WHEELS the environment must have it (`make setup`). With WHEELS, a folder
that may be empty, nothing is fetched: what this Python lacks comes from there. The library comes, in this order,

1. from a wheel in WHEELS whose Python files are those of this tree;
2. from a build of this source tree, if scikit-build-core, nanobind and CMake are installed;
3. from the source tree as it is: everything works, but updates in host memory run several times slower.

SITE goes in front of PYTHONPATH (`path_of`); it is rebuilt when a file that it was made from has changed.
"""

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from benchmarks.proof.steps import tell

ROOT = Path(__file__).parents[2]
PACKAGES = ("elixir_moe", "elixir_tools")
_LOOK = """
import importlib.util, json, os, sys, torch
from elixir_moe.kernels import cpu_features
from elixir_moe.memory.slabs import host_bytes_left
there = torch.cuda.is_available()
print(json.dumps({
    "device": torch.cuda.get_device_name(0) if there else None,
    "device GiB": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if there else None,
    "capability": torch.cuda.get_device_capability(0) if there else None,
    "host GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    "host GiB free": round(host_bytes_left() / 2**30, 1),
    "cores": len(os.sched_getaffinity(0)),
    "torch": torch.__version__,
    "kernel": cpu_features(),
    "lacks": [n for n in ("blake3", "deepspeed", "transformers", "xdist") if importlib.util.find_spec(n) is None],
}))
"""


def main() -> int:
    """Builds, looks and tells."""
    site, wheels = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
    library = "as installed" if wheels is None else _bring(site, wheels)
    found = subprocess.run(
        [sys.executable, "-c", _LOOK],
        env=os.environ | path_of(None if wheels is None else site),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if found.returncode:
        print("the library cannot be imported: run `make setup`, or give --wheels a folder with what is missing")
        return 1
    tell(json.loads(found.stdout) | {"library": library, "python": platform.python_version()})
    return 0


def path_of(site: Path | None) -> dict[str, str]:
    """The environment in which the library in `site`, or else the installed one, is found before this tree."""
    said = os.environ.get("PYTHONPATH")
    path = [*([str(site)] if site else []), str(ROOT), *([said] if said else [])]
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}


def _bring(site: Path, wheels: Path) -> str:
    """Fills `site`, unless an earlier call did from the same files; says where the library comes from."""
    stamp, now = site / "stamp.json", _digest(wheels)
    if stamp.exists() and json.loads(stamp.read_text())["of"] == now:
        return str(json.loads(stamp.read_text())["library"])
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    library = _install(site, wheels)
    stamp.write_text(json.dumps({"of": now, "library": library}))
    return library


def _digest(wheels: Path) -> str:
    """The hash of all sources of the library, and of the Python."""
    files = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", *(ROOT / "csrc").iterdir(), *wheels.glob("*.whl")]
    found = hashlib.sha256(sys.version.encode())
    for path in sorted([*files, *_sources()]):
        found.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return found.hexdigest()


def _sources() -> list[Path]:
    """The Python files of the library and its programs."""
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def _install(site: Path, wheels: Path) -> str:
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        module = {"megatron_core": "megatron"}.get(name, name)
        if name != "elixir_moe" and importlib.util.find_spec(module) is None:
            _pip(site, str(wheel))
    mine = [wheel for wheel in wheels.glob("elixir_moe-*.whl") if _is_of_this_tree(wheel)]
    if any(_pip(site, str(wheel)) for wheel in mine):
        return "from a wheel of this tree"
    if _pip(site, "--no-build-isolation", str(ROOT)):
        return "compiled from this tree"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for package in PACKAGES:
        shutil.rmtree(site / package, ignore_errors=True)
    described = site / f"elixir_moe-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: elixir-moe\nVersion: {version}\n")
    return "this tree, without its native part"


def _pip(site: Path, *what: str) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", "--target", str(site)]
    return subprocess.run([*command, *what], check=False).returncode == 0


def _is_of_this_tree(wheel: Path) -> bool:
    """Whether its Python files are those of this tree."""
    here = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in _sources()}
    with zipfile.ZipFile(wheel) as archive:
        there = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    return here == there


if __name__ == "__main__":
    sys.exit(main())

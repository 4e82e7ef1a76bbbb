"""`verify --suite` and `verify --check`: the whole certificate, its file and its page.

Owns what is shown while rows run, and which commit they are of. Decides nothing: `verify/suite` runs and judges rows.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from elixir_moe.errors import ConfigError
from elixir_tools.verify import suite
from elixir_tools.verify.ranks import load_once


def run(known: argparse.Namespace, versions: dict[str, str], out: TextIO) -> int:
    """Prints what the certificate says; returns 1 if a row of it differs or fails, else 0. Raises ConfigError."""
    if known.check is not None:
        content = suite.read(known.check)
    else:
        content = _run_rows(known, versions)
    wrong = [answer for answer in content["rows"] if not answer["ok"]]
    if known.json:
        print(json.dumps(content), file=out)
    else:
        for answer in wrong:
            print(f"{answer['row']}: {answer.get('error') or answer['first']}")
        print(
            f"{len(content['rows']) - len(wrong)} rows are equal, {len(wrong)} differ or fail, "
            f"{len(content['not run'])} have not been run"
        )
    return int(bool(wrong))


def _run_rows(known: argparse.Namespace, versions: dict[str, str]) -> dict[str, Any]:
    missing = [name for name in ("transformers", "peft") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"--suite needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = cores if known.jobs is None else known.jobs
    if jobs < 1:
        raise ConfigError(f"--jobs: expected at least 1, got {jobs}")
    rows = suite.chosen(known.only)
    load_once("transformers", "peft", suite.__name__, *suite.modules_of_families())
    with _shown(len(rows), quiet=known.json or known.quiet) as tell:
        facts = {"versions": versions, "packages": _packages(), "commit": _commit()}
        again = known.only is not None
        try:
            return suite.run_suite(rows, known.out, facts, jobs, tell, again=again, fresh=known.fresh)
        finally:  # whatever ends the run, the page is that of the rows in the file
            if known.out.exists():
                known.out.with_suffix(".md").write_text(suite.page(suite.read(known.out), known.out.name))


def _packages() -> dict[str, str]:
    """Python and every package that is installed beside this one."""
    found = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    return {"python": platform.python_version(), **dict(sorted(found.items(), key=lambda item: item[0].lower()))}


def _commit() -> str:
    """The commit that this checkout is at, and whether files differ from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "of no checkout"

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--", "elixir_moe", "csrc")
    return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")


@contextmanager
def _shown(rows: int, *, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields what is told of each row that has run: a bar on a terminal, a line elsewhere, nothing for `quiet`."""

    def line(answer: dict[str, Any]) -> None:
        verdict = "equal" if answer["ok"] else answer.get("error") or answer["first"]
        print(f"{answer['row']}  {answer['seconds']:.0f} s  {verdict}", file=sys.stderr, flush=True)

    if quiet:
        yield lambda answer: None
    elif not sys.stderr.isatty() or find_spec("rich") is None:
        yield line
    else:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("rows", total=rows)

            def advance(answer: dict[str, Any]) -> None:
                progress.update(task, advance=1, description=answer["row"])
                if not answer["ok"]:
                    progress.console.print(f"{answer['row']}: {answer.get('error') or answer['first']}")

            yield advance

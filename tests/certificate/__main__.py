"""`python -m tests.certificate`: runs the rows of the certificate, writes its file and its page.

Owns what is shown while rows run, and which commit they are of. `suite` runs and judges rows. `--check` says whether a
file is as it was written.
"""

import argparse
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from elixir_moe.errors import ConfigError
from elixir_moe.ext.accelerator import HIDDEN
from elixir_tools.cli.verify import versions_of
from elixir_tools.verify.ranks import PRELOADED, QUIET
from tests.certificate import suite


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what the certificate says; returns 1 if a row of it differs or fails, 2 for a wrong argument, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.certificate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", type=Path, metavar="FILE", help="only whether a certificate is as it was written")
    parser.add_argument("--only", metavar="PATTERN", help="run the rows again whose names match it or begin with it")
    parser.add_argument("--out", type=Path, default=Path("certificate.json"), help="with a page of the same name")
    parser.add_argument("--jobs", type=int, metavar="N", help="rows at a time; by default as many as cores")
    parser.add_argument("--fresh", action="store_true", help="keep nothing of what the file has")
    parser.add_argument("--quiet", action="store_true", help="print only what the certificate says")
    known = parser.parse_args(arguments)
    try:
        content = _run_rows(known) if known.check is None else suite.read(known.check)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    wrong = [answer for answer in content["rows"] if not answer["ok"]]
    for answer in wrong:
        print(f"{answer['row']}: {answer.get('error') or answer['first']}")
    equal, left = len(content["rows"]) - len(wrong), len(content["not run"])
    print(f"{equal} rows are equal, {len(wrong)} differ or fail, {left} have not been run")
    return int(bool(wrong))


def _run_rows(known: argparse.Namespace) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = cores if known.jobs is None else known.jobs
    if jobs < 1:
        raise ConfigError(f"--jobs: expected at least 1, got {jobs}")
    rows = suite.chosen(known.only)
    os.environ |= QUIET | HIDDEN  # libraries read some of it when they are imported, here by the server of all ranks
    modules = ["transformers", "peft", suite.__name__, *suite.modules_of_families()]
    multiprocessing.set_forkserver_preload([*PRELOADED, *modules])
    forkserver.ensure_running()
    with _shown(len(rows), quiet=known.quiet) as tell:
        facts = {"versions": versions_of(), "packages": _packages(), "commit": _commit()}
        again = known.only is not None
        try:
            return suite.run_suite(rows, known.out, facts, jobs, tell, again=again, fresh=known.fresh)
        finally:  # whatever ends the run, the page is that of the rows in the file
            if known.out.exists():
                known.out.with_suffix(".md").write_text(suite.page(suite.read(known.out), known.out.name))


def _packages() -> dict[str, str]:
    """Python and every installed package."""
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
    elif not sys.stderr.isatty():
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


if __name__ == "__main__":
    sys.exit(main())

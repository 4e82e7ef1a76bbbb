"""Code in an interpreter that has imported torch and nothing of the library, without another import of torch.

Owns one process, which forks for each piece of code. The library is imported there for the first time, as by a user's
program.
"""

import json
import subprocess
import sys
from dataclasses import dataclass

_SERVER = """
import json, os, sys, tempfile, traceback
import torch, torch._dynamo, torch.distributed.device_mesh, torch.distributed.tensor, torch.utils._triton

def run(code):
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = run(json.loads(line))
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)  # to finalize Python takes longer than all else
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), err.seek(0)
        print(json.dumps([code, out.read().decode(), err.read().decode()]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How a piece of code ended."""

    returncode: int
    stdout: str
    stderr: str


class Fresh:
    """An interpreter that runs each piece of code in a fork of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str) -> Ended:
        """Runs it; the exit code is 1 if it raises, with the traceback on standard error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        return Ended(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends the interpreter."""
        self._process.kill()
        self._process.communicate()

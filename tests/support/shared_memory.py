"""What is left of the memory that processes of a host share: files under a name, and processes that still have it."""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from elixir_moe.memory.host_mapping import TOKEN_BYTES


def named(token: str) -> list[Path]:
    """Files in /dev/shm that begin with the token that shared memory begins with; another run has another one."""
    found = []
    for path in Path("/dev/shm").iterdir():
        with suppress(OSError):  # of another process: gone by now, or not for reading
            if path.is_file():
                with path.open("rb") as file:
                    found += [path] * (file.read(TOKEN_BYTES).hex() == token)
    return found


def holders(inodes: Iterable[int]) -> set[int]:
    """The processes that map one of these files of shared chunks, or have it open."""
    wanted = {*inodes}
    return {pid for pid in processes() if not wanted.isdisjoint(_held(pid, "/memfd:elixir-moe"))}


def abandoned(before: Collection[str]) -> list[str]:
    """Files in /dev/shm that were not there before, and that no process maps or has open: those of others are.

    Semaphores under Python's own prefix are left out: any killed process of this host may leave some.
    """
    inodes = {}
    new = (name for name in set(os.listdir("/dev/shm")).difference(before) if not name.startswith("sem.mp-"))
    for name in new:
        with suppress(FileNotFoundError):
            inodes[name] = Path("/dev/shm", name).stat().st_ino
    held = {inode for pid in processes() for inode in _held(pid, "/dev/shm/")} if inodes else set[int]()
    return sorted(name for name, inode in inodes.items() if inode not in held and Path("/dev/shm", name).exists())


def sessions_of(leaders: Iterable[int]) -> list[int]:
    """The processes of these sessions that live."""
    wanted, found = {*leaders}, []
    for pid in processes():
        with suppress(ProcessLookupError):
            found += [pid] * (os.getsid(pid) in wanted)
    return found


def processes() -> Iterator[int]:
    """All processes that this one sees."""
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())


def _held(pid: int, begin: str) -> Iterator[int]:
    """The inodes of files that a process maps or has open, if their names begin so; nothing of one that ends."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            *_, inode, name = line.split(maxsplit=5) if "/" in line else (0, "")
            if name.startswith(begin):
                yield int(inode)
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith(begin):
                    yield link.stat().st_ino

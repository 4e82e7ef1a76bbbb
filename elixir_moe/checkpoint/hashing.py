"""The hash of a file: BLAKE2b of 256 bits, of leaves first, so that it keeps up with disks and threads can share it.

Owns its definition. A file is cut into segments of `SEGMENT_BYTES`, a segment into leaves of `LEAF_BYTES`; the last of
each may be shorter. A segment's hash is that of its leaves' hashes one behind the other, the file's that of its
segments' hashes. Leaves are hashed side by side (csrc/blake2b.*); where nothing was built, hashlib gives the same.
"""

import hashlib
from collections.abc import Iterable

from elixir_moe.kernels import blake2b_each

SEGMENT_BYTES = 1 << 22
LEAF_BYTES = 1 << 12


def digest_of(data: bytes) -> str:
    """The hash of a text, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def segment_digest(segment: memoryview) -> bytes:
    """The hash of a segment; as much of the work as can be is done without Python's lock."""
    whole = len(segment) // LEAF_BYTES * LEAF_BYTES
    leaves = hashlib.blake2b(blake2b_each(segment[:whole], LEAF_BYTES), digest_size=32)
    if whole < len(segment):
        leaves.update(hashlib.blake2b(segment[whole:], digest_size=32).digest())
    return leaves.digest()


def file_digest(segments: Iterable[bytes]) -> str:
    """The hash of a file, in hexadecimal, from those of its segments."""
    return digest_of(b"".join(segments))

"""The hash of a file: 256-bit BLAKE3, taken by segment so that threads can share the work.

Owns its definition. A file is cut into segments of `SEGMENT_BYTES`, the last of which may be shorter. The hash of the
file is the hash of the concatenated hashes of its segments.
"""

from collections.abc import Iterable

SEGMENT_BYTES = 1 << 22


def segment_digest(segment: bytes | memoryview) -> bytes:
    """The hash of a segment; releases the GIL."""
    from blake3 import blake3  # imported here because only checkpoints need it

    return blake3(segment).digest()


def digest_of(data: bytes) -> str:
    """The hash of `data` in hexadecimal, unsegmented."""
    return segment_digest(data).hex()


def file_digest(segments: Iterable[bytes]) -> str:
    """The hash of a file in hexadecimal, from the hashes of its segments."""
    return digest_of(b"".join(segments))

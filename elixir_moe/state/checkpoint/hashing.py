"""The hash of a file: BLAKE3 of 256 bits, of its segments first, so that threads can share the work.

Owns its definition. A file is cut into segments of `SEGMENT_BYTES`, of which the last may be shorter; its hash is that
of its segments' hashes, one behind the other.
"""

from collections.abc import Iterable

SEGMENT_BYTES = 1 << 22


def segment_digest(segment: bytes | memoryview) -> bytes:
    """The hash of a segment, without Python's lock."""
    from blake3 import blake3  # not before a checkpoint is written or read: nothing else needs it

    return blake3(segment).digest()


def digest_of(data: bytes) -> str:
    """The hash of a text, in hexadecimal."""
    return segment_digest(data).hex()


def file_digest(segments: Iterable[bytes]) -> str:
    """The hash of a file, in hexadecimal, from those of its segments."""
    return digest_of(b"".join(segments))

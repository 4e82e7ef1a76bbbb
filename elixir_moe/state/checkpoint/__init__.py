"""Checkpoints: the whole training state by logical parameter, readable under any other layout.

shard_ranges  which elements of a parameter a rank holds; pure
values        plain Python values as JSON and back; no pickle
manifest      the description of a checkpoint, and its validation
frozen        frozen parameters that are identified by a hash and not saved
held          the elements a rank holds, by logical parameter
rng           random states of each rank
hashing       the hash of a file
tensors       files of tensors: written past the page cache, hashed, and read
storage       a checkpoint directory: complete or absent
save          from shards to files, synchronously or in the background
load          from files to shards of any layout
whole         a checkpoint without a model: whole parameters, other files, other formats
"""

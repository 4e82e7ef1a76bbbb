"""Checkpoints: the whole state of a training by logical parameter, readable under any other layout.

boxes      which part of a parameter a run of elements is; pure
values     plain Python values as JSON and back; no pickle
manifest   what a checkpoint says of itself, and what is believed of it
held       what a rank holds of a training, by logical parameter
chance     random states, each rank's own
hashing    what the hash of a file is
tensors    files of tensors: written around the cache and hashed beside it, and read
storage    how a directory comes to be whole or absent
save       from shards to files, now or beside the training
load       from files to shards of another layout
whole      a checkpoint without a model: whole parameters, other files, other formats
command    `elixir-moe ckpt`
"""

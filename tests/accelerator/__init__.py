"""An accelerator made of threads: a device of torch on which the library's code for GPUs runs without one.

Device memory is out of the host's reach, streams are threads that run operators late, and what is read too early, or
after it was freed, is NaN. `csrc/` is the backend, `build` compiles it, and `device` makes it torch's device "threads"
in the current process.
"""

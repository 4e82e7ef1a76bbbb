"""Machines made of a GPU by its name, a number of them, and a host and a disk in words.

Owns `gpus.json`, the data sheets of GPUs and of the hosts they are sold in, and the assumptions that make a `Hardware`
of one. Nothing here is measured: every figure of such a machine has its origin in `Hardware.origins`.
"""

import json
from dataclasses import asdict, replace
from functools import cache
from importlib import resources
from typing import Any

from elixir_moe.errors import ConfigError, unknown_name
from elixir_moe.ext.hardware import Hardware, Links

REFERENCE = "a100-80g-pcie-x4"
"""The measured machine whose ratios stand in for those of machines that nobody has measured."""
_HOST_RATE = 0.7
"""Part of the peak of host memory that reading and writing at once reach: assumed."""
_ADAM_BYTES = 28
"""Bytes that Adam reads and writes per parameter: gradient and weight of 2, and master and moments of 12 both ways."""
_PEER_RATE = 0.7
"""Part of the rate of a link between GPUs that gathers reach: assumed."""
_THROUGH_HOST = 0.5
"""Gathers between GPUs without such a link cross the host's memory: every byte goes up and down."""
_MOST_WITHOUT_NODE = 8
"""Most GPUs of a workstation."""
DISK_SPEED = 3.0
"""Reads and writes of a disk whose speed is not given, in 1e9 bytes a second: assumed, an NVMe disk."""


@cache
def _sheets() -> dict[str, Any]:
    text = resources.files("elixir_tools.fit").joinpath("gpus.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def names() -> list[str]:
    """The names of all GPUs."""
    return list(_sheets()["gpus"])


def sheet(name: str) -> dict[str, Any]:
    """The record of a GPU in `gpus.json`; raises ConfigError if none has that name, and suggests the nearest."""
    gpus: dict[str, Any] = _sheets()["gpus"]
    if name not in gpus:
        raise unknown_name("GPU", name, gpus)
    found: dict[str, Any] = gpus[name]
    return found


def machine(name: str, gpus: int) -> Hardware:
    """A machine of `gpus` GPUs in the host they are sold in, or a cluster of such nodes.

    Raises:
        ConfigError: no GPU has that name, or its nodes cannot have that many.
    """
    gpu = sheet(name)
    most = gpu.get("node_gpus", _MOST_WITHOUT_NODE)
    if gpus > most and (gpus % most or "network" not in gpu):
        nodes = f"whole nodes, multiples of {most}" if "network" in gpu else f"up to {most} in one host"
        raise ConfigError(
            f"--gpus {gpus}: {name} is known for {nodes}; for another machine write a file, from "
            f"elixir-moe plan --hardware-template {name}"
        )
    members = min(gpus, most)
    host = _host(gpu, members)
    origins = dict.fromkeys(("gpu_bytes", "peak_tflops", "memory_bandwidth"), "data sheet")
    origins |= dict.fromkeys(gpu.get("assumed", ()), "assumed")
    origins["cpu_bytes"] = "assumed" if host["source"].startswith("assumed") else "data sheet"
    origins |= dict.fromkeys(("b_c2g", "b_g2c", "v_g", "v_c", "fitted"), "assumed")
    if members > 1:
        origins["b_g2g"] = "assumed"
    if gpus > most:
        origins["node_bandwidth"] = "data sheet"
    return Hardware(
        name=name,
        gpu_bytes=gpu["gpu_bytes"],
        cpu_bytes=host["cpu_bytes"] * _hosts(host, members),
        gpus_per_node=members,
        peak_tflops=gpu["peak_tflops"],
        memory_bandwidth=gpu["memory_bandwidth"],
        fitted=Hardware.named(REFERENCE).fitted,
        by_gpus={n: _links(gpu, host, n) for n in sorted({1, min(2, members), members})},
        node_bandwidth=gpu["network"] if gpus > most else None,
        peer_to_peer="peer_link" in gpu or most == 1,
        one_memory=_is_one_memory(gpu),
        grouped_kernel=gpu.get("grouped_kernel", False),
        origins=origins,
    )


def _is_one_memory(gpu: dict[str, Any]) -> bool:
    """Whether the GPU has the memory of its host: then the sheet names no host."""
    return "host" not in gpu


def _host(gpu: dict[str, Any], members: int) -> dict[str, Any]:
    """The sheet of the host that so many of the GPU are sold in."""
    if _is_one_memory(gpu):
        return {"source": gpu["source"], "cpu_bytes": gpu["gpu_bytes"], "memory_bandwidth": gpu["memory_bandwidth"]}
    found: dict[str, Any] = _sheets()["hosts"][gpu["host"]]
    if members > found.get("most_gpus", members):
        found = _sheets()["hosts"][found["larger"]]
    return found


def _links(gpu: dict[str, Any], host: dict[str, Any], n: int) -> Links:
    """Rates of n GPUs of one host, by the ratios of the measured machine and the assumptions above."""
    measured = Hardware.named(REFERENCE)
    one, pcie = measured.by_gpus[1], sheet("a100-80gb")["host_link"]
    memory = _HOST_RATE * host["memory_bandwidth"] * _hosts(host, n)
    if _is_one_memory(gpu):  # a copy reads and writes the same memory
        up = down = memory / 2
    else:
        up, down = (gpu["host_link"] * rate / pcie for rate in (one.b_c2g, one.b_g2c))
    peer = _PEER_RATE * gpu["peer_link"] if "peer_link" in gpu else _THROUGH_HOST * up
    return Links(
        b_c2g=round(min(n * up, memory), 1),
        b_g2c=round(min(n * down, memory), 1),
        v_g=round(n * one.v_g * gpu["memory_bandwidth"] / measured.memory_bandwidth, 1),
        v_c=round(memory / _ADAM_BYTES, 2),
        b_g2g=round(n * peer, 1) if n > 1 else None,
    )


def peaks(name: str, gpus: int) -> tuple[float | None, float]:
    """(host link of a GPU, each way; memory of its node's host) by data sheets, in 1e9 bytes a second.

    The link is None where GPU and host have one memory.
    """
    gpu = sheet(name)
    members = min(gpus, gpu.get("node_gpus", _MOST_WITHOUT_NODE))
    host = _host(gpu, members)
    return gpu.get("host_link"), host["memory_bandwidth"] * _hosts(host, members)


def _hosts(host: dict[str, Any], n: int) -> int:
    """Number of such hosts in a node of n GPUs: one, unless each has a fixed number of GPUs."""
    return -(-n // host.get("gpus", n))


def with_host(hardware: Hardware, cpu_bytes: int) -> Hardware:
    """The machine with so much host memory in a node; where that is the GPUs' memory, theirs too."""
    origins = {**hardware.origins, "cpu_bytes": "given"}
    if hardware.one_memory:
        each = cpu_bytes // hardware.gpus_per_node
        whole = each * hardware.gpus_per_node
        return replace(hardware, gpu_bytes=each, cpu_bytes=whole, origins={**origins, "gpu_bytes": "given"})
    return replace(hardware, cpu_bytes=cpu_bytes, origins=origins)


def with_disk(hardware: Hardware, nbytes: int, speed: float | None) -> Hardware:
    """The machine with a disk of so many bytes in a node, read and written at `speed`, in 1e9 bytes a second.

    Without a speed, that of the machine's own disk, or `DISK_SPEED`.
    """
    origins = {**hardware.origins, "disk_bytes": "given"}
    if speed is not None:
        rates = speed, speed
        origins |= dict.fromkeys(("disk_read", "disk_write"), "given")
    else:
        rates = hardware.disk_read or DISK_SPEED, hardware.disk_write or DISK_SPEED
        for key, known in (("disk_read", hardware.disk_read), ("disk_write", hardware.disk_write)):
            if known is None:
                origins[key] = "assumed"
    return replace(hardware, disk_bytes=nbytes, disk_read=rates[0], disk_write=rates[1], origins=origins)


_MEANINGS = {
    "gpu_bytes": "bytes: memory of one GPU",
    "cpu_bytes": "bytes: host memory of one node",
    "gpus_per_node": "GPUs that share a host",
    "peak_tflops": "1e12 operations a second: dense matrix products of one GPU in bf16, by its data sheet",
    "memory_bandwidth": "1e9 bytes a second: memory of one GPU, by its data sheet",
    "node_bandwidth": "1e9 bytes a second: network of one node, each way; leave it out for one node",
    "disk_bytes": "bytes: disks of one node for shards; leave the three lines out without a disk",
    "disk_read": "1e9 bytes a second: all disks of one node",
    "disk_write": "1e9 bytes a second: all disks of one node",
    "peer_to_peer": "whether GPUs of a node reach each other's memory; else gathers cross the host link",
    "one_memory": "whether GPU and host have the same memory; cpu_bytes are then gpu_bytes of all GPUs of a node",
    "grouped_kernel": "whether a fused kernel multiplies all experts at once: compute capability 9 and 10",
    "unit_us": "microseconds: host time that a unit, mostly a layer, adds to a forward and backward",
    "narrow_update": "factor: an update on the host with state in fewer bytes than fp32, over one in fp32",
    "narrow_update_on_device": "factor: the same on the device",
    "fitted": "parts, and nanoseconds: see docs/cost_model.md; keep these until steps are measured",
    "device_efficiency": "0 to 1: part of the peaks that kernels reach",
    "exposed_collectives": "0 to 1: part of gathers and reductions that compute does not hide",
    "host_update_slowdown": "factor: an update in host memory within a step, over Adam by itself",
    "overhead_ns_per_parameter": "nanoseconds a step takes for each gathered parameter",
    "by_gpus": "rates of n GPUs of one node together, by n; numbers between are interpolated",
    "b_c2g": "1e9 bytes a second: host to device",
    "b_g2c": "1e9 bytes a second: device to host",
    "v_g": "1e9 parameters a second: Adam on the devices",
    "v_c": "1e9 parameters a second: Adam on the host",
    "b_g2g": "1e9 bytes a second: between devices, the sum over all of them; none for 1 GPU",
    "origins": "where a figure comes from: measured, data sheet, assumed or given; may be left out",
}
"""{key of a hardware file: unit and meaning}."""


def template(name: str) -> str:
    """A hardware file to edit, with two of these GPUs, and a note with unit and meaning before every key."""
    hardware = with_disk(machine(name, 2 if sheet(name).get("node_gpus", 2) > 1 else 1), 10**12, None)
    network = sheet(name).get("network", 25)
    figures = asdict(
        replace(hardware, node_bandwidth=network, origins={**hardware.origins, "node_bandwidth": "assumed"})
    )

    def noted(part: dict[Any, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in part.items():
            if value is None or key in ("name", "wires"):
                continue
            if key in _MEANINGS:
                out[f"_{key}"] = _MEANINGS[key]
            out[str(key)] = noted(value) if isinstance(value, dict) and key != "origins" else value
        return out

    return json.dumps(noted(figures), indent=2)

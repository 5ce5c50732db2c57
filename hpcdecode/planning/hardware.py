"""What devices can do by their data sheets, for planning without them. Peaks are what the makers print; of these a job
is assumed to reach COMPUTE and BANDWIDTH, which is an assumption to be replaced by a profile where there is one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hpcdecode.errors import UserError

COMPUTE = 0.7  # of the peak, in matrix products of hundreds of tokens
BANDWIDTH = 0.8  # of the peak, in reading weights or KV cache


@dataclass(frozen=True)
class Device:
    """flops: dense bfloat16 with float32 accumulation, per second; 0 where none is given, for R-ranks alone.
    bandwidth: of its memory, bytes per second; memory: bytes, None where it is what the owner has put in. link, host:
    bytes per second one way to others of its kind in a machine, and to the host's memory; 0 where it has none. count:
    of devices that compute as one; flops, bandwidth, memory and host are those of all."""

    name: str
    flops: float
    bandwidth: float
    memory: float | None
    source: str
    link: float = 0.0
    host: float = 0.0
    count: int = 1


_PCIE4, _PCIE5 = 31.5e9, 63e9  # 16 lanes of 16 or 32 GT/s, 128b/130b, one way
_DDR = "channels x 8 bytes x transfer rate, two sockets: "
DEVICES = {
    d.name: d
    for d in (
        Device("a10", 125e12, 600e9, 24e9, "NVIDIA A10 data sheet (2021)", _PCIE4, _PCIE4),
        Device("a100", 312e12, 2039e9, 80e9, "NVIDIA A100 80GB SXM data sheet (2021)", 300e9, _PCIE4),
        Device("h100", 989e12, 3350e9, 80e9, "NVIDIA H100 SXM data sheet (2023), without sparsity", 450e9, _PCIE5),
        Device("h200", 989e12, 4800e9, 141e9, "NVIDIA H200 SXM data sheet (2024), without sparsity", 450e9, _PCIE5),
        Device(
            "rtx3090", 71e12, 936e9, 24e9, "NVIDIA Ampere GA102 white paper, dense, FP32 accumulate", _PCIE4, _PCIE4
        ),
        Device("rtx4090", 165.2e12, 1008e9, 24e9, "NVIDIA Ada white paper, dense, FP32 accumulate", _PCIE4, _PCIE4),
        Device("epyc-7003", 0, 409.6e9, None, f"{_DDR}AMD EPYC 7003, 8 of DDR4-3200"),
        Device("epyc-9004", 0, 921.6e9, None, f"{_DDR}AMD EPYC 9004, 12 of DDR5-4800"),
        Device("xeon-gen3", 0, 409.6e9, None, f"{_DDR}Intel Xeon Scalable, third generation, 8 of DDR4-3200"),
        Device("xeon-gen4", 0, 614.4e9, None, f"{_DDR}Intel Xeon Scalable, fourth generation, 8 of DDR5-4800"),
    )
}


def device(name: str) -> Device:
    """The device of that name, or as many as in 4xa100. UserError for a name that is not in the table."""
    several = re.fullmatch(r"([1-9]\d{0,3})x(.+)", name)
    count, kind = (int(several[1]), several[2]) if several else (1, name)
    if kind not in DEVICES:
        raise UserError(
            f"device: expected one of {', '.join(DEVICES)}, or several as in 4xa100, got {name!r}; or give a --profile"
        )
    one = DEVICES[kind]
    if count == 1:
        return one
    return replace(
        one,
        name=name,
        flops=count * one.flops,
        bandwidth=count * one.bandwidth,
        memory=one.memory and count * one.memory,
        host=count * one.host,
        count=count,
    )

"""What devices can do by their data sheets, for planning without them. Peaks are what the makers print; of these a job
is assumed to reach COMPUTE and BANDWIDTH, which is an assumption to be replaced by a profile where there is one."""

from __future__ import annotations

from dataclasses import dataclass

from hpcdecode.errors import UserError

COMPUTE = 0.7  # of the peak, in matrix products of hundreds of tokens
BANDWIDTH = 0.8  # of the peak, in reading weights or KV cache


@dataclass(frozen=True)
class Device:
    """flops: dense bfloat16 with float32 accumulation, per second; 0 where none is given, for R-ranks alone.
    bandwidth: of its memory, bytes per second; memory: bytes, None where it is what the owner has put in."""

    name: str
    flops: float
    bandwidth: float
    memory: float | None
    source: str


_DDR = "channels x 8 bytes x transfer rate, two sockets: "
DEVICES = {
    d.name: d
    for d in (
        Device("a10", 125e12, 600e9, 24e9, "NVIDIA A10 data sheet (2021)"),
        Device("a100", 312e12, 2039e9, 80e9, "NVIDIA A100 80GB SXM data sheet (2021)"),
        Device("h100", 989e12, 3350e9, 80e9, "NVIDIA H100 SXM data sheet (2023), without sparsity"),
        Device("h200", 989e12, 4800e9, 141e9, "NVIDIA H200 SXM data sheet (2024), without sparsity"),
        Device("rtx3090", 71e12, 936e9, 24e9, "NVIDIA Ampere GA102 white paper, dense, FP32 accumulate"),
        Device("rtx4090", 165.2e12, 1008e9, 24e9, "NVIDIA Ada white paper, dense, FP32 accumulate"),
        Device("epyc-7003", 0, 409.6e9, None, f"{_DDR}AMD EPYC 7003, 8 of DDR4-3200"),
        Device("epyc-9004", 0, 921.6e9, None, f"{_DDR}AMD EPYC 9004, 12 of DDR5-4800"),
        Device("xeon-gen3", 0, 409.6e9, None, f"{_DDR}Intel Xeon Scalable, third generation, 8 of DDR4-3200"),
        Device("xeon-gen4", 0, 614.4e9, None, f"{_DDR}Intel Xeon Scalable, fourth generation, 8 of DDR5-4800"),
    )
}


def device(name: str) -> Device:
    """UserError for a name that is not in the table."""
    if name not in DEVICES:
        raise UserError(f"device: expected one of {', '.join(DEVICES)}, got {name!r}; or give a --profile")
    return DEVICES[name]

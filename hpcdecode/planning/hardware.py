"""What devices can do by their data sheets, for planning without them.

Peaks are what the makers print. Of these a job is assumed to reach COMPUTE_EFFICIENCY and BANDWIDTH_EFFICIENCY. Both
are assumptions; a profile replaces them with measurements. Where a source says how T(B) grows, a device has a curve.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpcdecode.errors import UserError

COMPUTE_EFFICIENCY = 0.7  # of the peak FLOP/s, in matrix products of hundreds of tokens
MEMORY = 0.9  # of a device's, for weights and KV cache: vLLM's gpu_memory_utilization
BANDWIDTH_EFFICIENCY = 0.8  # of the peak bytes/s, in reading weights or KV cache
VECTOR_EFFICIENCY = 0.5  # of the peak FLOP/s of float32 vectors, in recurrences whose states are in cache
NODE_LATENCY = 5e-6  # seconds of a message between devices of a node: assumed


class LinkSpeed(NamedTuple):
    """What is between ranks.

    Attributes:
        bytes_per_second: In and out of a rank.
        latency_seconds: Of one message, one way.
    """

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class EfficiencyCurve:
    """How long token-wise layers take, by their FLOP and by the weights that they read.

    Attributes:
        flop_share: Share of the peak FLOP/s that products of many tokens reach.
        weight_share: Share of the peak bytes/s that reading weights for few tokens reaches.
        power: p of `seconds`; infinite for the longer of the two.
        sum_seconds: Seconds of one sum of several devices that compute as one, beyond its bytes.
        source: Where the figures are from.
    """

    flop_share: float
    weight_share: float
    power: float
    sum_seconds: float
    source: str

    def seconds(self, flop_seconds: float, byte_seconds: float) -> float:
        """Return (f^p + b^p)^(1/p), where f and b are both arguments over their shares.

        Args:
            flop_seconds: Of the FLOP at the peak.
            byte_seconds: Of reading the weights at the peak.
        """
        flop, read = flop_seconds / self.flop_share, byte_seconds / self.weight_share
        longer = max(flop, read)
        if self.power == float("inf") or not longer:
            return longer
        seconds: float = longer * (1 + (min(flop, read) / longer) ** self.power) ** (1 / self.power)
        return seconds


ROOFLINE = EfficiencyCurve(COMPUTE_EFFICIENCY, BANDWIDTH_EFFICIENCY, float("inf"), 0.0, "assumed")
LAMINA_A100 = EfficiencyCurve(
    0.54, 0.35, 2.0, 80e-6, "tuned: fitted to the 12 cells of table 3 of Lamina (Chen et al. 2024), worst 7.2 %"
)


@dataclass(frozen=True)
class Device:
    """A device, or several that compute as one; then all figures but `link_bytes_per_second` are those of all.

    Attributes:
        name: As in DEVICES, with the count before it if there are several.
        flop_per_second: Dense bfloat16 products with float32 accumulation; float32 products where there are none.
        bytes_per_second: Bandwidth of its memory.
        memory_bytes: Size of its memory; None if the owner chooses it.
        source: Where the figures are from.
        link_bytes_per_second: To others of its kind in a machine, one way; 0 if it has no link.
        host_bytes_per_second: To the memory of the host, one way; 0 if it is the host.
        count: Number of devices.
        in_a_node: Devices of a node, which that link connects.
        float_flop_per_second: Of float32 vectors, as recurrent states take them; None for flop_per_second.
        curve: What token-wise layers reach of the peaks.
        cache_share: Share of bytes_per_second that reading the KV cache reaches.
    """

    name: str
    flop_per_second: float
    bytes_per_second: float
    memory_bytes: float | None
    source: str
    link_bytes_per_second: float = 0.0
    host_bytes_per_second: float = 0.0
    count: int = 1
    in_a_node: int = 8
    float_flop_per_second: float | None = None
    curve: EfficiencyCurve = ROOFLINE
    cache_share: float = BANDWIDTH_EFFICIENCY

    @property
    def room(self) -> float:
        """Return the bytes for weights and KV cache; without a memory of its own there is enough for weights."""
        return float("inf") if self.memory_bytes is None else MEMORY * self.memory_bytes

    @property
    def is_host(self) -> bool:
        """Return whether it is a CPU node, and no accelerator beside one."""
        return self.host_bytes_per_second == 0

    @property
    def vector_flop_per_second(self) -> float:
        """Return the peak FLOP/s of float32 vectors."""
        return self.float_flop_per_second or self.flop_per_second


_PCIE4, _PCIE5 = 31.5e9, 63e9  # 16 lanes of 16 or 32 GT/s, 128b/130b, one way
_DDR = "channels x 8 bytes x transfer rate, two sockets"
_HBM = "4 of HBM2e a socket, each 1,024 bits x 3.2 GT/s, used as the only memory; Intel prints no bandwidth"
_CZ120 = "8 Micron CZ120 (2023): 256 GB and 36 GB/s each by the maker's measurement, read by a node of epyc-9004"
_CMM_B = "Samsung CMM-B (2024): a pool of up to 24 TB, 60 GB/s; read by a node of epyc-9004"


def _sockets(
    name: str,
    processor: str,
    cores: int,
    hertz: float,
    flop: int,
    kind: str,
    memory: str,
    bytes_per_second: float,
    vector: int = 0,
) -> Device:
    """Return a node of two sockets: FLOP/s are cores x base clock x FLOP of a core and cycle.

    Args:
        name: As in DEVICES.
        processor: Of both sockets.
        cores: Of a socket.
        hertz: Base clock.
        flop: Of products, of a core and cycle.
        kind: What these are of.
        memory: Channels of a socket.
        bytes_per_second: Of both sockets.
        vector: FLOP of float32 vectors, of a core and cycle; 0 for those of products.
    """
    channels = memory if "HBM" in memory else f"{_DDR}: {memory}"
    source = f"two of {processor}: {cores} cores x {hertz / 1e9:g} GHz x {flop} FLOP of {kind}; {channels}"
    floats = 2 * cores * hertz * vector if vector else None
    return Device(name, 2 * cores * hertz * flop, bytes_per_second, None, source, float_flop_per_second=floats)


def _memory_of(host: Device, name: str, bytes_per_second: float, memory_bytes: float, source: str) -> Device:
    """Return a host whose KV cache lies in another memory than its own."""
    return replace(host, name=name, bytes_per_second=bytes_per_second, memory_bytes=memory_bytes, source=source)


_EPYC_9004 = _sockets("epyc-9004", "AMD EPYC 9654", 96, 2.4e9, 64, "bfloat16, AVX-512", "12 of DDR5-4800", 921.6e9, 32)
_XEON_MAX = _sockets("xeon-max", "Intel Xeon Max 9480", 56, 1.9e9, 1024, "bfloat16, AMX", _HBM, 3276.8e9, 64)

DEVICES = {
    d.name: d
    for d in (
        Device("a10", 125e12, 600e9, 24e9, "NVIDIA A10 data sheet (2021)", _PCIE4, _PCIE4),
        Device("a100", 312e12, 2039e9, 80e9, "NVIDIA A100 80GB SXM data sheet (2021)", 300e9, _PCIE4),
        Device("a100-40g", 312e12, 1555e9, 40e9, "NVIDIA A100 40GB SXM data sheet (2020)", 300e9, _PCIE4),
        Device(
            "a100-pcie",
            312e12,
            1935e9,
            80e9,
            "NVIDIA A100 80GB PCIe data sheet (2021), no NVLink bridge",
            _PCIE4,
            _PCIE4,
            curve=LAMINA_A100,
        ),
        Device("h100", 989e12, 3350e9, 80e9, "NVIDIA H100 SXM data sheet (2023), without sparsity", 450e9, _PCIE5),
        Device("h200", 989e12, 4800e9, 141e9, "NVIDIA H200 SXM data sheet (2024), without sparsity", 450e9, _PCIE5),
        Device(
            "rtx3090", 71e12, 936e9, 24e9, "NVIDIA Ampere GA102 white paper, dense, FP32 accumulate", _PCIE4, _PCIE4
        ),
        Device("rtx4090", 165.2e12, 1008e9, 24e9, "NVIDIA Ada white paper, dense, FP32 accumulate", _PCIE4, _PCIE4),
        Device("rtx4080", 97.5e12, 716.8e9, 16e9, "NVIDIA Ada white paper, dense, FP32 accumulate", _PCIE4, _PCIE4),
        Device("rx7900xtx", 122.8e12, 960e9, 24e9, "AMD RX 7900 XTX specifications (2022), half", _PCIE4, _PCIE4),
        Device(
            "arc-a770",
            137.6e12,
            560e9,
            16e9,
            "Intel Arc A770 16GB (2022): 32 Xe-cores x 16 XMX x 128 FLOP of bfloat16 x 2.1 GHz",
            _PCIE4,
            _PCIE4,
        ),
        _sockets("epyc-7003", "AMD EPYC 7763", 64, 2.45e9, 32, "float32, AVX2", "8 of DDR4-3200", 409.6e9),
        _EPYC_9004,
        _sockets("xeon-gen3", "Intel Xeon 8380", 40, 2.3e9, 64, "float32, AVX-512", "8 of DDR4-3200", 409.6e9),
        _sockets("xeon-gen4", "Intel Xeon 8480+", 56, 2.0e9, 1024, "bfloat16, AMX", "8 of DDR5-4800", 614.4e9, 64),
        replace(_XEON_MAX, memory_bytes=128e9),
        _memory_of(_EPYC_9004, "cxl-cz120", 8 * 36e9, 8 * 256e9, _CZ120),
        _memory_of(_EPYC_9004, "cxl-pool", 60e9, 24e12, _CMM_B),
    )
}


def device(name: str) -> Device:
    """Return the device of that name, or several of them for a name such as 4xa100.

    Raises:
        UserError: If DEVICES does not have it.
    """
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
        flop_per_second=count * one.flop_per_second,
        bytes_per_second=count * one.bytes_per_second,
        memory_bytes=one.memory_bytes and count * one.memory_bytes,
        host_bytes_per_second=count * one.host_bytes_per_second,
        float_flop_per_second=one.float_flop_per_second and count * one.float_flop_per_second,
        count=count,
        in_a_node=max(one.in_a_node // count, 1),
    )

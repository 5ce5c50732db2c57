"""What the kernel says of this process's mappings."""

from __future__ import annotations


def about_mapping(address: int) -> dict[str, str]:
    """Return the values of the mapping that an address lies in, as /proc/self/smaps has them."""
    values: dict[str, str] = {}
    inside = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                inside = address in range(*(int(end, 16) for end in name.split("-")))
            elif inside:
                values[name[:-1]] = rest.strip()
    assert values, "not mapped"
    return values


def resident_bytes(address: int) -> int:
    """Return the bytes in memory of the mapping that an address lies in."""
    return int(about_mapping(address)["Rss"].split()[0]) << 10


def resident() -> int:
    """Return the bytes of this process that lie in memory."""
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("Rss:"))

"""Imports the module that was built for CUDA; without a driver it finds no device. For `make cuda`."""

from __future__ import annotations

from pathlib import Path

import _attn_cuda  # from the build's folder

devices, driver = _attn_cuda.device_count(), Path("/proc/driver/nvidia/version").exists()
print(f"{Path(_attn_cuda.__file__).name}: {devices} devices, {'a' if driver else 'no'} driver")
assert driver or devices == 0, "devices without a driver"
assert _attn_cuda.KvCache and _attn_cuda.LayerShape

"""GPU-aware MPI: a library that sends and receives GPU memory."""

from __future__ import annotations

import ctypes
import os

_SWITCHES = ("MPIR_CVAR_ENABLE_GPU", "MPICH_GPU_SUPPORT_ENABLED")  # MPICH and Cray MPICH: 0 turns it off


def takes_cuda_memory() -> bool:
    """Return whether MPI takes CUDA memory, as `MPIX_Query_cuda_support` of Open MPI and MPICH says."""
    from mpi4py import MPI

    if any(os.environ.get(name) == "0" for name in _SWITCHES):
        return False
    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False

"""How much memory the pools may take when nobody says."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CPU_SHARE = 0.25  # of what the system calls available: the machine is not the runtime's alone
CUDA_SHARE = 0.85  # of what is free on the device: the rest is for activations


def available_bytes(device: torch.device) -> int:
    """Bytes that the pools may take on `device`, measured now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return int(available_host_bytes() * CPU_SHARE)


def available_host_bytes() -> int:
    """Bytes of host memory that the system calls available."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

"""How much memory is free."""

from __future__ import annotations

from pathlib import Path

import torch

_UNKNOWN = 4 * 2**30
"""What is taken to be free where nothing says it."""

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")

_KEPT_SHARE, _MOST_KEPT = 0.125, 4 * 2**30
"""Of what is free, how much one run may keep to save work: others may run beside it."""


def bytes_to_keep(device: str = "cpu") -> int:
    """Bytes of what is quicker to keep than to make again."""
    return min(_MOST_KEPT, int(_KEPT_SHARE * free_bytes(device)))


def free_bytes(device: str = "cpu") -> int:
    """Bytes that can still be had on a device: as the driver says, or Linux and the container's limit."""
    where = torch.device(device)
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    found = [free for free in (_available(), _left_in_container()) if free is not None]
    return max(0, min(found, default=_UNKNOWN))


def _available() -> int | None:
    """What Linux can give without swapping."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _left_in_container() -> int | None:
    """What the control group's limit leaves, None without one."""
    try:
        limit, used = (
            int((_CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # "max" too: no limit
        return None
    return limit - used

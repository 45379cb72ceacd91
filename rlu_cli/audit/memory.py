"""How much memory there is, and how much of it is free."""

from __future__ import annotations

from pathlib import Path

import torch

_UNKNOWN = 4 * 2**30
"""What is taken to be free where nothing says it."""

_NO_MORE = 256 * 2**30
"""What there is taken to be where nothing says it: what needs more is refused."""

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
    limit, used = _of_container("memory.max"), _of_container("memory.current")
    left = None if limit is None or used is None else limit - used
    known = (_meminfo("MemAvailable"), left)
    return max(0, min((free for free in known if free is not None), default=_UNKNOWN))


def total_bytes(device: str = "cpu") -> int:
    """Bytes that a device has, free or not: the same throughout a run."""
    where = torch.device(device)
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[1])
    known = (_meminfo("MemTotal"), _of_container("memory.max"))
    return min((most for most in known if most is not None), default=_NO_MORE)


def _meminfo(name: str) -> int | None:
    """What Linux says: MemAvailable is what it can give without swapping."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _of_container(name: str) -> int | None:
    """The control group's limit or use, None without one."""
    try:
        return int((_CGROUP / name).read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max" too: no limit
        return None

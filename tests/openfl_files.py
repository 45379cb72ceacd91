"""OpenFL's model files, written byte by byte as its ``dump_proto`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

Stage = tuple[dict[int, float], Sequence[int]]
"""What one stage of a pipeline keeps: ``int_to_float`` and ``int_list``."""


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, payload: bytes | int) -> bytes:
    """A field of a message: a number, or bytes with their length."""
    if isinstance(payload, int):
        return _number(number << 3) + _number(payload)
    return _number(number << 3 | 2) + _number(len(payload)) + payload


def named_tensor(name: str, data: bytes, stages: Sequence[Stage], round_number: int = 3) -> bytes:
    """One ``NamedTensor`` in a ``ModelProto``."""
    parts = [field(1, name.encode()), field(2, round_number), field(3, 1), field(5, b"model")]
    for floats, numbers in stages:
        entries = b"".join(
            field(1, field(1, key) + b"\x15" + np.float32(value).tobytes()) for key, value in floats.items()
        )
        packed = b"".join(_number(number) for number in numbers)
        parts.append(field(6, entries + (field(2, packed) if packed else b"")))
    return field(1, b"".join([*parts, field(7, data)]))


def raw_tensor(name: str, array: np.ndarray, **more: int) -> bytes:
    """As NoCompressionPipeline writes it: float32 in C order, its shape as the only stage's metadata."""
    return named_tensor(name, array.astype("<f4").tobytes(), [({}, array.shape)], **more)


def write_openfl(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """A model as ``save/last.pbuf`` holds it, with the optimizer's state among the weights."""
    state = {"__opt_state_0_0_momentum_buffer": np.ones(3), "__opt_group_0_0_lr": np.array([0.1])}
    path.write_bytes(b"".join(raw_tensor(name, array) for name, array in {**arrays, **state}.items()))
    return path

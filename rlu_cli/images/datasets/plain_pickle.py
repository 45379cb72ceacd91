"""Pickles of plain data: lists, dicts, text, numbers and uint8 arrays. No code of a file can run.

The opcodes come from the standard library's disassembler, and this module carries out the few that plain
data needs, on its own objects. No callable is ever looked up and NumPy's own unpickling, which trusts its
input, is not used: a name in the file can only select one of the stand-ins below.
"""

from __future__ import annotations

import math
import pickletools
import warnings
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from rlu_cli.errors import FileError
from rlu_cli.files.text import one_line


class _Name(Enum):
    """What a pickle may name."""

    RECONSTRUCT = "numpy's array maker"
    NDARRAY = "numpy's array type"
    DTYPE = "numpy's dtype"
    ENCODE = "how Python 3 writes bytes in an old protocol"


_NAMES = {
    "numpy.core.multiarray _reconstruct": _Name.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _Name.RECONSTRUCT,
    "numpy ndarray": _Name.NDARRAY,
    "numpy dtype": _Name.DTYPE,
    "_codecs encode": _Name.ENCODE,
}

_INTEGERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4")
_BYTES = ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_TEXT = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_VALUES = frozenset((*_INTEGERS, *_BYTES, *_TEXT))
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_IGNORED = frozenset(["PROTO", "FRAME", "STOP"])


class _Dtype:
    def __init__(self, code: str) -> None:
        self.code = code


class _Array:
    """An array that the pickle made, empty until its state arrives."""

    def __init__(self) -> None:
        self.values: npt.NDArray[np.uint8] | None = None

    def fill(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.code.lstrip("|") != "u1":
            raise ValueError("it holds an array that is not uint8")
        if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError("it holds an array without a proper shape")
        raw = data if isinstance(data, bytes) else data.encode("latin-1")
        if len(raw) != math.prod(shape):
            raise ValueError(f"it holds an array of shape {shape} with {len(raw)} bytes")
        self.values = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


def read_plain_pickle(data: bytes, source: object) -> object:
    """What a pickle of plain data holds. Text of Python 2 is read as latin-1, dict keys always as str.

    Arrays stay wrapped; :func:`array_of` takes them out. `source` is how messages call the file.

    Raises
    ------
    FileError
        Damaged, or it holds anything else.
    """
    machine = _Machine(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in damaged text
            for opcode, argument, _ in pickletools.genops(data):
                machine.step(opcode.name, argument)
        (result,) = machine.stack
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError) as error:
        raise FileError(f"{source}: damaged pickle ({one_line(error)}); download the file again") from error
    return result


def array_of(value: object) -> npt.NDArray[np.uint8] | None:
    """The array in a value from a plain pickle, None where it isn't one."""
    return value.values if isinstance(value, _Array) else None


class _Machine:
    """The pickle stack machine, for plain data."""

    def __init__(self, source: object) -> None:
        self.source = source
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(self._named(argument if name == "GLOBAL" else " ".join(reversed(self._pop(2)))))
        elif name == "REDUCE":
            function, arguments = reversed(self._pop(2))
            stack.append(self._call(function, arguments))
        elif name == "BUILD":
            self._set_state(stack.pop())
        elif name not in _IGNORED:
            self._container(name)

    def _container(self, name: str) -> None:
        """Carry out an opcode that makes or fills a list, tuple or dict."""
        stack = self.stack
        if name == "MARK":
            self.marks.append(len(stack))
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(reversed(self._pop(int(name[-1])))))
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name == "LIST":
            stack.append(self._since_mark())
        elif name == "DICT":
            stack.append(_pairs(self._since_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._since_mark()
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = list(reversed(self._pop(2))) if name == "SETITEM" else self._since_mark()
            _expect(stack[-1], dict).update(_pairs(items))
        else:
            raise self._refusal(f"it has the pickle instruction {name}")

    def _pop(self, count: int) -> list[Any]:
        """The last `count` values, the topmost first."""
        return [self.stack.pop() for _ in range(count)]

    def _since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _named(self, name: str) -> _Name:
        if name not in _NAMES:
            raise self._refusal(f"reading it would use {one_line(name.replace(' ', '.'))}")
        return _NAMES[name]

    def _call(self, function: object, arguments: Any) -> object:
        """What the three known calls give."""
        if function is _Name.RECONSTRUCT and arguments[0] is _Name.NDARRAY:
            return _Array()
        if function is _Name.DTYPE:
            return _Dtype(_expect(arguments[0], str))
        if function is _Name.ENCODE and arguments[1:] in (("latin1",), ("latin-1",)):
            return _expect(arguments[0], str).encode("latin-1")
        raise self._refusal("it makes objects of an unknown kind")

    def _set_state(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, _Array):
            target.fill(state)
        elif not isinstance(target, _Dtype):  # a dtype's state is its byte order: uint8 has none
            raise self._refusal("it makes objects of an unknown kind")

    def _refusal(self, why: str) -> FileError:
        return FileError(
            f"{self.source}: refused, since {why}, and only lists, dicts and uint8 arrays are read from "
            "a pickle: anything more could run code; get the file from its official source"
        )


def _expect(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def _pairs(items: list[Any]) -> dict[str, Any]:
    """Alternating keys and values as a dict; keys of Python 2 text read as bytes become str."""
    keys = [key.decode("latin-1") if isinstance(key, bytes) else _expect(key, str) for key in items[::2]]
    return dict(zip(keys, items[1::2], strict=True))

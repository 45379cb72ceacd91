"""Models built by the user's own code: ``package.module:factory`` and ``path/to/file.py:factory``.

Importing runs that code, so only a spec from the command line may come here (``build_model`` sees to it).
Whatever the code prints on stdout goes to stderr: stdout belongs to the results.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from torch import nn
from torch.nn.parameter import is_lazy

from rlu_cli.errors import FileError, UsageError
from rlu_cli.files.regular import is_file, is_folder
from rlu_cli.models.spec import ModelSpec


def build_user_model(spec: ModelSpec) -> nn.Module:
    """Import the spec's module or file, call its factory with the keyword arguments, check the result.

    The factory may be a function, an ``nn.Module`` subclass or an ``nn.Module`` instance; an instance takes
    no arguments and is copied, so two models of one spec never share weights.
    """
    if spec.factory is None:
        raise UsageError(
            f"{spec.name!r} isn't user code: expected file.py:factory or package.module:factory."
        )
    folder = Path(spec.target).resolve().parent if spec.kind == "file" else Path.cwd()
    with _importable(folder), contextlib.redirect_stdout(sys.stderr):
        if spec.kind == "file":
            with _forgotten_siblings(folder):
                model = _call(spec, _attribute(_import_file(spec.target), spec))
        else:
            model = _call(spec, _attribute(_import_module(spec.target), spec))
    _print_to_stderr(model)
    return model


def _print_to_stderr(model: nn.Module) -> None:
    """Send what the model prints in its forward passes there too; copies of it do the same.

    Copies may pass images in threads, which share the one stdout: the first of them takes it away, and the
    last one puts it back.
    """
    lock, passing = threading.Lock(), 0
    stdout = sys.stdout

    def enter(module: nn.Module, images: object) -> None:
        nonlocal passing, stdout
        with lock:
            if not passing:
                stdout, sys.stdout = sys.stdout, sys.stderr
            passing += 1

    def leave(module: nn.Module, images: object, output: object) -> None:
        nonlocal passing
        with lock:
            passing -= 1
            if not passing:
                sys.stdout = stdout

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)


def _import_file(target: str) -> ModuleType:
    path = Path(target)
    if not is_file(path):
        what = "is a folder" if is_folder(path) else "doesn't exist"
        raise FileError(f"{target} {what}: --arch expected a Python file, as in path/to/file.py:factory.")
    path = path.resolve()
    # Named by the whole path: two files called model.py are two modules.
    name = f"_rlu_user_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise FileError(f"{target} can't be imported as Python code.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses look their own module up
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"Importing {target} failed: {_describe(error, str(path))}") from error
    return module


def _import_module(target: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{target}.".startswith(f"{error.name}."):
            raise UsageError(
                f"Could not import module {target!r}: no module named {error.name!r}. It must be installed "
                "or lie in the current folder; for a single file write path/to/file.py:factory."
            ) from None
        raise UsageError(f"Importing module {target!r} failed: {_describe(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"Importing module {target!r} failed: {_describe(error)}") from error


def _attribute(module: ModuleType, spec: ModelSpec) -> object:
    found: object = module
    for part in str(spec.factory).split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            names = ", ".join(_callables(module)) or "nothing"
            raise UsageError(
                f"{spec.target} has no {spec.factory!r}. What it has that can be called: {names}."
            ) from None
    return found


def _callables(module: ModuleType) -> list[str]:
    """Public callables, without the imported ones when the module defines any itself."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    callables = {name: value for name, value in public.items() if callable(value)}
    own = [name for name, value in callables.items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(own or callables)[:20]


def _call(spec: ModelSpec, factory: object) -> nn.Module:
    if isinstance(factory, nn.Module):
        if spec.kwargs:
            raise UsageError(
                f"{spec.name} is a model already and takes no keyword arguments, got "
                f"{', '.join(spec.kwargs)}."
            )
        return copy.deepcopy(_checked(factory, spec))
    if not callable(factory):
        raise UsageError(
            f"{spec.name} is of type {type(factory).__name__}: expected a function or nn.Module."
        )
    check_keywords(spec.name, factory, spec.kwargs)
    try:
        model = factory(**spec.kwargs)
    except (Exception, SystemExit) as error:
        path = str(Path(spec.target).resolve()) if spec.kind == "file" else None
        raise UsageError(f"Calling {spec.name} failed: {_describe(error, path)}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{spec.name} returned {type(model).__name__}: expected a torch.nn.Module.")
    return _checked(model, spec)


def _checked(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """The model, if all its weights have shapes."""
    lazy = [name for name, weight in model.state_dict(keep_vars=True).items() if is_lazy(weight)]
    if lazy:
        raise UsageError(
            f"{spec.name} has layers that take their shape from the first input ({', '.join(lazy[:3])}): let "
            "it pass a batch of zeros through the model once before it returns the model."
        )
    return model


def check_keywords(name: str, factory: Callable[..., object], kwargs: dict[str, object]) -> None:
    """Raise a UsageError naming the accepted keywords when ``factory`` can't be called with ``kwargs``."""
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # some callables written in C have none
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        accepted = ", ".join(signature.parameters) or "none"
        raise UsageError(f"{name}: {error}. It accepts the keywords {accepted}.") from None


def _describe(error: BaseException, path: str | None = None) -> str:
    """Type and message of an exception from user code, and the innermost line of the user's in it."""
    if isinstance(error, SystemExit):
        return (
            f'it called sys.exit({error.code!r}). Put what a script does behind `if __name__ == "__main__":`.'
        )
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if frame.filename == path or (path is None and "importlib" not in frame.filename)
    ]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put a folder first on sys.path for a while, so that files import their siblings."""
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


@contextlib.contextmanager
def _forgotten_siblings(folder: Path) -> Iterator[None]:
    """Drop from sys.modules what was imported from this very folder meanwhile.

    Another folder's file may have a sibling of the same name; it must get its own. Packages installed below
    the folder (a virtual environment) stay.
    """
    before = set(sys.modules)
    try:
        yield
    finally:
        roots = {name for name in set(sys.modules) - before if "." not in name}
        local = {root for root in roots if _lies_in(sys.modules[root], folder)}
        for name in [name for name in sys.modules if name.partition(".")[0] in local]:
            del sys.modules[name]


def _lies_in(module: ModuleType, folder: Path) -> bool:
    """Whether a top-level module or package is an entry of the folder itself."""
    places = list(getattr(module, "__path__", [])) or [getattr(module, "__file__", None) or ""]
    return any(Path(place).resolve().parent == folder for place in places if place)

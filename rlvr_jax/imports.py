"""User code by name: ``module:function`` in a config."""

import importlib
import importlib.machinery
import os
import sys
from typing import Any


def import_path(path: str) -> Any:
    """What ``module:name`` names, found on the path or in the working directory.

    Raises:
      ImportError, AttributeError: there is no such module or name.
      Exception: whatever the module raises while it is imported.
    """
    module, _, name = path.partition(":")
    # A console script has no '' on its path. Only for the import: the working directory may hold folders ('kernels')
    # that other packages would take for theirs.
    here = os.getcwd()
    sys.path.append(here)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    finally:
        sys.path.remove(here)
    return found


def importable(module: str) -> bool:
    """Whether another process would import the very file that ``module`` is here.

    A module can be loaded without being found by its name: from a notebook, by a test runner, through ``exec``.
    """
    loaded = sys.modules.get(module)
    try:
        spec = find(module)
    except Exception:
        return False
    return spec is not None and (loaded is None or spec.origin == getattr(loaded, "__file__", None))


def find(module: str) -> importlib.machinery.ModuleSpec | None:
    """Where the path or the working directory have ``module``; neither it nor the packages around it are imported."""
    where: Any = None
    spec = None
    for i, part in enumerate(parts := module.split(".")):
        try:
            spec = _find(".".join(parts[:i + 1]), where)
        except KeyError:  # a folder without __init__.py in another: importlib looks for the outer one among what is imported
            spec, where = None, [folder for base in where if os.path.isdir(folder := os.path.join(base, part))]
            continue
        if spec is None:
            return None
        where = list(spec.submodule_search_locations or ())
    return spec


def _find(name: str, where: Any) -> importlib.machinery.ModuleSpec | None:
    search = [*sys.path, os.getcwd()] if where is None else where
    spec = importlib.machinery.PathFinder.find_spec(name, search)
    if spec is not None:
        return spec
    for finder in sys.meta_path:  # editable installs have finders of their own
        if (spec := finder.find_spec(name, where, None)) is not None:
            return spec
    return None

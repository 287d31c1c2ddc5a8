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
    loaded, where = sys.modules.get(module), None
    try:
        for i, _ in enumerate(parts := module.split(".")):
            spec = _find(".".join(parts[:i + 1]), where)
            if spec is None:
                return False
            where = spec.submodule_search_locations
    except Exception:
        return False
    return loaded is None or (spec is not None and spec.origin == getattr(loaded, "__file__", None))


def _find(name: str, where: Any) -> importlib.machinery.ModuleSpec | None:
    search = [*sys.path, os.getcwd()] if where is None else where
    spec = importlib.machinery.PathFinder.find_spec(name, search)
    if spec is not None:
        return spec
    for finder in sys.meta_path:  # editable installs have finders of their own
        if (spec := finder.find_spec(name, where, None)) is not None:
            return spec
    return None

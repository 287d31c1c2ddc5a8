"""From a verifier's name to the function, checked before the first step."""

import inspect
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlvr_jax.imports import import_path, importable
from rlvr_jax.rewards.verdict import Verdict, ok, one_line, unknown, wrong

MOST = 1e9
"""A reward beyond it, either way, cannot be standardised in float32 beside its group's."""
BUILTIN = {name: f"rlvr_jax.rewards.{name}:verify" for name in ("math", "countdown", "knights", "choice", "format")}
Verifier = str | Callable[..., Any]


def resolve(verifier: Verifier) -> Callable[..., Any]:
    """The function behind a name, a ``module:function``, or the callable itself.

    Raises:
      ConfigError: unknown name, module that cannot be imported, missing or not callable attribute.
    """
    if callable(verifier):
        return verifier
    module, colon, function = BUILTIN.get(verifier, verifier).partition(":")
    if not colon:
        raise config_error(f"unknown verifier '{verifier}': use {', '.join(BUILTIN)} or module:function")
    try:
        found = import_path(f"{module}:{function}")
    except ImportError as e:
        raise config_error(f"verifier '{verifier}': cannot import '{module}' ({e}); is it on PYTHONPATH or in the working directory?") from None
    except AttributeError:
        there = [name for name, x in vars(sys.modules[module]).items() if inspect.isfunction(x) and not name.startswith("_")] if module in sys.modules else []
        raise config_error(f"verifier '{verifier}': module '{module}' has no '{function}'{'; it has: ' if there else ''}{', '.join(there)}") from None
    if not callable(found):
        raise config_error(f"verifier '{verifier}' is a {type(found).__name__}, not a function")
    return found


def reference(verifier: Verifier) -> str | None:
    """A name by which a worker process finds the verifier; None for what only this process has.

    Lambdas, closures, bound methods and functions of ``__main__`` (a notebook, a script), or of a module that a fresh
    process would not find, cannot be imported elsewhere.
    """
    if isinstance(verifier, str):
        return verifier
    module, name = getattr(verifier, "__module__", None), getattr(verifier, "__qualname__", "")
    if not module or module == "__main__" or "<" in name:
        return None
    try:
        same = resolve(f"{module}:{name}") is verifier
    except Exception:
        return None
    return f"{module}:{name}" if same and importable(module) else None


def check(verifier: Verifier, fields: Iterable[str] = ()) -> None:
    """Fails before step 0 if the verifier cannot be called with a row's columns.

    Args:
      verifier: a name, ``module:function`` or callable.
      fields: names of the row's further fields, passed by keyword.

    Raises:
      ConfigError: it cannot be found, cannot take ``(text, answer)``, or needs a column that the rows do not have.
    """
    fields = list(fields)
    name = verifier if isinstance(verifier, str) else getattr(verifier, "__qualname__", repr(verifier))
    function = resolve(verifier)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    positional, required = 0, []
    for p in signature.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            positional = 2
        elif p.kind is p.VAR_KEYWORD:
            continue
        elif p.kind is not p.KEYWORD_ONLY and positional < 2:
            positional += 1
        elif p.default is p.empty:
            required.append(p.name)
    missing = [r for r in required if r not in fields]
    if positional < 2 or missing:
        need = f"it requires {missing}, which the rows lack" if missing else "it takes too few positional arguments"
        raise config_error(f"verifier '{name}{signature}' must accept (text, answer, **fields) with fields among {fields}: {need}")


def call(function: Callable[..., Any], text: str, answer: Any, fields: Mapping[str, Any]) -> Verdict:
    """Calls a verifier with the fields it accepts and turns what it returns into a verdict.

    Raises:
      whatever the function raises.
    """
    return as_verdict(function(text, answer, **_accepted(function, fields)))


def verify(task: Verifier, text: str, answer: Any, **fields: Any) -> Verdict:
    """Judges one response in the calling process and thread.

    Args:
      task: math, countdown, knights, choice, format, ``module:function`` or a callable.
      text: the response. Hostile input: bounded, never evaluated.
      answer: the gold answer in the task's form.
      **fields: the row's further fields (``numbers``, ``target``, ``names``, ...); those that a verifier has no use for
        are ignored.

    Returns:
      a verdict; a verifier that raises gives unknown. There is no deadline here: use :class:`rlvr_jax.rewards.Pool`
      for text that nobody has looked at.

    Raises:
      ConfigError: the verifier cannot be found.
    """
    function = resolve(task)
    try:
        return call(function, text, answer, fields)
    except Exception as e:
        return unknown(f"{type(e).__name__}: {e}")


def _accepted(function: Callable[..., Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return dict(fields)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken = {p.name for p in parameters[:2]}
        return {k: v for k, v in fields.items() if k not in taken}
    named = {p.name for p in parameters[2:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {k: v for k, v in fields.items() if k in named}


def as_verdict(result: Any) -> Verdict:
    """bool and number -> ok/wrong, None -> unknown, anything else (NaN, inf, str, list, beyond :data:`MOST`, ...) -> unknown with the reason.

    A number other than 0 counts as ok with that reward, so a penalty below 0 keeps its value; whether the row was
    *correct* is decided by the success threshold, see :func:`combine`.
    """
    if isinstance(result, Verdict):
        if not _usable(result.reward) or result.status not in ("ok", "wrong", "unknown"):
            return unknown(f"verifier returned an unusable verdict {result!r}")
        # Plain types: a reward of NumPy's cannot travel as JSON, and a detail may be anything, of any length.
        return Verdict(float(result.reward) if result.status == "ok" else 0.0, result.status, one_line(str(result.detail or "")))
    if result is None:
        return unknown("verifier abstained")
    if hasattr(result, "item") and getattr(result, "size", 1) == 1:
        result = result.item()
    if not _usable(result):
        return unknown(f"verifier returned {_shown(result)}, expected one finite number (at most {MOST:g} in size), bool, Verdict or None")
    return ok(reward=float(result)) if result else wrong()


def _usable(x: Any) -> bool:
    return isinstance(x, numbers.Real) and abs(float(x)) <= MOST  # False for NaN too


def _shown(x: Any) -> str:
    return f"{x[:50]!r}" if isinstance(x, str | bytes | list | tuple) and len(x) > 50 else repr(x)


def combine(weights: Sequence[Mapping[str, float]], verdicts: Sequence[Verdict],
            threshold: float = 0.5) -> tuple[float, bool, bool]:
    """Weighted sum of the verdicts of one row.

    Args:
      weights: ``[{name: weight}, ...]`` as in the config's ``rewards``.
      verdicts: one per weight, same order.
      threshold: the first component is correct above this reward.

    Returns:
      ``(reward, correct, valid)``. ``correct`` is the first component's alone. A row is valid only if *every* component
      with a non-zero weight is known: a sum with a missing term is a wrong reward, not a smaller one. (0, False, False)
      otherwise.

    Raises:
      ConfigError: no component, or a verdict too many or too few.
    """
    if not weights or len(weights) != len(verdicts):
        raise config_error(f"rewards: {len(weights)} weights for {len(verdicts)} verdicts; a row needs one of each per reward")
    parts = [next(iter(w.values())) for w in weights]
    if verdicts[0].status == "unknown" or any(w and v.status == "unknown" for w, v in zip(parts, verdicts)):
        return 0.0, False, False
    reward = sum(w * v.reward for w, v in zip(parts, verdicts))
    return float(reward), verdicts[0].status == "ok" and verdicts[0].reward > threshold, True


def config_error(message: str) -> ValueError:
    # Imported late: a worker process has no use for the config models.
    from rlvr_jax.config import ConfigError
    return ConfigError(message)

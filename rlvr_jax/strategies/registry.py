"""From names in a config to strategies, with every misfit refused before anything is trained.

Forms of an entry::

  difffilter                                                       a preset at its published setting
  {name: difffilter, low: 0.1}                                     with parameters; {difffilter: {low: 0.1}} is the same
  {select: band, score: solve_rate, low: 0.2, high: 0.8}           an act on a score, parameters of both
  {reweight: softmax, score: advantage_magnitude, tau: 1}
  my_module:my_strategy                                            a function that returns a Strategy (or a Strategy)
  {name: my_module:my_strategy, temperature: 2}
  {chain: [gfpo, per], renormalise: false}                         a chain of its own

Each mapping also takes ``warmup_steps`` and ``every``. Acts and scores may be ``module:function`` too. An installed
package adds names through the entry-point group ``rlvr_jax.strategies``.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

from rlvr_jax.imports import import_path
from rlvr_jax.strategies import mix
from rlvr_jax.strategies.base import Strategy
from rlvr_jax.strategies.check import check
from rlvr_jax.strategies.compose import chain, scheduled
from rlvr_jax.strategies.presets import PRESETS
from rlvr_jax.strategies.reweight import REWEIGHT_ACTS, reweight
from rlvr_jax.strategies.scores import SCORES
from rlvr_jax.strategies.select import SELECT_ACTS, select

ENTRY_POINTS = "rlvr_jax.strategies"
Item = str | Mapping[str, Any] | Strategy | Callable[[], Strategy]


class Entry(NamedTuple):
    """One line of ``rlvr-jax strategies``: ``params`` maps a parameter to its default."""

    name: str
    kind: str
    doc: str
    params: dict[str, Any]
    source: str


def build(items: Iterable[Item], *, groups: bool = True, renormalise: bool = True) -> Strategy:
    """The chain of all entries of a config's ``strategies``.

    Args:
      items: entries in any of the forms above, or Strategy objects, or functions without arguments that return one.
      groups: whether the advantage estimator compares samples of one prompt; without it strategies that do are refused.
      renormalise: bring the product of the weights back to mean 1.

    Returns:
      ``weights, state = s.apply(s.init(), signals)``; ``s.needs_entropy`` says that the sampler must record entropy.

    Raises:
      ValueError: one line: an unknown name with the nearest valid one, a wrong parameter with the valid ones, a score
        that does not fit its act, something that is no strategy.
    """
    if isinstance(items, str | Mapping):
        raise ValueError(f"strategies must be a list, got {items!r}; write [{items!r}]")
    parts = [_checked(item, groups) for item in items]
    whole = chain(*(s for s, _ in parts), renormalise=renormalise)
    return whole._replace(needs=frozenset().union(*(n for _, n in parts)))


def describe() -> list[Entry]:
    """All names a config may use: presets, installed entry points, acts, scores, and the mixers of ``data.mixer``."""
    rows = [_entry(n, "preset", f) for n, f in PRESETS.items()]
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            rows.append(_entry(point.name, "installed", point.load(), source=point.value))
        except Exception as e:  # a broken package must not hide the others
            rows.append(Entry(point.name, "installed", f"cannot be loaded: {_one_line(e)}", {}, point.value))
    for kind, table in (("select", SELECT_ACTS), ("reweight", REWEIGHT_ACTS), ("score", SCORES)):
        rows += [_entry(n, kind, f, skip=1 if kind == "score" else 2) for n, f in table.items()]
    mixers = {"static": mix.static, **mix.DYNAMIC}
    return rows + [_entry(n, "mixer", f)._replace(params=mix.settings_of(n)) for n, f in mixers.items()]


def _entry(name: str, kind: str, f: Any, source: str | None = None, skip: int = 0) -> Entry:
    doc = (inspect.getdoc(f) or "").partition("\n")[0]
    params = {} if isinstance(f, Strategy) else {p: v.default for p, v in _parameters(f, skip).items()}
    return Entry(name, kind, doc, params, source or f"{getattr(f, '__module__', '?')}:{getattr(f, '__name__', name)}")


def _checked(item: Item, groups: bool) -> tuple[Strategy, frozenset[str]]:
    strategy, label = _one(item), _label(item)
    need = check(strategy, label)
    if "groups" in need and not groups:
        raise ValueError(f"strategy {label} compares the samples of a group, and this advantage estimator has no groups; "
                         "use a group estimator (grpo, rloo) or another strategy")
    return strategy, need


def _label(item: Item) -> str:
    if isinstance(item, str):
        return f"'{item}'"
    if isinstance(item, Mapping):
        return "{" + ", ".join(f"{k}: {v}" for k, v in item.items()) + "}"
    return f"'{getattr(item, '__name__', type(item).__name__)}'"


def _one(item: Item) -> Strategy:
    if isinstance(item, Strategy):
        return item
    if isinstance(item, str):
        return _named(item, {})
    if callable(item):
        return _call(item, {}, _label(item))
    if not isinstance(item, Mapping):
        raise ValueError(f"strategies: {item!r} is neither a name nor a mapping; e.g. difffilter or {{name: difffilter, low: 0.1}}")
    entry = dict(item)
    when = {k: _typed(k, entry.pop(k), d) for k, d in (("warmup_steps", 0), ("every", 1)) if k in entry}
    return scheduled(_mapping(entry), **when)


def _mapping(entry: dict[str, Any]) -> Strategy:
    heads = [k for k in ("select", "reweight", "chain", "name") if k in entry]
    if len(heads) == 1:
        head = heads[0]
        value = entry.pop(head)
        if head == "chain":
            return _nested(value, entry)
        if not isinstance(value, str):
            raise ValueError(f"strategies: '{head}' must be a name, got {value!r}")
        return _named(value, entry) if head == "name" else _spelled(head, value, entry)
    if not heads and len(entry) == 1:
        name, params = next(iter(entry.items()))
        if params is None or isinstance(params, Mapping):
            return _one({"name": name, **(params or {})})  # through _one: the schedule may stand inside, too
    raise ValueError(f"strategies: {_label(entry)} needs exactly one of name, select, reweight, chain; "
                     "e.g. {name: difffilter, low: 0.1} or {select: band, score: solve_rate, low: 0.2, high: 0.8}")


def _nested(items: Any, entry: dict[str, Any]) -> Strategy:
    if not isinstance(items, list | tuple):
        raise ValueError(f"strategies: 'chain' must be a list of strategies, got {items!r}")
    _refuse_unknown(entry, {"renormalise": True}, "chain")
    return chain(*map(_one, items), renormalise=_typed("chain: renormalise", entry.get("renormalise", True), True))


def _named(name: str, params: dict[str, Any]) -> Strategy:
    if ":" in name:
        found = _import(name)
    elif name in PRESETS:
        found = PRESETS[name]
    else:
        points = {p.name: p for p in metadata.entry_points(group=ENTRY_POINTS)}
        if name not in points:
            hint = next((f"; '{name}' is an act: write {{{head}: {name}, score: ...}}"
                         for head, table in (("select", SELECT_ACTS), ("reweight", REWEIGHT_ACTS)) if name in table), None)
            raise ValueError(_unknown("strategy", name, [*PRESETS, *points]) + (hint or ""))
        try:
            found = points[name].load()
        except Exception as e:
            raise ValueError(f"strategy '{name}' (entry point {points[name].value}) cannot be loaded: {_one_line(e)}") from e
    return _call(found, params, f"'{name}'")


def _call(f: Any, params: dict[str, Any], label: str) -> Strategy:
    if isinstance(f, Strategy):
        _refuse_unknown(params, {}, label)
        return f
    if not callable(f):
        raise ValueError(f"strategy {label} is a {type(f).__name__}; expected a function that returns rlvr_jax.strategies.Strategy")
    _refuse_unknown(params, _parameters(f), label)
    missing = [p for p, v in _parameters(f).items() if v.default is v.empty and p not in params]
    if missing:
        raise ValueError(f"strategy {label} needs a value for {', '.join(missing)}; it must be a function of its parameters that "
                         "returns a Strategy, e.g. select(score, act)")
    given = _typed_all(f, params, label)
    try:
        result = f(**given)
    except Exception as e:
        raise ValueError(f"strategy {label} fails when it is called: {type(e).__name__}: {_one_line(e)}") from e
    if not isinstance(result, Strategy):
        raise ValueError(f"strategy {label} returned a {type(result).__name__}; expected rlvr_jax.strategies.Strategy, "
                         "e.g. the result of select(score, act), reweight(score, act) or chain(...)")
    return result


def _spelled(head: str, act_name: str, entry: dict[str, Any]) -> Strategy:
    acts, other, others = ((SELECT_ACTS, "reweight", REWEIGHT_ACTS) if head == "select" else (REWEIGHT_ACTS, "select", SELECT_ACTS))
    if act_name in others:
        raise ValueError(f"act '{act_name}' goes with '{other}', not '{head}'; write {{{other}: {act_name}, score: ...}}")
    score_name = entry.pop("score", None)
    if not isinstance(score_name, str):
        raise ValueError(f"{{{head}: {act_name}}} needs a score; one of {', '.join(SCORES)}")
    act, score = _lookup("act", act_name, acts), _lookup("score", score_name, SCORES)
    of_act, of_score = _parameters(act, skip=2), _parameters(score, skip=1)
    label = f"{{{head}: {act_name}, score: {score_name}}}"
    both = sorted(set(of_act) & set(of_score) & set(entry))
    if both:
        raise ValueError(f"{label}: parameter '{both[0]}' belongs to the act and to the score; rename one of them")
    _refuse_unknown(entry, {**of_act, **of_score}, label)
    make = select if head == "select" else reweight
    bound = [partial(f, **_typed_all(f, {k: v for k, v in entry.items() if k in names}, label))
             for f, names in ((score, of_score), (act, of_act))]
    return make(*bound)


def _lookup(what: str, name: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if ":" in name:
        found = _import(name)
        if not callable(found):
            raise ValueError(f"{what} '{name}' is a {type(found).__name__}; expected a function")
        return found
    if name not in table:
        raise ValueError(_unknown(what, name, list(table)))
    return table[name]


def _unknown(what: str, name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    return f"unknown {what} '{name}'; nearest valid one: '{near}' (all: {', '.join(names)}; your own: module:function)"


def _import(path: str) -> Any:
    """``module:name`` as an object.

    Raises:
      ValueError: no such module or name, or the module raises while it is imported.
    """
    try:
        return import_path(path)
    except (ImportError, AttributeError, ValueError) as e:
        raise ValueError(f"strategy '{path}' cannot be imported: {_one_line(e)}") from e
    except Exception as e:
        raise ValueError(f"strategy '{path}': the module fails on import: {type(e).__name__}: {_one_line(e)}") from e


def _parameters(f: Callable[..., Any], skip: int = 0) -> dict[str, inspect.Parameter]:
    """What a config may set: every named parameter after the first ``skip``."""
    try:
        known = inspect.signature(f).parameters
    except ValueError:  # some builtins tell none
        return {}
    named = [p for p in known.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: p for p in named[skip:]}


def _refuse_unknown(params: Mapping[str, Any], valid: Mapping[str, Any], label: str) -> None:
    for key in params:
        if key not in valid:
            names = [*valid, "warmup_steps", "every"]
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
            raise ValueError(f"strategy {label} has no parameter '{key}'; nearest: '{near}' (all: {', '.join(names)})")


def _typed_all(f: Callable[..., Any], params: Mapping[str, Any], label: str) -> dict[str, Any]:
    known = _parameters(f)
    return {k: _typed(f"strategy {label}: {k}", v, known[k].default) for k, v in params.items()}


def _typed(label: str, value: Any, default: Any) -> Any:
    """The value when it is of the default's type (an int may stand for a float, anything for None or no default).

    Raises:
      ValueError: another type, as in ``low: "0.2"``.
    """
    if default is None or default is inspect.Parameter.empty or not isinstance(default, bool | int | float | str):
        return value
    wanted: tuple[type, ...] = (int, float) if type(default) is float else (type(default),)
    if type(value) not in wanted:
        raise ValueError(f"{label} must be a {type(default).__name__}, got {value!r}")
    return value


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split())

"""The table that every comparison starts from: one score per arm, pair and domain, whoever made the runs."""

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Curve(NamedTuple):
    """A learning curve: ``x[X]`` what it had cost so far, ``y[X]`` the accuracy then."""

    x: Sequence[float]
    y: Sequence[float]


class Run(NamedTuple):
    """One run: its arm, what it is paired by (a seed), score by domain, and curves by the unit of their cost."""

    arm: str
    pair: str
    scores: Mapping[str, float]
    curves: Mapping[str, Curve] = {}
    origin: str = ""
    """Where it was read, for an error: 'row 7'."""


class Table(NamedTuple):
    """A arms x P pairs x D domains. ``scores[A, P, D]``; all NaN for a run that is missing.

    ``curves`` by unit: ``x[A, P, X], y[A, P, X]``, shorter curves and missing runs filled with NaN.
    """

    arms: tuple[str, ...]
    pairs: tuple[str, ...]
    domains: tuple[str, ...]
    scores: np.ndarray
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]]


def tabulate(runs: Iterable[Run], incomplete: bool = False) -> Table:
    """Runs as a table; arms and domains in order of appearance, pairs sorted.

    Args:
      runs: any number of them, in any order.
      incomplete: let runs be missing (one that failed): each arm is then compared on the pairs it shares with the baseline.

    Raises:
      ValueError: no run, one arm only, two runs of one arm and pair, other domains than the first run, a score that is
        not finite, or (without ``incomplete``) a pair that lacks an arm.
    """
    found: dict[tuple[str, str], Run] = {}
    for run in runs:
        first = found.setdefault((run.arm, run.pair), run)
        if first is not run:
            raise ValueError(f"two runs of arm '{run.arm}' and pair '{run.pair}'{_places(first, run)}; expected one: leave one out, or choose rows")
        _check_scores(run, tuple(next(iter(found.values())).scores))
    if not found:
        raise ValueError("no runs to compare")
    arms = tuple(dict.fromkeys(arm for arm, _ in found))
    pairs = tuple(sorted({pair for _, pair in found}, key=_numbers_first))
    if len(arms) == 1:
        raise ValueError(f"only one arm, '{arms[0]}'; a comparison needs a baseline and at least one more")
    missing = [(arm, pair) for pair in pairs for arm in arms if (arm, pair) not in found]
    if missing and not incomplete:
        arm, pair = missing[0]
        more = f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else ""
        raise ValueError(f"unpaired: arm '{arm}' has no run of pair '{pair}'{more}; expected every arm in every pair: add the run, or leave that pair or arm out")
    domains = tuple(next(iter(found.values())).scores)
    scores = np.full((len(arms), len(pairs), len(domains)), np.nan)
    for (arm, pair), run in found.items():
        scores[arms.index(arm), pairs.index(pair)] = [run.scores[d] for d in domains]
    return Table(arms, pairs, domains, scores, _stack_curves(found, arms, pairs))


def read_csv(path: str | os.PathLike[str], arm: str, pair: str, scores: Sequence[str], where: Mapping[str, str] | None = None) -> Table:
    """A table of anybody's runs, one a row.

    Args:
      path: CSV file, UTF-8, with a header.
      arm, pair: columns of what is compared and of what it is paired by.
      scores: columns of numbers, a domain each; larger is better.
      where: only rows with this text in that column.

    Raises:
      OSError: the file cannot be read.
      ValueError: a column is missing, no row is left, a score is not a finite number, a row repeats an arm and pair
        (the message names columns that would tell them apart), or what :func:`tabulate` raises.
    """
    where = dict(where or {})
    header, rows = _rows(Path(path))
    for role, column in (("arm", arm), ("pair", pair), *(("scores", s) for s in scores), *(("where", w) for w in where)):
        if column not in header:
            raise ValueError(f"{path} has no column '{column}' (--{role}); it has {', '.join(header)}")
    if not scores or len(set(scores)) < len(scores):
        raise ValueError(f"--scores needs different columns, at least one; got '{','.join(scores)}'")
    for column, value in where.items():
        values = dict.fromkeys(row[column] for _, row in rows)
        rows = [(n, row) for n, row in rows if row[column] == value]
        if not rows:
            raise ValueError(f"{path}: no row with {column}={value}; there it has {_some(list(values))}")
    seen: dict[tuple[str, str], tuple[int, dict[str, str]]] = {}
    runs = []
    for n, row in rows:
        key = row[arm], row[pair]
        if not all(key):
            raise ValueError(f"{path}, row {n}: '{arm if not key[0] else pair}' is empty; expected the name of an arm and of a pair")
        if key in seen:
            raise ValueError(_repeated(path, seen[key], (n, row), (arm, pair), {*scores, *where}))
        seen[key] = n, row
        runs.append(Run(*key, {s: _score(path, n, s, row[s]) for s in scores}, origin=f"row {n}"))
    if not runs:
        raise ValueError(f"{path} has a header but no rows")
    return tabulate(runs)


def _rows(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Header, and (line number, cells) of every row that is not blank."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            if not header:
                raise ValueError(f"{path} is empty; expected a header and one row a run")
            if len(set(header)) < len(header):
                raise ValueError(f"{path}: two columns are called '{max(header, key=header.count)}'; rename one")
            rows = []
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    if len(cells) != len(header):
                        raise ValueError(f"{path}, row {reader.line_num}: {len(cells)} cells, expected {len(header)} as in the header")
                    rows.append((reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=True))))
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e.reason} at byte {e.start}); expected a CSV file") from None
    except csv.Error as e:
        raise ValueError(f"{path} is no CSV file: {e}") from None
    return header, rows


def _score(path: str | os.PathLike[str], n: int, column: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{path}, row {n}: '{column}' is '{cell}', expected a finite number; mend it, or leave that pair out for every arm")
    return value


def _repeated(path: str | os.PathLike[str], first: tuple[int, dict[str, str]], second: tuple[int, dict[str, str]], key: tuple[str, str], used: set[str]) -> str:
    (n, a), (m, b) = first, second
    differ = [c for c in a if a[c] != b[c] and c not in used]
    cure = f"they differ in {_some(differ)}: choose rows with --where {differ[-1] if len(differ) == 1 else 'COLUMN'}=VALUE" if differ else "leave one out"
    return f"{path}: rows {n} and {m} are both {key[0]}={a[key[0]]}, {key[1]}={a[key[1]]}; expected one: {cure}"


def _check_scores(run: Run, domains: tuple[str, ...]) -> None:
    if not domains or set(run.scores) != set(domains):
        raise ValueError(f"arm '{run.arm}', pair '{run.pair}' has scores of {_some(list(run.scores))}, expected {_some(list(domains)) or 'at least one'}: score every run on the same sets")
    for domain, value in run.scores.items():
        if not math.isfinite(value):
            raise ValueError(f"arm '{run.arm}', pair '{run.pair}': '{domain}' is {value}, expected a finite number; leave that run out")


def _stack_curves(found: Mapping[tuple[str, str], Run], arms: Sequence[str], pairs: Sequence[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    stacked = {}
    for unit in dict.fromkeys(unit for run in found.values() for unit in run.curves):
        curves = {key: run.curves[unit] for key, run in found.items() if unit in run.curves}
        points = max(len(curve.x) for curve in curves.values())
        x, y = np.full((2, len(arms), len(pairs), points), np.nan)
        for (arm, pair), curve in curves.items():
            if len(curve.x) != len(curve.y):
                raise ValueError(f"arm '{arm}', pair '{pair}': the curve over {unit} has {len(curve.x)} costs and {len(curve.y)} accuracies")
            at = arms.index(arm), pairs.index(pair)
            x[at][:len(curve.x)], y[at][:len(curve.y)] = curve.x, curve.y
        stacked[unit] = x, y
    return stacked


def _places(*runs: Run) -> str:
    places = [run.origin for run in runs if run.origin]
    return f" ({' and '.join(places)})" if places else ""


def _numbers_first(name: str) -> tuple[bool, float, str]:
    try:
        value = float(name)
    except ValueError:
        value = math.nan
    return (False, value, name) if math.isfinite(value) else (True, 0.0, name)


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(f"'{name}'" for name in names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

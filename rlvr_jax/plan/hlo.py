"""Collectives of a compiled program, from its text: which, over how many devices, how often, how many bytes.

The compiler names them in several ways: by themselves, as a start and a done, inside fusions and async computations, and
an all-reduce inside a fusion called ``all-reduce-scatter`` is a reduce-scatter. Bytes are what one device sends over the
network: of n devices ``(n - 1) / n`` of the gathered (or scattered, or exchanged) array, twice that for an all-reduce.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_ITEM = {"pred": 1, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5, "c64": 8, "c128": 16}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|branch_computations|true_computation|false_computation|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")


class Collective(NamedTuple):
    """One collective of a program: ``bytes`` each device sends each time, over ``devices`` devices, ``times`` per run."""

    kind: str
    devices: int
    bytes: int
    times: int
    shape: str


class Loop(NamedTuple):
    """A loop whose number of turns the program decides as it runs; ``turns`` is what was assumed."""

    name: str
    turns: int


def collectives(text: str, turns: Sequence[int] = (), devices: int = 1) -> tuple[list[Collective], list[Loop]]:
    """All collectives that one run of the program executes, the most bytes first, and the loops whose length was assumed.

    Args:
      text: of the compiled program, ``Compiled.as_text()``.
      turns: assumed for loops without a constant number of turns, by how deep they lie in each other; beyond: 1.
      devices: of the program: groups that cannot be read are taken to be all of them.

    Raises:
      ValueError: the text has no entry computation.
    """
    program, entry = _computations(text)
    found: list[Collective] = []
    loops: list[Loop] = []

    def walk(name: str, times: int, depth: int) -> None:
        scatter = name.startswith("all-reduce-scatter")
        for line in program.get(name, ()):
            op = line.op.removesuffix("-start")
            if op in KINDS and not line.op.endswith("-done"):
                found.append(_collective("reduce-scatter" if scatter and op == "all-reduce" else op, line, times, devices, fused=scatter))
            elif op == "while":
                condition, body = (re.search(rf"\b{key}=%?([\w.\-]+)", line.rest) for key in ("condition", "body"))
                if condition is None or body is None:
                    continue
                n = _trip_count(line.rest, program.get(condition[1], []))
                deeper = depth
                if n is None:
                    n, deeper = (turns[depth] if depth < len(turns) else 1), depth + 1
                    loops.append(Loop(body[1], n))
                walk(body[1], times * n, deeper)
            elif op not in ("reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter"):
                for called in _CALLED.findall(line.rest):
                    for inner in re.findall(r"[\w.\-]+", called):
                        walk(inner, times, depth)

    walk(entry, 1, 0)
    same: Counter[tuple[str, int, int, str]] = Counter()
    for c in found:
        same[c.kind, c.devices, c.bytes, c.shape] += c.times
    out = [Collective(kind, n, size, times, shape) for (kind, n, size, shape), times in same.items() if n > 1]
    return sorted(out, key=lambda c: -c.bytes * c.times), [x for x in loops if x.turns != 1]


def total(found: Sequence[Collective]) -> dict[str, int]:
    """Bytes a device sends in one run, by kind; kinds that do not occur are 0."""
    return {kind: sum(c.bytes * c.times for c in found if c.kind == kind) for kind in KINDS}


class _Line(NamedTuple):
    name: str
    type: str
    op: str
    rest: str


def _computations(text: str) -> tuple[dict[str, list[_Line]], str]:
    program: dict[str, list[_Line]] = {}
    entry, lines = None, None
    for raw in text.splitlines():
        if lines is None:
            if head := _COMPUTATION.match(raw):
                lines = program.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
        elif raw.rstrip() == "}":  # a kernel's own metadata may break lines, and begin them with braces
            lines = None
        elif found := _INSTRUCTION.match(raw):
            lines.append(_Line(*found.groups()))
    if entry is None:
        raise ValueError("the text of the program has no ENTRY computation; pass Compiled.as_text()")
    return program, entry


def _trip_count(rest: str, condition: Sequence[_Line]) -> int | None:
    """Turns of a loop: what the compiler has noted, else the constant that a counter from 0 is compared with."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
    if noted:
        return int(noted[1])
    constants = {line.name: int(value[0]) for line in condition if line.op == "constant" and (value := re.findall(r"^(\d+)\)", line.rest))}
    compares = [line for line in condition if line.op == "compare"]
    if len(compares) != 1 or len(condition) > 4 + len(constants) or "direction=LT" not in compares[0].rest:
        return None
    bound = [constants[name] for name in re.findall(r"%([\w.\-]+)", compares[0].rest.split(")")[0]) if name in constants]
    return bound[0] if len(bound) == 1 else None


def _collective(kind: str, line: _Line, times: int, devices: int, *, fused: bool) -> Collective:
    n = 2 if "source_target_pairs" in line.rest else _group_size(line.rest, devices)
    arrays = list(_arrays(line.type))
    if line.op in ("all-gather-start", "reduce-scatter-start") and len(arrays) % 2 == 0:
        arrays = arrays[len(arrays) // 2 :]  # (operands, results)
    if line.op == "collective-permute-start":
        arrays = arrays[1:2]
    size = sum(math.prod(shape) * _item(dtype) for dtype, shape in arrays)
    if kind == "reduce-scatter" and not fused:
        size *= n  # the result is one part
    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(kind, (n - 1) / n)
    shown = " ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in arrays[:3]) + (" ..." if len(arrays) > 3 else "")
    return Collective(kind, n, round(size * share), times, shown)


def _arrays(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for dtype, dims in _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", text)):
        yield dtype, tuple(int(d) for d in dims.split(",") if d)


def _item(dtype: str) -> float:
    if dtype in _ITEM:
        return _ITEM[dtype]
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 4


def _group_size(rest: str, devices: int) -> int:
    """Devices of one group, in any of the three ways to write them."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:,?\s*device_ids=\([^)]*\)+)?\s*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(part or sizes[name]) for name, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])) if mesh[2] else 1
    return devices

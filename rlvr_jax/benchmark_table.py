"""Results of an evaluation as a Markdown table: percent, a row for each domain, and their mean. No jax in here."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(results: Mapping[str, Any]) -> str:
    """The content of ``results.md`` from that of ``results.json``."""
    domains, settings = results["domains"], results["settings"]
    measures = [m for m in results["mean"] if m.startswith(("pass_at_", "majority_of_"))]
    head = ["domain", "accuracy %", *(_title(m) for m in measures), "prompts", "unknown", "truncated", "tokens"]
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for name, d in domains.items():
        asked = f"{d['prompts']}" if d["rows"] in (None, d["prompts"]) else f"{d['prompts']} of {d['rows']}"
        lines.append(_line([_safe(name), _accuracy(d), *(_percent(d[m]) for m in measures), asked, f"{d['unknown']} of {d['total']}", f"{d['truncated']} of {d['total']}",
                            f"{d['tokens_mean']:.0f}"]))
    if len(domains) > 1:
        mean = results["mean"]
        over = f"**mean of {mean['domains']}**" if mean["domains"] == len(domains) else f"**mean of the {mean['domains']} of {len(domains)} with verdicts**"
        lines.append(_line([over, _accuracy(mean), *(_percent(mean[m]) for m in measures), *[""] * 4]))
    samples = settings["samples"]
    how = "greedy" if settings["temperature"] == 0 else f"{samples} sample{'s' * (samples > 1)} a prompt at temperature {settings['temperature']:g}"
    weights = f" (checkpoint {results['checkpoint']})" if results["checkpoint"] else ""
    title = f"# {_safe(results['model'])}{weights}\n\n{how}, at most {settings['max_new_tokens']} tokens an answer" \
        + (f"; the first {results['limit']} prompts of a domain, in an order by hash" if results["limit"] else "") + "\n"
    notes = ["Accuracy: share of known verdicts that are right, ± one standard error over prompts. The mean counts every domain alike.", *_notes(results)]
    return "\n".join([title, *lines, "", *(f"- {note}" for note in notes), ""])


def _notes(results: Mapping[str, Any]) -> list[str]:
    unknown = [f"{_safe(name)}: no verdict on {n} answer{'s' * (n > 1)}: {_safe(reason) or 'judged by another process'}"
               for name, d in results["domains"].items() for reason, n in d["unknown_reasons"].items()]
    return [*unknown, *map(_safe, results["warnings"])]


def _title(measure: str) -> str:
    kind, _, k = measure.rpartition("_")
    return f"{'pass' if kind.startswith('pass') else 'majority'}@{k}"


def _accuracy(d: Mapping[str, Any]) -> str:
    return "-" if d["accuracy"] is None else f"{100 * d['accuracy']:.1f} ± {100 * d['stderr']:.1f}"


def _percent(x: float | None) -> str:
    return "-" if x is None else f"{100 * x:.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _safe(text: str) -> str:
    """Text of data or paths: no cell or line may end inside it."""
    return " ".join(str(text).split()).replace("|", "\\|")

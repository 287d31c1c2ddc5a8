"""The frame of our HTML pages: style, sections, and how numbers and foreign text are shown."""

import json
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

# Colours of lines are told apart by hue and lightness also with the common colour-vision deficiencies (after Okabe and
# Ito); dark mode has lighter ones of the same hue.
COLOURS = """
:root{--paper:#fcfcfb;--card:#fff;--ink:#1d2129;--soft:#5d6470;--rule:#e3e5e9;--good:#0b7a4b;--bad:#b3261e;--doubt:#8a6100;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#c0588f;--c4:#a67c00;--c5:#4a9fd0;--c6:#6b4fa0;--c7:#6b7280}
@media (prefers-color-scheme:dark){:root{--paper:#14161a;--card:#1c1f25;--ink:#e4e6ea;--soft:#9aa1ad;--rule:#30343d;--good:#4cc38a;
--bad:#ff8a80;--doubt:#e0b04a;--c0:#56b4e9;--c1:#f08a3c;--c2:#3cc79d;--c3:#e694bf;--c4:#e3c04a;--c5:#8fd0f5;--c6:#b39ce0;--c7:#a3abb8}}
"""
STYLE = COLOURS + """*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1160px;margin:0 auto;padding:2.2rem 1.2rem 4rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .3rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.4rem 0 .5rem}
h3{font-size:.95rem;margin:0}
p{margin:.3rem 0 .7rem}
.kind{color:var(--soft);font-size:.8rem;letter-spacing:.06em;text-transform:uppercase;margin:0}
.command code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.command{color:var(--soft);overflow-wrap:anywhere}
.notice{border-left:4px solid var(--doubt);background:var(--card);padding:.6rem .9rem}
.tiles{display:flex;flex-wrap:wrap;gap:.6rem;margin:1.1rem 0 0}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:.5rem .9rem}
.tiles dt{color:var(--soft);font-size:.78rem}
.tiles dd{margin:0;font-size:1.15rem;font-weight:600;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.38rem .9rem .38rem 0;border-bottom:1px solid var(--rule);text-align:right;font-weight:400;vertical-align:middle}
th:first-child{text-align:left;overflow-wrap:anywhere;max-width:22rem}
thead th{color:var(--soft);font-size:.8rem}
tbody th{font-weight:600;min-width:6rem}
.total th,.total td{border-bottom:0;color:var(--soft)}
.scroll td{white-space:nowrap}
.facts th{font-weight:400;color:var(--soft)}
.facts td{white-space:normal;text-align:left;overflow-wrap:anywhere}
.up{color:var(--good);font-weight:600}
.down{color:var(--bad);font-weight:600}
.bar{min-width:13rem}
.bar i{display:block;height:7px;border-radius:2px;min-width:1px}
.bar .old{background:var(--c7);opacity:.55;margin-bottom:2px}
.bar .new{background:var(--c0)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:.9rem}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:.8rem .9rem;min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:0 .6rem;align-items:baseline;margin-bottom:.3rem}
figcaption small{color:var(--soft);font-size:.76rem}
svg{display:block;width:100%;height:auto;color:var(--ink)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem .9rem;margin:.4rem 0 0;padding:0;font-size:.82rem;color:var(--soft)}
.legend li{overflow-wrap:anywhere}
.legend b{color:var(--ink);font-variant-numeric:tabular-nums;font-weight:600}
.legend i{display:inline-block;width:1rem;border-top:3px solid var(--c);margin-right:.35rem;vertical-align:middle}
.legend .dash{border-top-style:dashed}
details{border-top:1px solid var(--rule);padding:.5rem 0}
summary{cursor:pointer;font-weight:600}
article{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:.6rem .9rem;margin:.6rem 0;font-size:.86rem}
article>p{color:var(--soft);margin:0 0 .3rem;overflow-wrap:anywhere}
.tag{font-weight:700;margin-right:.4rem}
.tag.ok{color:var(--good)}
.tag.wrong{color:var(--bad)}
.tag.unknown{color:var(--doubt)}
.texts{display:grid;grid-template-columns:5.2rem minmax(0,1fr);gap:.2rem .6rem;margin:0}
.texts dt{color:var(--soft)}
.texts dd{margin:0}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
details>pre{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:.7rem .9rem;margin:.6rem 0}
@media (max-width:520px){.texts{grid-template-columns:1fr}.bar{display:none}}
@media print{details:not([open])>*{display:revert}figure,article{break-inside:avoid}}
"""


def document(title: str, parts: Sequence[str]) -> bytes:
    """A whole page in UTF-8; the policy line forbids script and any request, whatever slips into the page."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
            f"<title>{text(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{''.join(parts)}</main></body></html>\n"
            ).encode("utf-8", "replace")


def section(heading: str, body: str) -> str:
    return f"<section><h2>{text(heading)}</h2>{body}</section>\n"


def figure(title: str, svg: str, lines: Sequence[tuple[str, int, bool, str]], note: str = "") -> str:
    """A chart with its title, a note and its legend. ``lines``: label, palette index (dashed from 8 on), dashed anyhow, last value as text."""
    legend = "".join(f'<li><i style="--c:var(--c{color % 8})"{" class=dash" if dashed or color >= 8 else ""}></i>{text(label)}{f" <b>{text(last)}</b>" * bool(last)}</li>'
                     for label, color, dashed, last in lines)
    small = f"<small>{text(note)}</small>" if note else ""
    return f"<figure><figcaption><h3>{text(title)}</h3>{small}</figcaption>{svg}<ul class=legend>{legend}</ul></figure>"


def notice(words: str) -> str:
    return f'<p class="notice" role="note">{text(words)}</p>'


def text(value: Any, limit: int | None = None) -> str:
    """Foreign text made :func:`visible`, and safe inside an element or a quoted attribute.

    A text longer than ``limit`` characters is cut, and says so.
    """
    words = value if isinstance(value, str) else json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
    if limit is not None and len(words) > limit:
        words = f"{words[:limit]} … [{len(words) - limit:,} more characters]"
    return escape(visible(words))


def visible(words: str) -> str:
    """Control characters and those that reverse the direction of writing as their code, so a text cannot disguise itself."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]",
                   lambda m: f"[U+{ord(m[0]):04X}]", words.replace("\r\n", "\n"))


def table(head: Sequence[str], rows: Sequence[Sequence[str | tuple[str, str]]]) -> str:
    """A table whose first column names its rows. A cell is foreign text, or (text, CSS class)."""
    def cell(value: str | tuple[str, str]) -> str:
        words, css = value if isinstance(value, tuple) else (value, "")
        return f"<td{f' class={chr(34)}{css}{chr(34)}' if css else ''}>{text(words)}</td>"

    top = "".join(f"<th scope=col>{text(name)}</th>" for name in head)
    body = "".join(f"<tr><th scope=row>{text(name)}</th>{''.join(map(cell, cells))}</tr>" for name, *cells in rows)
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def number(value: Any) -> float | None:
    """A finite float, or None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def points(old: float | None, new: float | None) -> str:
    """Difference of two fractions in percentage points, with its sign."""
    return "–" if old is None or new is None else f"{100 * (new - old):+.1f}".replace("-", "−")


def count(value: Any) -> str:
    known = number(value)
    return "–" if known is None else f"{known:,.0f}"


def short(value: float, as_percent: bool = False) -> str:
    """A value beside a curve: three or four digits that matter."""
    if as_percent:
        return percent(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("-", "−")


def duration(seconds: Any) -> str:
    """'42 s', '3 min 05 s', '2 h 10 min'."""
    known = number(seconds)
    if known is None:
        return "–"
    whole = round(known)
    if whole < 60:
        return f"{known:.0f} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole // 60 % 60:02d} min"


def read_text(path: Path) -> str:
    """Content of a text file; '' where there is none."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none or it is broken."""
    try:
        tree = json.loads(read_text(path))
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}

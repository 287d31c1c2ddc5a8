"""What carries no meaning, off: invisible and full-width characters, TeX colours, sizes and wrappers, rows of environments."""

import functools
import re
import unicodedata

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_JSON_ESCAPES = (("\x08oxed", r"\boxed"), ("\x08egin", r"\begin"), ("\x08inom", r"\binom"), ("\x0crac", r"\frac"), ("\x0cbox", r"\fbox"))
_BOX_TOKENS = (("<|begin_of_box|>", r"\boxed{"), ("<|end_of_box|>", "}"))

_COLOUR = re.compile(r"\\(?:textcolor|color|colorbox)\s*(?:\[[a-zA-Z]*\])?\s*\{[^{}]*\}")
_PHANTOM = re.compile(r"\\[hv]?phantom\s*\{[^{}]*\}|\\(?:math)?strut(?![a-zA-Z])")
_DECORATION = re.compile(r"\\(?:underline|uline|emph|ensuremath|smash|bbox(?:\[[^\]]*\])?)\s*(?=\{)")
_SIZE = re.compile(r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|(?:script){1,2}style)(?![a-zA-Z])")
_LEAD = re.compile(r"^[\s{]*(?:\\(?:therefore|implies|Rightarrow|Longrightarrow|rightarrow|to|because|Longleftrightarrow)(?![a-zA-Z])|[=-]>|→|⇒|∴)\s*")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|emph|underline|rm|bf)\s*\{([^{}]*)\}")
_ENVIRONMENT = re.compile(
    r"\\begin\{(aligned|gathered|split|alignat|align|equation|gather|multline|eqnarray|flalign|displaymath|cases)\*?\}(.*?)\\end\{\1\*?\}", re.DOTALL)
_ROW = re.compile(r"\\\\(?:\[[^\]\n]*\])?")
_NESTED = re.compile(r"\\(begin|end)\{")
_ASSIGNMENT = re.compile(r"\s*(\\?[A-Za-z][\w{}]*)\s*=")


@functools.cache
def _folds() -> dict[int, str | None]:
    """Full-width and mathematical letters and digits to ASCII, dashes to hyphens; zero-width and direction marks to nothing."""
    table: dict[int, str | None] = {c: chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)}
    table |= {c: folded for c in range(0x1D400, 0x1D800) if len(folded := unicodedata.normalize("NFKC", chr(c))) == 1 and folded != chr(c)}
    invisible = [*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), *range(0xFE00, 0xFE10), *range(0xE0000, 0xE0080)]
    table |= dict.fromkeys([*invisible, 0xFEFF, 0xAD, 0x34F, 0x61C, 0x180E])
    return table | dict.fromkeys((0x2010, 0x2011, 0x2012, 0xFE63, 0xFE58), "-") | {0x3000: " ", 0xFF0F: "/", 0x2028: "\n", 0x2029: "\n"}


def characters(text: str) -> str:
    """The same text without characters that cannot be seen, full-width ones as ASCII, and ``\\b``, ``\\f`` that JSON ate put back."""
    for token, box in _BOX_TOKENS if "<|" in text else ():
        text = text.replace(token, box)
    if _CONTROL.search(text):
        for broken, whole in _JSON_ESCAPES:
            text = text.replace(broken, whole)
        text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return text if text.isascii() else text.translate(_folds())


def wrappers(s: str) -> str:
    """A formula without colours, sizes, phantoms, underlining and a leading "therefore"; braces that held them stay."""
    if "\\" not in s:
        return _LEAD.sub("", s)
    s = _PHANTOM.sub("", _COLOUR.sub("", s))
    s = _SIZE.sub("", _DECORATION.sub("", s))
    return _LEAD.sub("", s)


def texts(s: str) -> str:
    """``\\text{\\textbf{(C)}}`` as ``(C)``."""
    for _ in range(4):  # it nests, but not for ever
        s = _TEXT.sub(r"\1", s)
    return s


def environments(s: str, opening: str = r"\[", closing: str = r"\]") -> str:
    """Displayed environments as one formula: the last row of a derivation, or all rows of a list of assignments.

    ``cases`` with conditions (an ``&``) stay as they are. Quadratic in the worst case: for short texts.
    """
    def flat(match: re.Match[str]) -> str:
        name, body = match.groups()
        if name == "cases" and "&" in body:
            return match.group()
        return f"{opening} {_settled(_rows(body))} {closing}"

    return _ENVIRONMENT.sub(flat, s) if "\\begin{" in s else s


def _rows(body: str) -> list[str]:
    """Rows outside of nested environments, without alignment marks there."""
    if _NESTED.search(body):
        return [body.replace("&=", "=")]
    return [row.strip() for row in _ROW.split(body.replace("&", " ")) if row.strip()]


def _settled(rows: list[str]) -> str:
    names = [m.group(1) if (m := _ASSIGNMENT.match(r)) else "" for r in rows]
    if len(rows) > 1 and all(names) and len(set(names)) == len(names):
        return ", ".join(r.rstrip(" ,;.") for r in rows)
    return rows[-1].lstrip("= ") if rows else ""

"""One spelling for mathematics as models and data sets write it (LaTeX, ASCII, Unicode), and the bounds of what is read.

Everything here is text to text, linear or nearly so, and runs before any parser sees the input.
"""

import re

from rlvr_jax.rewards import clean, quantity, units, words

MAX_LENGTH = 500
MAX_NESTING = 20
MAX_BRACKETS = 8
"""The LaTeX grammar of math-verify needs 0.4 s of CPU per level of parentheses."""
MAX_DIGITS = 1000
MAX_POWER_DIGITS = 20_000
MAX_EXPONENT = 10**8
MAX_FACTORIAL = 2000

_UNICODE = str.maketrans({
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "∕": "/", "⁄": "/",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "∞": r"\infty ", "√": r"\sqrt ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ ", "⟨": r"\langle ", "⟩": r"\rangle ", "\u00a0": " ", "\u2009": " ",
    "\u202f": " ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "∛": r"\sqrt[3]",
    "′": "'", "’": "'", "€": "", "£": "", "¥": "", "₹": "", "，": ",", "。": ".", "（": "(", "）": ")", "：": ":", "％": "%"})
_SPACES = re.compile(r"\s+")
_SPACING = re.compile(r"(?<!\\)\\[,;:> ]|~|\\q?quad|\\thinspace(?![a-zA-Z])|\\(?:h|v)space\*?\{[^{}]*\}")
_SIZING = re.compile(r"\\(?:displaystyle|textstyle|limits|left|right|m?left|m?right|[bB]igg?[lrm]?|bf|rm|it)(?![a-zA-Z])\.?")
_WRAPPER = re.compile(r"\\(?:text(?:normal|bf|it|rm|sf|tt|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?|boldsymbol|bm)\s*(?=\{)")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_AND = re.compile(r",?\s*(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z])\s*,?")
_PERCENT = re.compile(r"\\%|(?<![a-zA-Z])(?:percentage|percent|pct)(?![a-zA-Z])", re.IGNORECASE)
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|lim|max|min|gcd|det"
_CONSTANTS = "pi|theta|alpha|beta|gamma|delta|lambda|omega|phi|infty"
_NAMES = re.compile(rf"(?<![\\a-zA-Z])({_FUNCTIONS}|{_CONSTANTS})(?![a-zA-Z])")
_INFINITY = re.compile(r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", re.IGNORECASE)
_SYNONYMS = [(re.compile(p), r) for p, r in (
    (r"\\(?:[dtc]|s|nice|flat)frac(?![a-zA-Z])", r"\\frac"), (r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le "), (r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge "),
    (r"\\neq(?![a-zA-Z])|!=|/=", r"\\ne "), (r"\\lt(?![a-zA-Z])", "<"), (r"\\gt(?![a-zA-Z])", ">"), (r"<=", r"\\le "),
    (r">=", r"\\ge "), (r"\\(?:varnothing|emptyset)(?![a-zA-Z])", r"\\emptyset "), (r"\\[lr]angle(?![a-zA-Z])", lambda m: "()"[m.group()[1] == "r"]),
    (r"\\[lr]brace(?![a-zA-Z])", lambda m: r"\{" if m.group()[1] == "l" else r"\}"), (r"\\(?:simeq|thickapprox)(?![a-zA-Z])", r"\\approx "),
    (r"\\colon(?![a-zA-Z])", ":"), (r"\\lg(?![a-zA-Z])", r"\\log_{10} "), (r"\{\s*,\s*\}", ","), (r"\\[ld]ots(?![a-zA-Z])", "..."), (r"\*\*", "^"), (r"\\!\s*", ""),
    (r"\\mathbf\{R\}", r"\\mathbb{R}"), (r"\\begin\{(?:small)?matrix\}", r"\\begin{pmatrix}"), (r"\\end\{(?:small)?matrix\}", r"\\end{pmatrix}"))]
_PLAIN_WORD = re.compile(r"infinity|hundred|thousand|[mbtr]+illion|percent|pct", re.IGNORECASE)
_LABEL = re.compile(
    r"^\s*\\text\{(?![^{}]*\b(?:not|less|more|least|most|than|over|under|below|above)\b)(?:[^{}]*(?:[:=]|\b(?:is|are))|\s*(?:about|approximately|exactly|only))\s*"
    r"(?:\}|([-\d.(\[\\][^{}a-zA-Z]*)\})")
_GROUP = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+|(?:'\d{3})+|(?:_\d{3})+)(?!\d|[,'_]\d)")
_ELLIPSIS = re.compile(r"(?<![\d.])(\d{1,9}\.\d{0,9}?)(\d{1,6}?)\2{2,9}\s*(?:\.\.\.|…|\\[lc]?dots)\s*\$?\s*$")
_BASE_WORD = re.compile(r"_\s*\{?\s*(?:\\text\s*\{)?\s*([a-z]{3,10})\s*\}{1,2}")
_BASE_PHRASE = re.compile(r"(?<=[0-9A-Fa-f)])\s*,?\s*\(?\s*(?:in\s+)?base[\s-]*(\d{1,2})\s*\)?\s*$")
_MODULUS = re.compile(r"\s*,?\s*(?:\\pmod\s*|\\mod\s*|\(\s*(?:\\text\s*\{\s*)?\\?mod\s*\}?\s*)\{?\s*(\d+|[a-z])\s*\}?\s*\)?\s*$")
_SET_BUILDER = re.compile(r"\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?::|\\mid(?![a-z])|\|)\s*(.*[<>=]|.*\\(?:le|ge|ne)(?![a-z]).*|.*[<>].*)\s*\\\}")
_NESTED_LIST = re.compile(r"\[\s*\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*\s*\]")
_SPACED_GROUP = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?! ?\d)")


def normalise(source: str) -> str:
    """A canonical spelling: no delimiters, sizes, spacing commands, units, wrappers or shorthands."""
    return normalised(source)[0]


def normalised(source: str) -> tuple[str, quantity.Unit | None]:
    """:func:`normalise`, and the unit that was taken off, if it is known."""
    dropped: list[str] = []
    s = _SPACES.sub(" ", clean.environments(clean.wrappers(source.translate(_UNICODE)), " ", " "))
    s = _ELLIPSIS.sub(r"\1\\overline{\2}", s)
    if re.search(r"\\\\(?:begin|frac|left|boxed|sqrt|text)", s):
        s = s.replace("\\\\", "\\")  # a whole string escaped twice, as JSON in JSON does
    s = re.sub(r"\\\$|\$|(?<!\\)\\[\[\]()]", " ", s)
    s = _unnested(_LABEL.sub(lambda m: m.group(1) or "", units.commands_off(_WRAPPER.sub(r"\\text", s), dropped)))
    for pattern, replacement in _SYNONYMS:
        s = pattern.sub(replacement, s)
    s = _SPACES.sub(" ", _SIZING.sub("", _SPACING.sub(" ", s)))  # runs of spaces would cost the patterns below their linear time
    s = _based_and_modular(_text_wrappers(_PERCENT.sub("%", s)))
    s = units.off(_AND.sub(", ", units.degrees(s, dropped)), dropped).strip()
    if (value := words.number(s.rstrip("% ."))) is not None:
        s = value + "%" * s.endswith("%")
    s = _ascii(s)
    s = _arguments(s)
    s = _separators(s)
    s = _shapes(s)
    s = re.sub(r"(?<![\d.])0+(?=\d)", "", s)
    s = re.sub(r"(?<![\d}])\.(?=\d)", "0.", s)
    s = re.sub(r"(?<!\\)\{\s+|\s+(?<!\\)(?=\})", lambda m: m.group().strip(), s)
    return _ungrouped(" ".join(s.split()).strip(" .,;:*_^?\"`")), quantity.of(dropped) if dropped else None


def _based_and_modular(s: str) -> str:
    """``1011 (base 2)``, ``(1011)_{\\text{two}}`` as ``1011_{2}``; ``(mod 7)``, ``\\mod 7`` as ``\\pmod{7}``; ``17 \\bmod 5`` as 2."""
    s = _BASE_WORD.sub(lambda m: f"_{{{words.number(m.group(1))}}}" if words.number(m.group(1)) else m.group(), s)
    s = re.sub(r"\(\s*(\w+)\s*\)\s*_(?=[\d{])", r"\1_", _BASE_PHRASE.sub(r"_{\1}", s))
    s = _MODULUS.sub(r" \\pmod{\1}", s)
    remainder = re.fullmatch(r"\s*(-?\d{1,300})\s*\\bmod\s*\{?\s*(\d{1,300})\s*\}?\s*", s)
    return str(int(remainder.group(1)) % int(remainder.group(2))) if remainder and int(remainder.group(2)) else s


def untexted(s: str) -> str:
    """The words of a canonical expression, without TeX's wrappers."""
    return " ".join(re.sub(r"\\text(?![a-z])|[{}$]", " ", s).split())


def squeezed(s: str) -> str:
    """Without what never changes the meaning: spaces but between digits (``1 1/2``), product signs before letters."""
    s = re.sub(r"\\(?:cdot|times)\s*(?=[a-zA-Z\\(])", " ", s)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", s)


def _text_wrappers(s: str) -> str:
    """``\\text{21}`` is 21, ``\\text{ and }`` a comma, ``\\text{cm}`` after something a unit, ``\\text{even}`` stays a text.

    A list in one text is a list of texts.
    """
    def unwrap(match: re.Match[str]) -> str:
        inner = match.group(1).strip()
        if inner in ("and", "or"):
            return ", "
        if not re.search(r"[a-zA-Z]{2,}", inner) or _PLAIN_WORD.fullmatch(inner) or words.number(inner):
            return f" {inner} "
        if words.fold(inner) in ("allrealnumbers", "allreals", "therealnumbers", "realnumbers", "setofrealnumbers"):
            return r"\mathbb{R}"
        parts = [p for p in _AND.sub(",", inner).split(",") if p.strip()]
        return ", ".join(f"\\text{{{p.strip()}}}" for p in parts) if len(parts) > 1 else match.group()

    return _TEXT.sub(unwrap, s)


def _unnested(s: str) -> str:
    """``\\text{...}`` around a formula (braces or commands in it) off."""
    position = 0
    while (start := s.find("\\text{", position)) >= 0:
        position = start + 6
        end = _matching(s, start + 5, "{}")
        inner = "" if end is None else s[position: end]
        if end is not None and re.search(r"\\[a-zA-Z]|\{", inner):
            s = f"{s[:start]} {inner} {s[end + 1:]}"
            position = start
    return s


def _ungrouped(s: str) -> str:
    """``{17}`` is 17, ``{(1, 2)}`` a tuple; ``{1, 2}`` may be a set."""
    while s[:1] == "{" and _matching(s, 0, "{}") == len(s) - 1 and ("," not in s or (s[1:2] in "([" and s[-2] in ")]")):
        s = s[1:-1].strip()
    return s


def _ascii(s: str) -> str:
    """``sqrt(2)*x^(1/2)``, ``exp(9)``, ``pi``, ``inf`` as LaTeX."""
    s = _INFINITY.sub(r"\\infty ", s)
    s = _NAMES.sub(r"\\\1 ", s)
    s = re.sub(r"(?<![\\a-zA-Z])sqrt", r"\\sqrt", s)
    s = re.sub(r"\\?(?<![a-zA-Z])exp\s*(?=\()", "e^", s)
    s = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r" \\cdot ", re.sub(r"\s*\*\s*", r" \\cdot ", s))
    s = re.sub(r"(?<![\\a-zA-Z])abs\s*\(([^()|]*)\)", r"|\1|", s)
    for command in ("^", "\\sqrt"):
        s = _braced_parentheses(s, command)
    return re.sub(r"\^\s*(-?\d{2,}|-\d)", r"^{\1}", s)


def _braced_parentheses(s: str, command: str) -> str:
    out, position = [], 0
    for match in re.finditer(re.escape(command) + r"\s*\(", s):
        if match.start() < position:
            continue
        end = _matching(s, match.end() - 1, "()")
        if end is None:
            break
        out += [s[position: match.start()], command, "{", _braced_parentheses(s[match.end(): end], command), "}"]
        position = end + 1
    return "".join([*out, s[position:]])


def _matching(s: str, opening: int, pair: str) -> int | None:
    depth = 0
    for i in range(opening, len(s)):
        depth += (s[i] == pair[0]) - (s[i] == pair[1])
        if depth == 0:
            return i
    return None


def _arguments(s: str) -> str:
    """``\\frac72``, ``\\frac{7}2``, ``\\frac\\pi6``, ``\\sqrt5`` with the braces that TeX implies."""
    token = r"(\\[a-zA-Z]+|[0-9a-zA-Z])"
    s = re.sub(rf"\\frac\s*{token}\s*{token}", r"\\frac{\1}{\2}", s)
    s = re.sub(rf"\\frac\s*{token}\s*(?=\{{)", r"\\frac{\1}", s)
    s = re.sub(rf"(\\frac\s*\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})\s*{token}", r"\1{\2}", s)
    return re.sub(rf"\\sqrt\s*(\[[^\[\]]*\])?\s*{token}", r"\\sqrt\1{\2}", s)


def _decimal_power(match: re.Match[str]) -> str:
    whole, places = match[1] or match[3], match[2] or match[4]
    return rf"^{{{'-' * whole.startswith('-')}\frac{{{int(whole.lstrip('-') + places)}}}{{{10 ** len(places)}}}}}"


def _shapes(s: str) -> str:
    """``(1,2)U(3,4)``, ``]1, 2[``, ``{x : x > 2}``, ``[[1, 2], [3, 4]]``, ``+/-`` in the spelling that is read."""
    s = re.sub(r"(?<=[\])])\s*U\s*(?=[\[(])", r"\\cup ", s)
    s = re.sub(r"\+\s*/\s*-", r"\\pm ", s)
    s = re.sub(r"\{([^{}]*?)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}", s)
    s = re.sub(r"\^\s*(?:\{\s*(-?\d{1,3})\.(\d{1,6})\s*\}|(\d{1,3})\.(\d{1,6}))", _decimal_power, s)
    s = re.sub(r"\s*<([^<>=]*,[^<>=]*)>\s*", r"(\1)", s) if s.strip()[:1] == "<" else s
    if "\\mp" in s and "\\pm" not in s:
        s = re.sub(r"\\mp(?![a-z])", r"\\pm", s)
    if reversed_ := re.fullmatch(r"([\[\]])([^\[\]()]*,[^\[\]()]*)([\[\]])", s.strip()):
        s = {"[": "[", "]": "("}[reversed_[1]] + reversed_[2] + {"]": "]", "[": ")"}[reversed_[3]]
    if builder := _SET_BUILDER.fullmatch(s.strip()):
        s = builder.group(2)
    if _NESTED_LIST.fullmatch(s.strip()):
        rows = [r.replace(",", "&") for r in re.findall(r"\[([^\[\]]*)\]", s)]
        s = r"\begin{pmatrix}" + r"\\".join(rows) + r"\end{pmatrix}"
    return s


def _separators(s: str) -> str:
    """Thousands separators off, list commas followed by a space.

    Inside brackets a comma separates, unless other commas there are followed by a space: ``(1,000, 2,000)``.
    """
    if re.fullmatch(r"\s*-?0,\d{3,}\s*", s):
        return s.replace(",", ".")  # a decimal comma: no thousands group starts with 0
    bracketed = re.search(r"[(\[{].*[)\]}]", s)
    if not bracketed or re.search(r",\s", s):
        s = _GROUP.sub(lambda m: m.group(1) + re.sub("[,'_]", "", m.group(2)), s)
    s = _SPACED_GROUP.sub(lambda m: m.group(1) + m.group(2).replace(" ", ""), s)
    return re.sub(r",\s*", ", ", s)


def oversized(s: str) -> str | None:
    """Why a normalised expression is not given to a parser; None if it may be.

    Nested powers are worked out from the inside as long as they are plain numbers, so ``2^{2^{2}}`` passes and
    ``10^{10^{10}}`` does not.
    """
    if len(s) > MAX_LENGTH:
        return f"longer than {MAX_LENGTH} characters"
    for opening, closing, limit in (("{", "}", MAX_NESTING), ("([", ")]", MAX_BRACKETS)):
        depth = peak = 0
        for c in s:
            depth += (c in opening) - (c in closing)
            peak = max(peak, depth)
        if peak > limit:
            return f"brackets nest deeper than {limit}"
    if re.search(rf"\d{{{MAX_DIGITS + 1}}}", s):
        return f"a number of more than {MAX_DIGITS} digits"
    for match in re.finditer(r"(\d*)\s*([)}]*)\s*(!+)", s):
        # Of a bracketed argument nothing is known but its numbers: one power or product in it is too much.
        loose = match.group(2) and re.search(r"\^|\\cdot|\\times|\d{4}", s[max(0, match.start() - 40): match.start(3)])
        if len(match.group(3)) > 2 or int(match.group(1) or 0) > MAX_FACTORIAL or loose:
            return "factorial too large"
    if re.search(r"\\binom\s*(?:\d{5}|\{[^{}]*(?:\^|\d{5}|\\))", s):
        return "binomial too large"
    if re.search(r"\\(?:int|sum|prod|lim)(?![a-z])", s) and (s.count("^") > 5 or re.search(r"\^\s*\{[^{}]*\^|\d{6}|!", s)):
        return "integral, sum or limit too large"
    return _powers(s.replace(" ", ""))


def _powers(s: str) -> str | None:
    for match in re.finditer(r"\^", s):
        after = match.end()
        after = _closing(s, after) + 1 if s[after: after + 1] == "{" else after + 1
        if s[after: after + 1] == "^":
            return "double superscript"  # a^b^c: nobody knows which of the two towers
    while True:
        s = re.sub(r"\{[({](\d+)[)}]\}|(?<=\^)\((\d+)\)", lambda m: f"{{{m.group(1) or m.group(2)}}}", s)
        power = re.search(r"(?<![\d.])(\d+)\^(?:\{(\d+)\}|(\d))(?!\d)", s)
        if power is None:
            break
        base, exponent = int(power.group(1)), int(power.group(2) or power.group(3))
        if exponent * len(str(base)) > MAX_POWER_DIGITS and base > 1:
            return "power too large"
        value = base**exponent if exponent * len(str(base)) < MAX_DIGITS else 10**MAX_DIGITS
        s = s[: power.start()] + str(value) + s[power.end():]
    for match in re.finditer(r"\^\{", s):
        inner = s[match.end(): _closing(s, match.end() - 1)]
        size = 1
        for n in re.findall(r"\d+", inner):
            size *= max(1, int(n))
        if size > MAX_EXPONENT:
            return "exponent too large"
        if inner.count("^") > 3:
            return "tower of powers"
    return None


def _closing(s: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(s)):
        depth += (s[i] == "{") - (s[i] == "}")
        if depth == 0:
            return i
    return len(s)

"""One spelling for mathematics as models and data sets write it (LaTeX, ASCII, Unicode), and the bounds of what is read.

Everything here is text to text, linear or nearly so, and runs before any parser sees the input.
"""

import re

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
    "\u202f": " ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "′": "'", "€": "",
    "£": "", "¥": "", "，": ",", "。": ".", "（": "(", "）": ")", "：": ":", "％": "%"})
_SPACING = re.compile(r"(?<!\\)\\[,;:> ]|~|\\q?quad|\\thinspace(?![a-zA-Z])|\\(?:h|v)space\*?\{[^{}]*\}")
_SIZING = re.compile(r"\\(?:displaystyle|textstyle|limits|left|right|m?left|m?right|[bB]igg?[lrm]?|bf|rm|it)(?![a-zA-Z])\.?")
_WRAPPER = re.compile(r"\\(?:text(?:normal|bf|it|rm|sf|tt|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?|boldsymbol|bm)\s*(?=\{)")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_AND = re.compile(r",?\s*(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z])\s*,?")
_PERCENT = re.compile(r"\\%|(?<![a-zA-Z])(?:percentage|percent|pct)(?![a-zA-Z])", re.IGNORECASE)
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])|\\circ(?![a-zA-Z]))")
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|lim|max|min|gcd|det"
_CONSTANTS = "pi|theta|alpha|beta|gamma|delta|lambda|omega|phi|infty"
_NAMES = re.compile(rf"(?<![\\a-zA-Z])({_FUNCTIONS}|{_CONSTANTS})(?![a-zA-Z])")
_INFINITY = re.compile(r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", re.IGNORECASE)
_SYNONYMS = [(re.compile(p), r) for p, r in (
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"), (r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le "), (r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge "),
    (r"\\neq(?![a-zA-Z])|!=|/=", r"\\ne "), (r"\\lt(?![a-zA-Z])", "<"), (r"\\gt(?![a-zA-Z])", ">"), (r"<=", r"\\le "),
    (r">=", r"\\ge "), (r"\\(?:varnothing|emptyset)(?![a-zA-Z])", r"\\emptyset "), (r"\\[lr]angle(?![a-zA-Z])", lambda m: "()"[m.group()[1] == "r"]),
    (r"\\[lr]brace(?![a-zA-Z])", lambda m: r"\{" if m.group()[1] == "l" else r"\}"), (r"\\(?:simeq|thickapprox)(?![a-zA-Z])", r"\\approx "),
    (r"\\colon(?![a-zA-Z])", ":"), (r"\{\s*,\s*\}", ","), (r"\\[ld]ots(?![a-zA-Z])", "..."), (r"\*\*", "^"), (r"\\!\s*", ""),
    (r"\\mathbf\{R\}", r"\\mathbb{R}"), (r"\\begin\{(?:small)?matrix\}", r"\\begin{pmatrix}"), (r"\\end\{(?:small)?matrix\}", r"\\end{pmatrix}"))]
_GROUP = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?!\d|,\d)")
_SPACED_GROUP = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?! ?\d)")
_UNIT = ("degrees?|radians?|cm|mm|km|kg|mg|ml|ft|lbs?|mph|kmh|sec|secs|min|mins|hrs?|hours?|minutes?|seconds?"
         "|days?|weeks?|months?|years?|dollars?|cents?|units?|inch(?:es)?|feet|foot|yards?|miles?|meters?|metres?|grams?|liters?|litres?|points?|people")
# A single letter may be a variable: it is a unit only after a space or with an exponent (1000 m^2).
_ATTACHED_UNIT = re.compile(
    rf"(?<=[\d}})])(?:\s*(?:sq(?:uare)?\.?\s+|cubic\s+)?(?:{_UNIT})(?:\s*(?:\^\s*\{{?\d\}}?|\d)|/\w+)?"
    r"|\s*(?:[ckm]?m|ft|mi)/(?:s|h|hr|sec|min)(?:\s*\^\s*\{?\d\}?)?|\s+[mgshL]|\s*m(?:\s*\^\s*\{?[23]\}?|[23]))\s*$")
_TRAILING_WORDS = re.compile(r"(?<=[\d})%])(?:\s+(?!(?:where|if|mod|hundred|thousand|[mbtr]+illion)\b)[a-zA-Z]{3,}[.,]?|\s+(?:of|in|to|by|is|at|the|a|an)\b){1,6}\s*$")
_TRAILING_TEXT = re.compile(r"\s*\\text\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?\s*$")


def normalise(source: str) -> str:
    """A canonical spelling: no delimiters, sizes, spacing commands, units, wrappers or shorthands."""
    s = source.translate(_UNICODE)
    if re.search(r"\\\\(?:begin|frac|left|boxed|sqrt|text)", s):
        s = s.replace("\\\\", "\\")  # a whole string escaped twice, as JSON in JSON does
    s = re.sub(r"\\\$|\$|(?<!\\)\\[\[\]()]", " ", s.replace("\n", " ").replace("\t", " "))
    s = _WRAPPER.sub(r"\\text", s)
    for pattern, replacement in _SYNONYMS:
        s = pattern.sub(replacement, s)
    s = _SIZING.sub("", _SPACING.sub(" ", s))
    s = _PERCENT.sub("%", s)
    s = _text_wrappers(s)
    s = _DEGREE.sub("", s) if "\\sin" not in s and "\\cos" not in s and "\\tan" not in s else s
    s = _without_units(_AND.sub(", ", s)).strip()
    s = _ascii(s)
    s = _arguments(s)
    s = _separators(s)
    s = re.sub(r"(?<![\d.])0+(?=\d)", "", s)
    s = re.sub(r"(?<![\d}])\.(?=\d)", "0.", s)
    s = re.sub(r"(?<!\\)\{\s+|\s+(?<!\\)(?=\})", lambda m: m.group().strip(), s)
    return " ".join(s.split()).strip(" .,;:*_^")


def squeezed(s: str) -> str:
    """Without what never changes the meaning: spaces but between digits (``1 1/2``), product signs before letters."""
    s = re.sub(r"\\(?:cdot|times)\s*(?=[a-zA-Z\\(])", " ", s)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", s)


def _text_wrappers(s: str) -> str:
    """``\\text{21}`` is 21, ``\\text{ and }`` a comma, ``\\text{cm}`` after something a unit, ``\\text{even}`` stays a text."""
    def unwrap(match: re.Match[str]) -> str:
        inner = match.group(1).strip()
        if inner in ("and", "or"):
            return ", "
        if re.search(r"[a-zA-Z]{2,}", inner):
            return match.group()
        return f" {inner} "

    return _TEXT.sub(unwrap, s)


def _without_units(s: str) -> str:
    for _ in range(2):
        for pattern in (_TRAILING_TEXT, _ATTACHED_UNIT, _TRAILING_WORDS):
            shorter = pattern.sub("", s.rstrip(" .,;"))
            if shorter.strip() and re.search(r"\d|\\[a-z]|^\W*[a-zA-Z]\W*$", shorter):
                s = shorter
    return s


def _ascii(s: str) -> str:
    """``sqrt(2)*x^(1/2)``, ``exp(9)``, ``pi``, ``inf`` as LaTeX."""
    s = _INFINITY.sub(r"\\infty ", s)
    s = _NAMES.sub(r"\\\1 ", s)
    s = re.sub(r"(?<![\\a-zA-Z])sqrt", r"\\sqrt", s)
    s = re.sub(r"\\?(?<![a-zA-Z])exp\s*(?=\()", "e^", s)
    s = re.sub(r"\s*\*\s*", r" \\cdot ", s)
    for command in ("^", "\\sqrt"):
        s = _braced_parentheses(s, command)
    return re.sub(r"\^\s*(-?\d{2,}|-\d)", r"^{\1}", s)


def _braced_parentheses(s: str, command: str) -> str:
    out, position = [], 0
    for match in re.finditer(re.escape(command) + r"\s*\(", s):
        if match.start() < position:
            continue
        end = _matching(s, match.end() - 1)
        if end is None:
            break
        out += [s[position: match.start()], command, "{", _braced_parentheses(s[match.end(): end], command), "}"]
        position = end + 1
    return "".join([*out, s[position:]])


def _matching(s: str, opening: int) -> int | None:
    depth = 0
    for i in range(opening, len(s)):
        depth += (s[i] == "(") - (s[i] == ")")
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


def _separators(s: str) -> str:
    """Thousands separators off, list commas followed by a space.

    Inside brackets a comma separates, unless other commas there are followed by a space: ``(1,000, 2,000)``.
    """
    if re.fullmatch(r"\s*-?0,\d{3,}\s*", s):
        return s.replace(",", ".")  # a decimal comma: no thousands group starts with 0
    bracketed = re.search(r"[(\[{].*[)\]}]", s)
    if not bracketed or re.search(r",\s", s):
        s = _GROUP.sub(lambda m: m.group(1) + m.group(2).replace(",", ""), s)
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

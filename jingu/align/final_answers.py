"""The final answer in a text, and the number in it, read by a grammar.

A final answer may be marked; the strongest mark decides, and of equal ones the last: `\\boxed{...}`, `<answer>...
</answer>`, a line `#### ...`, and "the answer is ..." or "answer: ...". Reasoning before `</think>` is no answer.

A number has an optional sign and is an integer, a decimal, a fraction, a mixed number or a power, with thousands
separators (comma, space, apostrophe or underscore; groups of three digits, or those of India), scientific notation, a
percent sign or a word such as million. Units and currencies are ignored. A number that is part of something else (a
term of a sum, a list, an interval, a function, a date, an inequality) is no number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

# Bits of the largest power, and digits of the longest number: a longer one is no answer, and would take long.
_MAX_BITS = 4_000
_MAX_DIGITS = 1_000
# Characters of a text that are searched for an unmarked answer: the end of it.
_MAX_TEXT = 20_000

_VULGAR_FRACTIONS = "1/2 1/4 3/4 1/3 2/3 1/5 2/5 3/5 4/5 1/6 5/6 1/8 3/8 5/8 7/8"
# Reading of single characters: minus signs, full-width forms, spaces, operators, currencies.
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−﹣－‒–", "-"),
        **dict.fromkeys("×·∙⋅∗", "*"),
        **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u2002\u2003\u3000", " "),
        **dict.fromkeys("’‘＇ʼ", "'"),
        **dict.fromkeys("€£¥₹₩₽¢$＄￥", " "),
        **dict.fromkeys("⁄∕／", "/"),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **{chr(0x0660 + digit): str(digit) for digit in range(10)},
        **{chr(0x06F0 + digit): str(digit) for digit in range(10)},
        **dict(zip("＋．，％＝（）：", "+.,%=():", strict=True)),
        **{character: f"^{digit}" for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
        **{
            character: f" {value}"
            for value, character in zip(_VULGAR_FRACTIONS.split(), "½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞", strict=True)
        },
        "\u200b": "",
        "\ufeff": "",
    }
)
# A repeating decimal: its integer, and the digits before and within the period.
_REPEATING = re.compile(r"(\d+)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d{1,40})\s*\}?")
_PLAIN = r"[-+]?\s*[\d.,]+"
# LaTeX as plain text.
_LATEX = [
    (re.compile(r"\\[dtc]?frac\s*\{\s*(" + _PLAIN + r")\s*\}\s*\{\s*(" + _PLAIN + r")\s*\}"), r" \1/\2"),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r" \1/\2"),
    (re.compile(r"\^\s*\{\s*([-+]?\d+)\s*\}|\^\s*\(\s*([-+]?\d+)\s*\)"), r"^\1\2"),
    (re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree"), "°"),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname|boxed|fbox)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:[,;:! ]|quad|qquad|left|right|displaystyle)(?![a-zA-Z])|~(?=\d)"), " "),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"</?[a-zA-Z]\w{0,10}>"), " "),
    (re.compile(r"\\[()\[\]]|\$"), " "),
    (re.compile(r"(?<=\d)\*\*(?=[-+]?\d)"), "^"),
    # Marks of emphasis, code and items of a list.
    (re.compile(r"\*\*|__|`"), ""),
    (re.compile(r"^[ \t]*[*•][ \t]+", re.MULTILINE), ""),
    (re.compile(r"(?<![\d\s)*])\*(?=\S)|(?<=\S)\*(?![\d\s(*])|^\*(?=\S)"), ""),
]

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])|\d{1,3}(?:[ '_]\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d+)?|\.\d+)"
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "万": 4, "亿": 8}
_NUMBER = re.compile(
    r"(?:(?P<sign>[-+])[ \t]*)?(?:"
    r"(?P<whole>\d+)[ \t]+(?P<part>\d+)/(?P<parts>\d+)"
    rf"|(?P<top>{_DECIMAL})[ \t]*/[ \t]*(?P<bottom>[-+]?{_DECIMAL})"
    rf"|(?P<base>{_DECIMAL})(?:[eE](?P<e>[-+]?\d+)|[ \t]*[*x][ \t]*10\^(?P<ten>[-+]?\d+)|\^(?P<power>[-+]?\d+))?"
    r")(?P<percent>[ \t]*(?:%|‰|per[ ]?cent\b|percent\b))?"
    rf"(?:[ \t]*(?P<scale>{'|'.join(_SCALES)})s?(?![a-z]))?"
)
# Units of quantities that are written with several numbers, such as 3 hours 20 minutes.
_UNIT = (
    r"(?:feet|foot|ft|inch(?:es)?|yards?|miles?|hours?|hrs?|h|minutes?|mins?|min|seconds?|secs?|s|days?|weeks?|months?"
    r"|years?|pounds?|lbs?|ounces?|oz|stone|dollars?|cents?|euros?|kg|grams?|g|meters?|metres?|m|cm|mm|km|degrees?)\b\.?"
)
_UNIT_GAP = rf"[ \t]*{_UNIT},?[ \t]+(?:and[ \t]+)?"
_LATER_PART = re.compile(rf"\d{_UNIT_GAP}$")
_LATER_UNIT = re.compile(rf"[ \t]*{_UNIT}")
# What must not stand directly before or after a number: then it is part of something else.
_OPERAND = r"(?:[\d.(\\√π]|[A-Za-zα-ω]\b)"
_LIST = r"(?:,|;|/|&|\bor\b|\band\b|\bto\b|—|\.\.+|或|和|至|~)"
_BEFORE_PATTERNS = [
    # The rest of a name, a number, a power or an index, with or without a bracket.
    r"[A-Za-z_\d.^\\√π!±≤≥≠@](?:\{|\(|\[)?",
    r"[\d)}][ \t]+",
    # An operator, after an operand or another operator; a bracket after it.
    r"[\d)\]}%!πa-zA-Z_]\s*[-+*/^]\s*",
    r"(?:^|\s)[-+*/^]\s*[-+*/^]\s*",
    r"[*/^]\s*",
    r"[-+*/^|]\s*\(\s*",
    r"\d\s+x\s+",
    # An inequality, but not an arrow.
    r"(?<![-=])[<>]=?\s*",
    r"!=\s*",
    r"[≤≥≠±√∓]\s*",
    r"\\(?:ge|le|geq|leq|neq|ne|gt|lt|pm|mp|sqrt|log|ln|sin|cos|tan|pi)\s*\{?\s*",
    # The argument of a command or a function.
    r"[]}]\s*\{\s*",
    r"\\[a-zA-Z]+\s*\{\s*",
    r"\b(?:log|ln|lg|sin|cos|tan|exp|sqrt|abs)\s*\(?",
    # A time, a ratio, an interval, a list.
    r"\d:",
    r"\d\s+:\s+",
    r"\d\s*\.\.+\s*",
    rf"\d[ \t]*[%°]?[ \t]*{_LIST}\s*(?:[A-Za-z]\s*=\s*)?",
    r"\d,",
    r"\b(?:at least|at most|than|over|under|between|minus|negative|plus|times|by|of|twice|half|double)\s+",
]
_AFTER_PATTERNS = [
    # An operator with an operand, a factorial, an index, more digits.
    r"\s*[-+*/^]\s*" + _OPERAND,
    r"-[A-Za-z]",
    r"[+!_(\[\d]",
    r"[,.:]\d",
    r"[ \t]+\d",
    r"\s+:\s+\d",
    r"\.\.|…",
    r"\s*(?:[<>≤≥≠±√π∞]|\\(?!text|mathrm|\)|\]|\}|%|\$|circ|;|,|!|\\))",
    # A variable, an ordinal, an abbreviated factor; letters that may be a unit are none of these.
    r"[ \t]*(?![mgshlLdtNJWVAKCFaI])[A-Za-zα-ω](?![A-Za-z])",
    r"(?:st|nd|rd|th)\b",
    r"(?:bn|mn|tn|k|K|M|B|T|C|F|A|N|a|I|d|t)(?![A-Za-z])",
    r"[A-Za-z]+[\d_(^]",
    r"[ \t]*[A-Za-z]\s*[\d^(]",
    rf"[ \t]*[%°]?[ \t]*{_LIST}\s*(?:[A-Za-z]\s*=\s*)?[-+]?\.?\d",
    r"\s+(?:times|plus|minus|divided|hundred|thousand|million|billion|trillion|dozen|squared|cubed)\b",
    r"\s+(?:factorial|or more|or less|or fewer)\b",
    r"\s*(?:dozen|千|百)",
    rf"{_UNIT_GAP}\d+(?:\.\d+)?[ \t]*{_UNIT}",
]
_BEFORE = re.compile(f"(?:{'|'.join(_BEFORE_PATTERNS)})$")
_AFTER = re.compile("|".join(_AFTER_PATTERNS))
_NOT = re.compile(r"(?:\bnot|n't|\bnever|\bneither|\bnor|不是)(?:\s+(?:equal|equal to|be|exactly))?\s*$", re.IGNORECASE)

_PHRASE = re.compile(
    r"(?:\banswer\b\W{0,8}?(?:\s*(?:is|was|:|=|：|equals|would be|should be)))\W*?(?=[^\s:*=])"
    r"|(?:答案|最终答案)\s*(?:是|为|:|：)+\s*",
    re.IGNORECASE,
)
# What is between two numbers that are both an answer: a unit of the first, and a conjunction.
_ANOTHER = re.compile(
    r"\s*(?:[^\W\d]+\s+){0,2}?[^\W\d]*\s*(?:,|;|&|\band\b|\bor\b|\bplus\b)(?:\s*(?:and|or|then|also))*\s*"
)
# The same, with a name for the second: Anna: 3, Ben: 5.
_ANOTHER_NAMED = re.compile(r"\s*[^\W\d]*\s*[,;]\s*[^\W\d]+\s*(?::|=|\bhas\b|\bgets\b)\s*")
_HASHES = re.compile(r"^[ \t]*####[ \t]*(?!#)(.*)$", re.MULTILINE)
# What a text says about its answer rather than as its answer.
_REMARK = re.compile(
    r"^.*?\b(?:confidence|certainty|self-score|probability of being)\b.*$"
    r"|\([^()]*\b(?:confiden|certain|sure|likely)[^()]*\)",
    re.IGNORECASE | re.MULTILINE,
)


class _Candidate(NamedTuple):
    """A number in a text; the value is None if it is part of something else."""

    start: int
    end: int
    value: Fraction | None


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else; None if it is not."""
    if len(text) > _MAX_DIGITS:
        return None
    plain = _plain(text).strip()
    match = _NUMBER.fullmatch(plain)
    return None if match is None else _value(match)


def final_number(text: str) -> Fraction | None:
    """Return the number that a text gives as its answer.

    A marked answer must contain it; without a mark, the last number of the text counts. None if there is none, or if
    it is part of something else.
    """
    boxed_answer = marked_answer(text)
    if boxed_answer is None:
        candidates = [*_candidates(_plain(_REMARK.sub("", conclusion(text)[-_MAX_TEXT:])))]
        return candidates[-1].value if candidates else None
    answer, is_phrase = boxed_answer
    plain = _plain(answer[:_MAX_TEXT])
    candidates = [*_candidates(plain)]
    if not is_phrase:
        gap = plain[candidates[-2].end : candidates[-1].start] if len(candidates) > 1 else ""
        if gap and (_ANOTHER.fullmatch(gap) or _ANOTHER_NAMED.fullmatch(gap)):
            return None
        return candidates[-1].value if candidates else None
    # A phrase may go on after its number; before it, there may be the left side of an equation.
    for index, candidate in enumerate(candidates):
        gap = plain[candidate.end : candidates[index + 1].start] if index + 1 < len(candidates) else ""
        if candidate.value is not None and not re.fullmatch(r"\s*=\s*[-+]?", gap):
            return None if _ANOTHER.fullmatch(gap) else candidate.value
        if not re.fullmatch(r"[\s()+*/^=!-]*", gap):
            return None
    return None


def marked_answer(text: str) -> tuple[str, bool] | None:
    """Return the answer that a text marks, and whether it is the continuation of a phrase such as "the answer is"."""
    text = conclusion(text)
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"), text.rfind(r"\boxed {"))
    if start >= 0:
        content = _brace_content(text, text.index("{", start))
        # The unit of a number may stand behind the box.
        return (content, False) if content is not None else ("", False)
    end = text.lower().rfind("</answer>")
    begin = text.lower().rfind("<answer>", 0, max(end, 0))
    if begin >= 0:
        return text[begin + len("<answer>") : end], False
    lines = [
        line for line in _HASHES.findall(text) if any(item.value is not None for item in _candidates(_plain(line)))
    ]
    if lines and not re.search(r"[A-Za-z]{2,}\W+[A-Za-z]{2,}|^\s*\d+[.)]\s+\S", lines[-1]):
        return lines[-1], False
    phrases = [*_PHRASE.finditer(text)]
    if phrases:
        sentence = re.split(r"\n|(?<=[^\d\s])\.\s|(?<=\d)\.(?:\s|$)|。", text[phrases[-1].end() :], maxsplit=1)[0]
        return sentence, True
    return None


def conclusion(text: str) -> str:
    """Return a text without the reasoning before its answer; empty if it ends within the reasoning."""
    answer = text.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def denies(text: str) -> bool:
    """Return whether a text denies what follows it."""
    return _NOT.search(text) is not None


def _brace_content(text: str, start: int) -> str | None:
    """Return the content of the braces that begin at a place; None if they do not end."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start + 1 : match.start()]
    return None


def _plain(text: str) -> str:
    """Return a text with one form for each sign, space and operator, and without LaTeX's commands for layout."""
    text = _REPEATING.sub(_repeating_fraction, text.replace(r"\$", " ").translate(_CHARACTERS))
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def _repeating_fraction(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction of two integers."""
    integer, prefix, period = match.groups()
    nines = (10 ** len(period) - 1) * 10 ** len(prefix)
    numerator = int(integer + prefix + period) - int(integer + prefix)
    return f"{numerator}/{nines}"


def _candidates(plain: str) -> Iterator[_Candidate]:
    """Yield the numbers of a plain text in their order, without those that it denies."""
    for match in _NUMBER.finditer(plain):
        start = match.start()
        before, after = plain[max(start - 60, 0) : start], plain[match.end() : match.end() + 60]
        if denies(before):
            continue
        sign = match["sign"]
        # A sign after an operand is an operator.
        is_term = sign is not None and re.search(r"\|$|[\d)\]}%!]\s*$|(?:^|[^\w'])[A-Za-z]\s*$|[A-Za-z]$", before)
        is_later = _LATER_PART.search(before) and _LATER_UNIT.match(after)
        is_part = is_term or is_later or _BEFORE.search(before) or _AFTER.match(after)
        yield _Candidate(start, match.end(), None if is_part else _value(match))


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a number; None if it is too large or divides by 0."""
    if len(match[0]) > _MAX_DIGITS:
        return None
    fields = match.groupdict()
    try:
        if fields["whole"] is not None:
            value = int(fields["whole"]) + Fraction(int(fields["part"]), int(fields["parts"]))
        elif fields["top"] is not None:
            value = _decimal(fields["top"]) / _decimal(fields["bottom"])
        else:
            value = _scaled_value(fields)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    percent = (fields["percent"] or "").strip()
    value /= 1 if not percent else 1000 if percent == "‰" else 100
    value *= 10 ** _SCALES.get(fields["scale"] or "", 0)
    return -value if fields["sign"] == "-" else value


def _scaled_value(fields: dict[str, str | None]) -> Fraction:
    """Return the value of a decimal with an exponent or a power. Raises OverflowError if it is too large."""
    base = _decimal(fields["base"] or "")
    exponent = int(fields["e"] or fields["ten"] or 0)
    power = int(fields["power"] or 1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * 4 > _MAX_BITS or abs(power) * bits > _MAX_BITS:
        raise OverflowError
    return base**power * Fraction(10) ** exponent


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[,' _]", "", text))

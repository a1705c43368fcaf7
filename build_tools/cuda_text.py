# SPDX-License-Identifier: Apache-2.0
"""Enough of a C++ reader to measure functions: comments and literals blanked, braces classified. No preprocessing."""

from __future__ import annotations

import re
from typing import NamedTuple

_BLANKS = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | (?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'""",
    re.DOTALL | re.VERBOSE,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_TYPE = re.compile(r"\b(class|struct|union|enum|concept)\b")
# What may stand between a parameter list and the body of a function.
_TAIL = re.compile(r"\)\s*(?:const\b|noexcept\b|override\b|mutable\b|&&?|->\s*[\w:<>,\s*&]+|\s)*$")


class Function(NamedTuple):
    """A function definition: `name` as written, `head` its declaration, `lines` of its body from brace to brace."""

    name: str
    head: str
    line: int
    lines: int
    depth: int
    parameters: int
    template_parameters: int


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def strip(text: str) -> str:
    """Replace comments and string literals by spaces; line and column numbers stay as they are."""
    return _BLANKS.sub(_blank, text)


def strip_directives(code: str) -> str:
    """Replace preprocessor lines (with their continuations) by spaces."""
    return _DIRECTIVE.sub(_blank, code)


def _count_commas(text: str) -> int:
    """Number of list items at the outermost level of `text`."""
    if not text.strip() or text.strip() == "void":
        return 0
    depth, items = 0, 1
    for char in text:
        depth += (char in "(<[{") - (char in ")>]}")
        items += char == "," and depth == 0
    return items


def _balanced(text: str, start: int, opening: str, closing: str) -> int:
    """Index after the bracket that closes the one at `start`; len(text) if none does."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i + 1
    return len(text)


def _template_parameters(head: str) -> int:
    match = re.search(r"\btemplate\s*<", head)
    if match is None:
        return 0
    start = match.end() - 1
    return _count_commas(head[start + 1 : _balanced(head, start, "<", ">") - 1])


def _parameter_list(head: str) -> tuple[str, str] | None:
    """Name and parameter text of the function that `head` declares: the last identifier before a parenthesis at level 0
    that is not an attribute, a specifier or a constraint."""
    skip = {"__launch_bounds__", "__align__", "alignas", "requires", "decltype", "noexcept", "explicit", "if", "while"}
    found: tuple[str, str] | None = None
    i = 0
    while i < len(head):
        if head[i] != "(":
            i += 1
            continue
        end = _balanced(head, i, "(", ")")
        name = re.search(r"([\w:~]+|operator\s*\S+)\s*$", head[:i])
        if name is not None and name.group(1) not in skip and found is None:
            found = (name.group(1), head[i + 1 : end - 1])
        i = end
    return found


def _is_function(head: str) -> bool:
    outside = re.sub(r"<[^<>]*>", "", head)
    if "(" not in outside or (_TYPE.search(outside) and "(" not in outside.split(":")[0]):
        return False
    declared = re.sub(r"\(.*\)|\boperator\s*[^\s\w(]+", "", outside, flags=re.DOTALL)
    if "=" in declared:
        return False
    # A constructor's initialiser list also ends in ')' or '}' before the body.
    return bool(_TAIL.search(head)) or bool(re.search(r"\)\s*:[^:]", head))


def functions(text: str) -> list[Function]:
    """All function definitions of a C++ text, outermost only (lambdas count into the function that holds them)."""
    code = strip_directives(strip(text))
    result: list[Function] = []
    start, i = 0, 0
    while i < len(code):
        char = code[i]
        if char == "{":
            head = code[start:i]
            if _is_function(head):
                end = _balanced(code, i, "{", "}")
                result.append(_measure(code, head, start, i, end))
                i = start = end
                continue
            start = i + 1
        elif char in "};":
            start = i + 1
        i += 1
    return result


def _measure(code: str, head: str, start: int, opening: int, end: int) -> Function:
    depth = deepest = 0
    for char in code[opening:end]:
        depth += (char == "{") - (char == "}")
        deepest = max(deepest, depth)
    name, parameters = _parameter_list(head) or ("?", "")
    lead = len(head) - len(head.lstrip())
    return Function(
        name=name,
        head=" ".join(head.split()),
        line=code.count("\n", 0, start + lead) + 1,
        lines=code.count("\n", opening, end) + 1,
        depth=deepest,
        parameters=_count_commas(parameters),
        template_parameters=_template_parameters(head),
    )

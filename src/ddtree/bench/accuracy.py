"""Whether an answer is right: numbers by exact match, code by running its tests."""

from __future__ import annotations

import ast
import re
import secrets
import textwrap
import warnings
from fractions import Fraction

from ddtree.bench.datasets import KNOWN_SETS, CodeTask, Prompt
from ddtree.bench.sandbox import SandboxLimits, run_python

NUMBER_SETS = frozenset({"gsm8k", "math_500", "aime24", "aime25"})
THINK_BEGIN, THINK_END = "<think>", "</think>"

# Not part of a word, an index or an exponent; a minus after a digit is a range's or a difference's.
SIGN = r"(?<![\w)\]}^.])-?\$?-?"
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(rf"(?P<sign>{SIGN})(?<![A-Za-z_^\d.])(?P<top>{DIGITS})(?:\s?/\s?(?P<bottom>\d+))?")
FRACTION = re.compile(r"(-?)\\[dt]?frac(?:\{(\d+)\}\{(\d+)\}|(\d)(\d))")
BOXED = re.compile(r"\\boxed\s*\{")
# What stands around a number without changing it.
MINUS = "\N{MINUS SIGN}"
UNITS = re.compile(
    r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|\\(?:left|right|displaystyle)\b"
    r"|\\[$%!,;: ]|\^\{?\\circ\}?|[%°]"
)
FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
CODE_START = re.compile(r"^(?:from |import |def |class |async def |@)", re.MULTILINE)
MAX_STARTS, MAX_PROSE_LINES = 20, 200

HARNESS = """\
import os, sys, types
module = types.ModuleType("answer")
sys.modules["answer"] = module
for name, source in {sources!r}:
    exec(compile(source, name, "exec"), module.__dict__)
module.check(module.__dict__[{entry_point!r}])
sys.stdout.write("\\n" + {token!r} + "\\n")
sys.stdout.flush()
os._exit(0)
"""


def check_answer(prompt_set_name: str, prompt: Prompt, text: str, *, run_code: bool) -> bool | None:
    """Whether the text answers the prompt; None where the set tells no answer, or none that can be compared.

    Numbers are compared for the sets of `NUMBER_SETS` and for a file's prompts whose `answer` is a number.

    Args:
        run_code: run model-written code in the sandbox; without it code is not checked (None).

    Raises:
        SandboxError: `run_code` on a machine on which the sandbox cannot run.
    """
    if prompt.code is not None:
        return passes_tests(prompt.code, text) if run_code else None
    is_compared = prompt_set_name in NUMBER_SETS or prompt_set_name not in KNOWN_SETS
    right = known_number(prompt.answer) if prompt.answer is not None and is_compared else None
    return None if right is None else final_number(text) == right


def known_number(answer: str) -> Fraction | None:
    """The number that a set's answer is; None where it is more or other than one number."""
    return _whole_number(answer.rpartition("####")[2])


def final_number(text: str) -> Fraction | None:
    """The number that a text ends up with: in its last `\\boxed{}`, after `####`, or its last one."""
    text = _after_thinking(text)
    boxed = _last_boxed(text)
    if boxed is not None:
        return _boxed_number(boxed)
    _, marker, after = text.rpartition("####")
    numbers = list(NUMBER.finditer(_without_units(after if marker else text)))
    return _value(numbers[0] if marker else numbers[-1]) if numbers else None


def _after_thinking(text: str) -> str:
    """What follows the thinking; nothing where it was cut off in the middle of it."""
    answer = text.rpartition(THINK_END)[2]
    return answer.partition(THINK_BEGIN)[0]


def _last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{}` whose braces close."""
    for start in reversed([match.end() for match in BOXED.finditer(text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
    return None


def _boxed_number(content: str) -> Fraction | None:
    """The number in a box: all of it, or the last one where words and no formula stand around it."""
    whole = _whole_number(content)
    plain = _without_units(content)
    if whole is not None or re.search(r"[\\^_*+()]", plain):
        return whole
    numbers = list(NUMBER.finditer(plain))
    return _value(numbers[-1]) if numbers else None


def _whole_number(text: str) -> Fraction | None:
    plain = _without_units(text).replace("$", "").strip().removesuffix(".")
    fraction = FRACTION.fullmatch(plain)
    if fraction:
        sign, top, bottom, short_top, short_bottom = fraction.groups()
        return _ratio(sign + (top or short_top), bottom or short_bottom)
    number = NUMBER.fullmatch(plain)
    return _value(number) if number else None


def _without_units(text: str) -> str:
    return UNITS.sub("", text.replace("{,}", ",").replace("\\$", "$").replace(MINUS, "-"))


def _value(number: re.Match[str]) -> Fraction | None:
    sign = "-" if "-" in number["sign"] else ""
    return _ratio(sign + number["top"].replace(",", ""), number["bottom"] or "1")


def _ratio(top: str, bottom: str) -> Fraction | None:
    try:
        return Fraction(top) / Fraction(bottom)
    except (ValueError, ZeroDivisionError):  # more digits than Python reads, or no number after all
        return None


def passes_tests(task: CodeTask, text: str, limits: SandboxLimits | None = None) -> bool:
    """Whether the code in an answer passes the task's tests, run in the sandbox.

    Raises:
        SandboxError: the sandbox cannot run on this machine.
    """
    code = extract_code(task, text)
    if code is None:
        return False
    token = secrets.token_hex(16)
    sources = [("prompt", task.prompt), ("answer", code), ("test", task.test)]
    program = HARNESS.format(sources=sources, entry_point=task.entry_point, token=token)
    result = run_python(program, limits)
    return result.exit_code == 0 and result.output.endswith(token + "\n")


def extract_code(task: CodeTask, text: str) -> str | None:
    """The Python in an answer that defines the task's function; None where there is none.

    A block between fences, else the text from the first line of code on, else the text as what follows
    the task's prompt; prose after the code is left out.
    """
    text = _after_thinking(text)
    blocks = [textwrap.dedent(match.group(1)) for match in FENCE.finditer(text)]
    starts = [match.start() for match in CODE_START.finditer(text)][:MAX_STARTS]
    for part in blocks or [text[start:] for start in starts]:
        code = _longest_code(part)
        if code is not None and _defines(code, task.entry_point):
            return code
    for part in (*blocks, text):
        for body in (part, textwrap.indent(part, "    ")):
            code = _longest_code(body, task.prompt)
            if code is not None:
                return code
    return None


def _longest_code(text: str, head: str = "") -> str | None:
    """`head` and as many lines of the text as are Python together; None where that is nothing of the text."""
    lines = text.rstrip().split("\n")
    nothing = _statements(head)
    for end in range(len(lines), max(0, len(lines) - MAX_PROSE_LINES), -1):
        code = head + "\n".join(lines[:end]) + "\n"
        if _statements(code) not in (None, nothing):
            return code
    return None


def _statements(code: str) -> str | None:
    """What the code says, without its layout; None where it is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
            compile(tree, "answer", "exec")
            return ast.dump(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defines(code: str, name: str) -> bool:
    nodes = ast.parse(code).body
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    return name in functions or name in [target.id for target in targets if isinstance(target, ast.Name)]

"""Right and wrong answers to numbers and to HumanEval's tasks."""

import types
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.bench import accuracy
from ddtree.bench.accuracy import check_answer, extract_code, final_number, known_number
from ddtree.bench.datasets import CodeTask, Prompt, load_prompt_set

TASK = CodeTask(
    "def f(x):\n    ''' Twice x. '''\n", "f", "def check(candidate):\n    assert candidate(2) == 4\n"
)
GOOD = "def f(x):\n    return 2 * x\n"

# The first line of HumanEval's tasks by number, a right body and a wrong one.
SOLUTIONS = {
    "HumanEval/0": (
        "    ordered = sorted(numbers)\n"
        "    return any(b - a < threshold for a, b in zip(ordered, ordered[1:]))",
        "    return any(b - a < threshold for a, b in zip(numbers, numbers[1:]))",
    ),
    "HumanEval/2": ("    return number % 1.0", "    return number // 1.0"),
    "HumanEval/23": ("    return len(string)", "    return len(string.split())"),
    "HumanEval/38": (
        "    return ''.join(g[-1] + g[:-1] if len(g) == 3 else g\n"
        "                   for g in (s[i:i + 3] for i in range(0, len(s), 3)))",
        "    return encode_cyclic(s)",
    ),
    "HumanEval/53": ("    return x + y", "    return x - y"),
    "HumanEval/163": (
        "    return [d for d in range(min(a, b), max(a, b) + 1) if d < 10 and d % 2 == 0]",
        "    return [d for d in range(a, b + 1) if d % 2 == 0]",
    ),
}


@pytest.fixture(scope="module")
def tasks():
    return {prompt.id: prompt for prompt in load_prompt_set("humaneval").prompts}


@pytest.mark.parametrize("task_id", SOLUTIONS)
def test_right_code_passes_and_wrong_code_fails(tasks, task_id):
    prompt = tasks[task_id]
    right, wrong = (f"```python\n{prompt.code.prompt}{body}\n```" for body in SOLUTIONS[task_id])
    assert check_answer("humaneval", prompt, right, run_code=True) is True
    assert check_answer("humaneval", prompt, wrong, run_code=True) is False


def test_every_task_has_a_prompt_that_is_python(tasks):
    stubs = {
        task_id: extract_code(p.code, f"```\n{p.code.prompt}    return 1\n```")
        for task_id, p in tasks.items()
    }
    assert len(stubs) == 164
    assert all(code is not None and f"def {tasks[i].code.entry_point}(" in code for i, code in stubs.items())


def test_code_runs_only_where_it_was_asked_for(tasks, monkeypatch):
    monkeypatch.setattr(accuracy, "run_python", lambda *_: pytest.fail("code was run"))
    assert check_answer("humaneval", tasks["HumanEval/53"], "```\nreturn x + y\n```", run_code=False) is None


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{GOOD}```",
        f"Sure:\n\n```py\n{GOOD}```\nIt doubles x.\n```\nprint(f(2))\n```",
        f"1. Like this:\n\n    ```python\n    {GOOD.replace(chr(10), chr(10) + '    ').rstrip()}\n    ```\n",
        f"```python\n{GOOD}",
        f"```\nprint('first')\n```\nthen\n```\n{GOOD}```",
        GOOD,
        f"Here is the function:\n\n{GOOD}\nIt doubles x; isn't that nice?\n",
        f"from what you say:\n{GOOD}",
        TASK.prompt + "    return 2 * x\n",
        "    return 2 * x\n",
        "    return 2 * x\n\nThat's it, isn't it?",
        "```\n    return 2 * x\n```",
        "<think>def f(x):\n    return 0\n</think>" + GOOD,
        "f = lambda x: 2 * x",
        f"```\n{GOOD}if __name__ == '__main__':\n    input()\n```",
    ],
)
def test_code_is_found_in(text):
    code = extract_code(TASK, text)
    module = types.ModuleType("answer")
    for source in (TASK.prompt, code, TASK.test):
        exec(compile(source, "answer", "exec", dont_inherit=True), module.__dict__)
    module.check(module.f)


@pytest.mark.parametrize(
    "text", ["", "I do not know.", "```python\ndef f(x:\n```", "<think>" + GOOD, "```\n\n```"]
)
def test_no_code_is_a_wrong_answer(text, monkeypatch):
    monkeypatch.setattr(accuracy, "run_python", lambda *_: pytest.fail("code was run"))
    assert check_answer("mine", Prompt("1", ("?",), None, TASK), text, run_code=True) is False


@pytest.mark.parametrize(
    "code", ["import os\nos._exit(0)", "print('a' * 32)\nraise SystemExit(0)", "def f(x): return 4"]
)
def test_ending_early_is_not_passing(code):
    text = f"```\n{code}\n\ndef f(x):\n    return 3\n```"
    assert check_answer("mine", Prompt("1", ("?",), None, TASK), text, run_code=True) is False


def test_chatty_code_with_dataclasses_passes():
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text = f"```\n{head}@dataclass\nclass A:\n    x: int\nprint('x' * 200000)\n{GOOD}```"
    assert check_answer("mine", Prompt("1", ("?",), None, TASK), text, run_code=True) is True


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes $18.", 18),
        ("18 eggs a day, so 9 are sold for 2 dollars each: **18**", 18),
        ("#### 18\nThat was step 3.", 18),
        ("So \\boxed{18}, as 3 + 15 = 18, in 2 steps", 18),
        ("first \\boxed{3}, then \\boxed{\\$1{,}234.50}", Fraction("1234.5")),
        ("\\boxed{18 \\text{ dollars}}", 18),
        ("\\boxed{x = 5}", 5),
        ("\\boxed{\\frac{3}{4}}", Fraction(3, 4)),
        ("\\boxed{-\\dfrac12}", Fraction(-1, 2)),
        ("\\boxed{90^\\circ}", 90),
        ("\\boxed{5\\sqrt{2}}", None),
        ("\\boxed{2^{10}}", None),
        ("\\boxed{12", 12),
        ("1,450,000 in all", 1_450_000),
        ("0.50", Fraction(1, 2)),
        ("a third: 1/3 of it", Fraction(1, 3)),
        ("-5 degrees", -5),
        ("\N{MINUS SIGN}4", -4),
        ("it lost $-3", -3),
        ("from 5-10", 10),
        ("7 - 4 = 3.", 3),
        ("70%", 70),
        ("5 cm^2", 5),
        ("no number, only x1 and H2O", None),
        ("<think>it is 5", None),
        ("<think>5?</think>It is 7.", 7),
        ("9" * 5000, None),
        ("1/0", None),
        ("", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("18", 18), ("2,125", 2125), ("-10", -10), ("5 + 13 = 18\n#### 18", 18), ("\\$32{,}348", 32348),
        ("\\frac{1}{2}", Fraction(1, 2)), ("025", 25), ("10\\%", 10), ("x+1", None), ("(3, 4)", None),
        ("[1, 2)", None), ("11\\frac12", None), ("3\\sqrt{13}", None), ("\\text{Evelyn}", None), ("B", None),
    ],
)  # fmt: skip
def test_known_number(answer, number):
    assert known_number(answer) == number


def test_every_answer_of_gsm8k_is_a_number_and_right_in_its_own_words():
    prompts = load_prompt_set("gsm8k", 1319).prompts
    for prompt in prompts:
        assert (
            check_answer("gsm8k", prompt, f"In 3 steps: \\boxed{{{prompt.answer}}}", run_code=False) is True
        )
        assert check_answer("gsm8k", prompt, f"It is ${prompt.answer}.", run_code=False) is True
        assert check_answer("gsm8k", prompt, f"It is 1{prompt.answer}.", run_code=False) is False


@given(st.integers(-(10**12), 10**12), st.booleans())
def test_a_number_is_found_however_it_is_written(value, commas):
    text = f"{value:,}" if commas else str(value)
    for form in (
        text,
        f"so {text}.",
        f"\\boxed{{{text}}}",
        f"#### {text}",
        f"{text}.00 in 7 \\boxed{{{text}}}",
    ):
        assert final_number(form) == value


@given(st.text(alphabet="0123456789.,$-/\\boxed{}frac#^ ", max_size=40))
def test_no_text_is_too_strange(text):
    assert final_number(text) is None or isinstance(final_number(text), Fraction)
    assert known_number(text) is None or isinstance(known_number(text), Fraction)


def test_what_cannot_be_compared_is_not_judged():
    words, number = Prompt("1", ("?",), "Evelyn"), Prompt("1", ("?",), "5")
    assert check_answer("math_500", words, "5", run_code=True) is None
    assert check_answer("mt_bench", Prompt("1", ("?",)), "5", run_code=True) is None
    assert check_answer("alpaca", number, "5", run_code=True) is None
    assert check_answer("math_500", number, "5", run_code=True) is True
    assert check_answer("my/file.jsonl", number, "6", run_code=True) is False

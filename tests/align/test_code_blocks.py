"""The Python code in an answer, in the forms of Markdown that models write."""

from __future__ import annotations

import pytest

from jingu.align.code_reward import extract_code

CODE = "def f(x):\n    return x * x"
PYTHON = f"```python\n{CODE}\n```"
BASH = "```bash\npip install x\n```"


def indent(text: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in text.splitlines())


FORMS = {
    "bare": CODE,
    "python": PYTHON,
    "prose around": f"So:\n\n{PYTHON}\n\nDone.",
    "no language": f"```\n{CODE}\n```",
    "capital": f"```Python\n{CODE}\n```",
    "capitals": f"```PYTHON\n{CODE}\n```",
    "py": f"```py\n{CODE}\n```",
    "python3": f"```python3\n{CODE}\n```",
    "python 3.11": f"```python3.11\n{CODE}\n```",
    "space before": f"``` python\n{CODE}\n```",
    "space after": f"```python  \n{CODE}\n```  ",
    "pandoc": f"```{{.python}}\n{CODE}\n```",
    "pandoc attributes": f'```{{.python .numberLines startFrom="1"}}\n{CODE}\n```',
    "r markdown": f"```{{python}}\n{CODE}\n```",
    "title": f'```python title="f.py"\n{CODE}\n```',
    "colon": f"```python:src/f.py\n{CODE}\n```",
    "braces": f"```python {{linenos=true}}\n{CODE}\n```",
    "comma": f"```python,editable\n{CODE}\n```",
    "tildes": f"~~~python\n{CODE}\n~~~",
    "four": f"````python\n{CODE}\n````",
    "longer end": f"```python\n{CODE}\n`````",
    "carriage returns": PYTHON.replace("\n", "\r\n"),
    "list": f"1. Write:\n\n{indent(PYTHON, '   ')}\n",
    "nested list": f"- a\n  - b\n{indent(PYTHON, '      ')}",
    "after a bullet": f"- {indent(PYTHON, '  ').lstrip()}",
    "after a number": f"1. {indent(PYTHON, '   ').lstrip()}",
    "tabs": f"- a\n{indent(PYTHON, chr(9))}",
    "quote": indent(PYTHON, "> "),
    "quote without spaces": indent(PYTHON, ">"),
    "quoted twice": indent(PYTHON, "> > "),
    "list in a quote": "> - a\n" + indent(PYTHON, ">   "),
    "no end": f"```python\n{CODE}",
    "end after a space": f"```python\n{CODE}\n ```",
    "bash before": f"{BASH}\n{PYTHON}",
    "bash after": f"{PYTHON}\nRun it:\n{BASH}",
    "shell around": f"```sh\nls\n```\n{PYTHON}\n```console\n$ python f.py\n```",
    "output": f"{PYTHON}\nOutput:\n```\n4\n```",
    "output of the same kind": f"```\n{CODE}\n```\nOutput:\n```\n4\n```",
    "named output": f"```\n{CODE}\n```\n```output\nf(2) = 4\n```",
    "use after": f"{PYTHON}\nUse:\n```python\nprint(f(2))\n```",
    "broken use after": f"{PYTHON}\nUse:\n```python\n>>> f(2)\n4\n```",
    "first attempt": f"```python\ndef f(x):\n    return x +\n```\nBetter:\n{PYTHON}",
    "in markdown": f"````markdown\n# f\n\n{PYTHON}\n````",
    "in markdown of the same length": f"```markdown\n# f\n\n{PYTHON}\nDone.\n```",
    "inline code": f"Call ```f(x)``` so:\n{PYTHON}",
    "pseudocode": f"```text\nsquare x\n```\n{PYTHON}",
    "json": f'```json\n{{"f": 1}}\n```\n{PYTHON}',
}


@pytest.mark.parametrize("name", FORMS)
def test_the_code_is_read_from_every_form(name: str) -> None:
    assert extract_code(FORMS[name], ["f"]).replace("\r\n", "\n").strip() == CODE


@pytest.mark.parametrize("name", ["bare", "bash before", "bash after", "no language", "json", "list", "no end"])
def test_programs_without_tested_names_are_read(name: str) -> None:
    assert extract_code(FORMS[name]).strip() == CODE


def test_earlier_blocks_with_what_the_code_uses_come_first() -> None:
    blocks = ["import math", "def unused(): pass", "def g(x):\n    return math.sqrt(x)", "def f(x):\n    return g(x)"]
    text = "\n\n".join(f"```python\n{block}\n```" for block in blocks)
    assert extract_code(text, ["f"]) == "\n\n".join([blocks[0], blocks[2], blocks[3]])


@pytest.mark.parametrize(
    "docstring",
    [
        '    """\n    ```\n    f(2)\n    ```\n    """',
        '    """Use:\n\n        ```python\n        f(2)\n        ```\n    """',
    ],
)
def test_fences_in_docstrings_belong_to_the_code(docstring: str) -> None:
    code = f"def f(x):\n{docstring}\n    return x * x"
    assert extract_code(f"```python\n{code}\n```", ["f"]) == code
    assert extract_code(code, ["f"]) == code


def test_an_answer_of_other_languages_has_no_code() -> None:
    assert extract_code(f"Run:\n{BASH}", ["f"]) == ""


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (f"<think>\nTry:\n{PYTHON.replace('x * x', '0')}\n</think>\n\n{PYTHON}", CODE),
        (f"Try:\n{PYTHON.replace('x * x', '0')}\n</think>\n{CODE}", CODE),
        (f"<think>\n{PYTHON}\n</think>\nThat is it.", "That is it."),
        (f"<think>\n{PYTHON}", ""),
        ("```python\ndef f(x):\n    return x.split('</think>')\n```", "def f(x):\n    return x.split('</think>')"),
    ],
    ids=["draft", "begun by the template", "reasoning alone", "unfinished reasoning", "in the code"],
)
def test_code_in_reasoning_is_no_answer(answer: str, code: str) -> None:
    assert extract_code(answer, ["f"]).strip() == code

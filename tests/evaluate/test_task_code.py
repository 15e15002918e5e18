"""What a task depends on: the files that it includes, the code that it names, and what that code imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from jingu.evaluate.task_file import find_task_files
from jingu.evaluate.task_mixture import describe_mixture

FILES = {
    "mixture.yaml": "mixture: m\nmembers:\n  - {task: task.yaml}\n",
    "task.yaml": "include: common.yaml\ntask: t\ndoc_to_text: !function code.question\n",
    "common.yaml": "include: more/base.yaml\nmetric_list:\n  - metric: !function metrics.score\n",
    "more/base.yaml": "output_type: generate_until\nprocess_docs: !function own.prepare\n",
    "code.py": "import words\n\ndef question(doc): ...",
    "words.py": "WORDS = 1",
    "metrics.py": "def score(items):\n    from parts import reader",
    "parts/reader.py": "",
    "more/own.py": "def prepare(docs): ...",
}


@pytest.mark.parametrize("changed", sorted(FILES))
def test_any_edit_changes_the_description(changed: str, tmp_path: Path) -> None:
    for name, text in {**FILES, "unused.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    names = {str(file.relative_to(tmp_path)) for file in find_task_files(tmp_path / "task.yaml")}
    assert names == FILES.keys() - {"mixture.yaml"}
    before = describe_mixture(tmp_path / "mixture.yaml")
    assert before.keys() == FILES.keys()
    comment = "\n# edited\n"
    (tmp_path / changed).write_text(FILES[changed] + comment)
    after = describe_mixture(tmp_path / "mixture.yaml")
    assert {name for name in before if before[name] != after[name]} == {changed}

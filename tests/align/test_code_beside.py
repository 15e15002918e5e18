"""Code of a reward can import modules beside it, from whichever folder the run starts."""

from __future__ import annotations

from pathlib import Path

from jingu.align.reward_worker import build_python_reward


def test_a_reward_imports_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_of_a_reward.py").write_text("def score(text):\n    return float(len(text))")
    (tmp_path / "main.py").write_text(
        "from beside_of_a_reward import score\n\ndef reward(completions):\n    return [score(c) for c in completions]"
    )
    assert callable(build_python_reward(f"{tmp_path}/main.py:reward", []))

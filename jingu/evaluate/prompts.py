"""Prompts: a task's documents rendered as lm-evaluation-harness renders them, with shots drawn as it draws them."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from jinja2 import StrictUndefined, TemplateError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jingu.errors import JinguError, join_words
from jingu.evaluate.task_data import Row, TaskData
from jingu.evaluate.task_file import TaskSettings, Template

# The harness's seed for shots.
SHOT_SEED = 1234


@dataclass(frozen=True)
class EvaluationSample:
    """A document with what the model is asked.

    Attributes:
        index: of the document in its split.
        pairs: contexts and continuations to score; for generation, the context and an empty text; for rolling
            likelihood, an empty context and the text.
        choices: texts of the choices.
        gold: what is right: one of several choices by number, or texts.
    """

    index: int
    row: Row
    pairs: tuple[tuple[str, str], ...]
    choices: tuple[str, ...] = ()
    gold: tuple[Any, ...] = ()


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)

    def regex_replace(text: str, pattern: str, replacement: str, count: int = 0) -> str:
        return re.sub(pattern, replacement, text, count=count)

    environment.filters["regex_replace"] = regex_replace
    return environment


@cache
def _compile(template: str) -> Any:
    return _environment().from_string(template)


class PromptRenderer:
    """Renders the documents of a task.

    Attributes:
        num_shots: shots in each prompt.
    """

    def __init__(self, task: TaskSettings, data: TaskData, num_shots: int) -> None:
        self.task = task
        self.data = data
        self.num_shots = num_shots
        self._columns = frozenset(data.columns)
        self._random = Random(SHOT_SEED)

    def render_all(self, limit: int | None = None) -> list[EvaluationSample]:
        """Return the first `limit` documents as samples (None: all), in order: shots depend on it."""
        rows = self.data.rows[:limit]
        return [self._render_sample(index, row) for index, row in enumerate(rows)]

    # Fields of a document

    def _render(self, key: str, template: Template, row: Row, parse: str = "") -> Any:
        """Return a field of a document.

        Args:
            key: of the task file, for messages.
            parse: what a rendered text may stand for: `number`, `list` or both.
        """
        if callable(template):
            return template(row)
        if not isinstance(template, str):
            return template
        if template in self._columns:
            return row.get(template)
        try:
            text: str = _compile(template).render(**row)
        except UndefinedError as error:
            fix = f"The columns of its data are {join_words(sorted(self._columns), 'and')}."
            what = f"its {key} uses what the data do not have: {error}."
            raise JinguError(what, where=f"{self.task.task} ({self.task.file})", fix=fix) from None
        except (TemplateError, TypeError, ValueError) as error:
            what = f"its {key} cannot be rendered: {error}."
            raise JinguError(what, where=f"{self.task.task} ({self.task.file})", fix="Correct it.") from None
        if "number" in parse and text.isdigit() and self.task.doc_to_choice is not None:
            return int(text)
        if "list" in parse and len(text) >= 2 and text[0] == "[" and text[-1] == "]":
            try:
                return ast.literal_eval(text)
            except (SyntaxError, ValueError):
                return text
        return text

    def _text(self, row: Row, template: Template) -> Any:
        return self._render("doc_to_text", template, row, "number")

    def _target(self, row: Row, template: Template) -> Any:
        return self._render("doc_to_target", template, row, "number, list")

    def _choices(self, row: Row, template: Template) -> list[str]:
        choices = self._render("doc_to_choice", template, row, "list")
        if isinstance(choices, dict):
            choices = list(choices.values())
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            what = f"its doc_to_choice gives {choices!r} for a document, which is no list of texts."
            raise JinguError(what, where=f"{self.task.task} ({self.task.file})", fix="Correct it.")
        return choices

    # Prompts

    def _turn(
        self, question: Any, answer: Any, choices: Sequence[str], prefix: str | None, ends: tuple[str, str]
    ) -> str:
        """Return a question and its answer; or if the answer is None, the question.

        Args:
            prefix: what an answer starts with.
            ends: delimiters after the question and after the answer.
        """
        if not isinstance(question, str):
            raise self._wrong("doc_to_text", question)
        after_question, after_answer = ends
        if answer is None or answer == "":
            return question + (_delimit(question, prefix, after_question) if prefix else "")
        if isinstance(answer, int) and 0 <= answer < len(choices):
            answer = choices[answer]
        elif isinstance(answer, list) and answer:
            answer = answer[0]
        if not isinstance(answer, str):
            raise self._wrong("doc_to_target", answer)
        if prefix:
            joint = _delimit(question, prefix, after_question) + _delimit(prefix, answer, " ")
            return question + joint + after_answer
        return question + after_question + answer + after_answer

    def _wrong(self, key: str, value: Any) -> JinguError:
        what = f"its {key} gives {value!r} for a document, which is neither a text nor one of the choices."
        return JinguError(what, where=f"{self.task.task} ({self.task.file})", fix="Check it, and the data's labels.")

    def _draw_shots(self, row: Row) -> list[Row]:
        """Return the shots of the next document, by the random numbers of the harness."""
        pool = self.data.pool
        own = row if self.data.excludes_own else None
        count = self.num_shots

        def others() -> list[Row]:
            return [shot for shot in pool if shot != own]

        if count > len(pool) - self.data.excludes_own:
            what = f"{count} shots are more than the {len(pool)} documents to draw them from allow."
            raise JinguError(what, where=self.task.task, fix="Set --num-fewshot to less.")
        if self.task.shots.sampler == "first_n":
            return (pool if own is None else others())[:count]
        if own is None:
            return self._random.sample(pool, count)
        drawn = [shot for shot in self._random.sample(pool, count + 1) if shot != own][:count]
        # Copies of the document may have been among those drawn.
        return drawn if len(drawn) == count else self._random.sample(others(), count)

    def _examples(self, row: Row) -> str:
        """Return the description and the shots."""
        task = self.task
        shots = task.shots
        text: str = self._render("description", task.description, row)
        for shot in self._draw_shots(row) if self.num_shots else ():
            question = self._text(shot, shots.doc_to_text)
            answer = self._target(shot, shots.doc_to_target)
            choices = self._choices(shot, shots.doc_to_choice) if shots.doc_to_choice is not None else []
            if isinstance(question, int):
                # Inputs that differ, and one answer to all: the text is that of the right input.
                question = choices[question]
                choices = []
            prefix = self._render("gen_prefix", shots.gen_prefix, shot)
            ends = (shots.target_delimiter or "", shots.fewshot_delimiter or "")
            text += self._turn(question, answer, choices, prefix, ends)
        return text

    def _render_sample(self, index: int, row: Row) -> EvaluationSample:
        task = self.task
        examples = self._examples(row)
        target = self._target(row, task.doc_to_target)
        if task.output_type == "loglikelihood_rolling":
            return EvaluationSample(index, row, (("", self._expect_text("doc_to_target", target)),))
        choices = self._choices(row, task.doc_to_choice) if task.doc_to_choice is not None else []
        prefix = self._render("gen_prefix", task.gen_prefix, row)
        delimiter = task.target_delimiter
        question = self._text(row, task.doc_to_text)
        if isinstance(question, int):
            # Each choice is a context; the target is the continuation of all.
            gold = self._gold(question, choices)
            contexts = [examples + self._turn(choice, None, (), prefix, ("", "")) for choice in choices]
            pairs = [(context, f"{delimiter}{target}") for context in contexts]
            return EvaluationSample(index, row, tuple(pairs), tuple(choices), gold)
        context = examples + self._turn(question, None, choices, prefix, (delimiter, ""))
        if task.output_type == "multiple_choice":
            gold = self._gold(target, choices)
            pairs = [(context, f"{delimiter}{choice}") for choice in choices]
            if any(metric.metric == "acc_mutual_info" for metric in task.metric_list or ()):
                pairs += [("", f"{delimiter}{choice}") for choice in choices]
            return EvaluationSample(index, row, tuple(pairs), tuple(choices), gold)
        if task.output_type == "loglikelihood":
            return EvaluationSample(index, row, ((context, self._expect_text("doc_to_target", target)),))
        if choices:
            target = [choices[number] for number in self._gold(target, choices)]
        gold = tuple(target) if isinstance(target, list) else (target,)
        if task.process_results is None and (not gold or gold[0] is None):
            raise self._no_gold(target)
        return EvaluationSample(index, row, ((context, ""),), tuple(choices), tuple(map(str, gold)))

    def _expect_text(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self._wrong(key, value)
        return value

    def _gold(self, target: Any, choices: Sequence[str]) -> tuple[int, ...]:
        """Return the numbers of the right choices. Raises JinguError if there are none, or they are out of range."""
        if self.task.process_results is not None:
            return ()
        numbers = []
        for label in target if isinstance(target, list) else [target]:
            number = choices.index(label) if isinstance(label, str) and label in choices else label
            if number is None or number in ("", -1):
                raise self._no_gold(target)
            if not isinstance(number, int) or not 0 <= number < len(choices):
                what = f"a document has the label {label!r}, and {len(choices)} choices."
                fix = "Labels count from 0, or are the text of a choice; check doc_to_target."
                raise JinguError(what, where=f"{self.task.task} ({self.task.file})", fix=fix)
            numbers.append(number)
        if not numbers:
            raise self._no_gold(target)
        return tuple(numbers)

    def _no_gold(self, target: Any) -> JinguError:
        what = f"a document has no right answer (its target is {target!r})."
        fix = "Use a split with labels, as validation_split."
        return JinguError(what, where=f"{self.task.task} ({self.task.file})", fix=fix)


def _delimit(before: str, after: str, delimiter: str) -> str:
    """Return `after`, with a delimiter before it unless there is whitespace at the joint."""
    needs_none = not before or before[-1].isspace() or after[:1].isspace()
    return after if needs_none else delimiter + after

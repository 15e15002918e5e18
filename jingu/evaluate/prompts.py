"""Rendering of a task's documents to prompts, with the same texts and the same shots as lm-evaluation-harness."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from jinja2 import UndefinedError

from jingu.chat.messages import ConversationError, Message
from jingu.chat.templates import ChatTemplate
from jingu.errors import JinguError, join_words
from jingu.evaluate.task_data import SURROGATE, Row, TaskData
from jingu.evaluate.task_file import TaskSettings, Template
from jingu.evaluate.task_templates import TEMPLATE_ERRORS, render_template

# The harness's seed for shots.
SHOT_SEED = 1234


@dataclass(frozen=True)
class EvaluationSample:
    """A document with its requests to the model.

    Attributes:
        index: index of the document in its split.
        pairs: contexts and continuations to score; for generation, the context and an empty text; for rolling
            likelihood, an empty context and the text.
        choices: texts of the choices.
        gold: the right answers: indices of choices, or texts.
        is_list: whether the right answers are a list, even of one text.
    """

    index: int
    row: Row
    pairs: tuple[tuple[str, str], ...]
    choices: Sequence[str] = ()
    gold: tuple[Any, ...] = ()
    is_list: bool = False


@dataclass(frozen=True)
class Turn:
    """A message of a prompt, and the delimiter after it in prompts that are plain text."""

    role: Literal["system", "user", "assistant"]
    content: str
    delimiter: str = ""


class PromptRenderer:
    """Renders the documents of a task.

    Attributes:
        num_shots: shots in each prompt.
        template: chat template of the prompts, whose messages are the description (system) and a turn of question and
            answer for each shot, as in the harness; None: prompts are plain text.
        refusals: why the template refused descriptions, which were then left out.
    """

    def __init__(
        self, task: TaskSettings, data: TaskData, num_shots: int, template: ChatTemplate | None = None
    ) -> None:
        self.task = task
        self.data = data
        self.num_shots = num_shots
        self.template = template
        self.refusals: list[str] = []
        self._columns = frozenset(data.columns)
        self._random = Random(SHOT_SEED)

    def render_all(self, limit: int | None = None) -> list[EvaluationSample]:
        """Return the first `limit` documents as samples (None: all).

        The random shots of a document depend on how many documents were rendered before it.
        """
        return [
            self.render_sample(index, row, self._draw_shots(row) if self.num_shots else ())
            for index, row in enumerate(self.data.rows[:limit])
        ]

    # Fields of a document

    def render(self, key: str, row: Row, template: Template) -> Any:
        """Return a field of a document.

        Args:
            key: of the task file. A rendered `doc_to_target` or `doc_to_choice` may stand for a list; a target or
                `doc_to_text` for the number of a choice.
        """
        if callable(template):
            return self.task.call(key, template, row)
        if not isinstance(template, str):
            return template
        if template in self._columns:
            return row.get(template)
        try:
            text = render_template(template, row)
        except UndefinedError as error:
            fix = f"The columns of its data are {join_words(sorted(self._columns), 'and')}."
            raise self.task.error(f"its {key} uses a column that the data do not have: {error}.", fix) from None
        except TEMPLATE_ERRORS as error:
            words = str(error) or type(error).__name__
            raise self.task.error(f"its {key} cannot be rendered: {words}.", "Correct it.") from None
        # Only ASCII: other digits, such as ², are no numbers.
        is_number = text.isdigit() and text.isascii()
        if key in ("doc_to_text", "doc_to_target") and is_number and self.task.doc_to_choice is not None:
            return int(text)
        if key in ("doc_to_target", "doc_to_choice") and text[:1] == "[" and text[-1:] == "]":
            return _parse_list(text)
        return text

    def _choices(self, row: Row, template: Template) -> list[str]:
        choices = self.render("doc_to_choice", row, template)
        choices = list(choices.values()) if isinstance(choices, dict) else choices
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise self._wrong("doc_to_choice", choices, "no list of texts")
        return choices

    def _wrong(self, key: str, value: Any, why: str = "neither a text nor one of the choices") -> JinguError:
        what = f"its {key} gives {value!r} for a document, which is {why}."
        return self.task.error(what, "Check it, and the data's labels.")

    # Prompts

    def _turns(
        self, question: Any, answer: Any, choices: Sequence[str], prefix: str | None, ends: tuple[str, str]
    ) -> list[Turn]:
        """Return a question and its answer as messages; or if the answer is None, the question and the prefix.

        Args:
            prefix: what an answer starts with.
            ends: delimiters after the question and after the answer.
        """
        if not isinstance(question, str):
            raise self._wrong("doc_to_text", question)
        has_answer = answer is not None and answer != ""
        delimiter = ends[0] if has_answer and not prefix else ""
        if prefix:
            delimiter = _delimit(question, prefix, ends[0]).removesuffix(prefix)
        turns = [Turn("user", question, delimiter)]
        if not has_answer:
            return [*turns, Turn("assistant", prefix)] if prefix else turns
        if isinstance(answer, int) and 0 <= answer < len(choices):
            answer = choices[answer]
        elif isinstance(answer, list) and answer:
            answer = answer[0]
        if not isinstance(answer, str):
            raise self._wrong("doc_to_target", answer)
        text = prefix + _delimit(prefix, answer, " ") if prefix else answer
        return [*turns, Turn("assistant", text, ends[1])]

    def _context(self, turns: Sequence[Turn]) -> str:
        """Return a prompt: its messages as plain text, or in the chat template."""
        if self.template is None:
            return "".join(turn.content + turn.delimiter for turn in turns)
        continues = turns[-1].role == "assistant"
        messages = tuple(Message(turn.role, turn.content) for turn in turns)
        try:
            return self.template.render_prompt(messages, continue_final=continues).text
        except ConversationError as error:
            other_messages = tuple(message for message in messages if message.role != "system")
            try:
                text = self.template.render_prompt(other_messages, continue_final=continues).text
            except ConversationError:
                fix = "Leave out the chat, or choose another model."
                raise self.task.error(f"its prompts cannot be messages: {error}.", fix) from None
            self.refusals.append(str(error))
            return text

    def _draw_shots(self, row: Row) -> list[Row]:
        """Draw the shots of the next document with the random numbers of the harness."""
        pool = self.data.pool
        excludes_own = self.data.excludes_own
        count = self.num_shots
        if self.task.shots["sampler"] == "default":
            pool = self._random.sample(pool, min(count + excludes_own, len(pool)))
        shots = [shot for shot in pool if not excludes_own or shot != row][:count]
        if len(shots) < count:
            # The drawn shots contained copies of the document: draw again without these.
            candidates = [shot for shot in self.data.pool if shot != row]
            shots = self._random.sample(candidates, min(count, len(candidates)))
        if len(shots) < count:
            what = f"{count} shots are requested, but the {len(self.data.pool)} documents to draw from are too few."
            raise self.task.error(what, "Set --num-fewshot to less.")
        return shots

    def _examples(self, row: Row, shot_rows: Sequence[Row]) -> list[Turn]:
        """Return the description and the shots."""
        shots = self.task.shots
        description: str = self.render("description", row, self.task.description)
        turns = [Turn("system", description)] if description else []
        for shot in shot_rows:
            question = self.render("doc_to_text", shot, shots["doc_to_text"])
            choices = [] if shots["doc_to_choice"] is None else self._choices(shot, shots["doc_to_choice"])
            if isinstance(question, int):
                # The choices are inputs with a common answer: use the right input as the question.
                question = self._choice(question, choices)
                choices = []
            answer = self.render("doc_to_target", shot, shots["doc_to_target"])
            prefix = self.render("gen_prefix", shot, shots["gen_prefix"])
            ends = (shots["target_delimiter"], shots["fewshot_delimiter"])
            turns += self._turns(question, answer, choices, prefix, ends)
        return turns

    def _choice(self, number: int, choices: Sequence[str]) -> str:
        if not 0 <= number < len(choices):
            raise self._wrong("doc_to_text", number, f"not one of the {len(choices)} choices")
        return choices[number]

    def _delimiter(self, prefix: str | None) -> str:
        """Return the delimiter before a choice: in a chat, none at the start of an answer."""
        if self.template is None or (prefix and not prefix[-1].isspace()):
            return self.task.target_delimiter
        return ""

    def render_sample(self, index: int, row: Row, shot_rows: Sequence[Row]) -> EvaluationSample:
        """Render the requests of a document after some shots."""
        sample = self._render_sample(index, row, shot_rows)
        for text in (text for pair in sample.pairs for text in pair):
            if match := SURROGATE.search(text):
                what = f"its templates give document {index} the half character U+{ord(match[0]):04X}."
                raise self.task.error(what, "Correct the templates, or the data.")
        return sample

    def _render_sample(self, index: int, row: Row, shot_rows: Sequence[Row]) -> EvaluationSample:
        task = self.task
        examples = self._examples(row, shot_rows)
        target = self.render("doc_to_target", row, task.doc_to_target)
        if "loglikelihood" in task.output_type and not isinstance(target, str):
            raise self._wrong("doc_to_target", target)
        if task.output_type == "loglikelihood_rolling":
            return EvaluationSample(index, row, (("", target),))
        choices = [] if task.doc_to_choice is None else self._choices(row, task.doc_to_choice)
        prefix = self.render("gen_prefix", row, task.gen_prefix)
        question = self.render("doc_to_text", row, task.doc_to_text)
        delimiter = self._delimiter(prefix)
        if isinstance(question, int):
            # Each choice is a context, and the target is the common continuation.
            contexts = [
                self._context([*examples, *self._turns(choice, None, (), prefix, ("", ""))]) for choice in choices
            ]
            pairs = [(context, f"{delimiter}{target}") for context in contexts]
            return EvaluationSample(index, row, tuple(pairs), choices, self._gold(question, choices))
        context = self._context([*examples, *self._turns(question, None, choices, prefix, (task.target_delimiter, ""))])
        if task.output_type == "loglikelihood":
            return EvaluationSample(index, row, ((context, target),))
        if task.output_type == "multiple_choice":
            continuations = [f"{delimiter}{choice}" for choice in choices]
            pairs = [(context, continuation) for continuation in continuations]
            if any(metric["metric"] == "acc_mutual_info" for metric in task.metric_list):
                pairs += [("", continuation) for continuation in continuations]
            return EvaluationSample(index, row, tuple(pairs), choices, self._gold(target, choices))
        is_list = isinstance(target, list)
        if choices:
            target = [choices[number] for number in self._gold(target, choices)]
        gold = tuple(target) if isinstance(target, list) else (target,)
        if task.process_results is None and gold in ((), (None,)):
            raise self._no_gold(target)
        return EvaluationSample(index, row, ((context, ""),), choices, tuple(map(str, gold)), is_list)

    def _gold(self, target: Any, choices: Sequence[str]) -> tuple[int, ...]:
        """Return the indices of the right choices. Raises JinguError if there are none, or one is out of range."""
        if self.task.process_results is not None:
            return ()
        numbers = []
        for label in target if isinstance(target, list) else [target]:
            number = choices.index(label) if isinstance(label, str) and label in choices else label
            if number is None or number in ("", -1):
                raise self._no_gold(target)
            if not isinstance(number, int) or not 0 <= number < len(choices):
                what = f"a document has the label {repr(label)[:80]}, and {len(choices)} choices."
                raise self.task.error(what, "Labels count from 0, or are the text of a choice; check doc_to_target.")
            numbers.append(number)
        if not numbers:
            raise self._no_gold(target)
        return tuple(numbers)

    def _no_gold(self, target: Any) -> JinguError:
        what = f"a document has no right answer (its target is {target!r})."
        return self.task.error(what, "Use a split with labels, as validation_split.")


def _parse_list(text: str) -> Any:
    """Return a rendered list, as a list of Python or of JSON; or the text if it is neither.

    Jinja's `tojson` writes a character beyond U+FFFF as two halves, which Python keeps apart and JSON joins.
    """
    try:
        return _join_halves(ast.literal_eval(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _join_halves(value: Any) -> Any:
    """Return a value whose texts have whole characters instead of pairs of halves."""
    if isinstance(value, str) and SURROGATE.search(value):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if isinstance(value, list | tuple):
        return type(value)(map(_join_halves, value))
    return value


def _delimit(before: str, after: str, delimiter: str) -> str:
    """Return `after`, with a delimiter before it unless there is whitespace at the joint."""
    needs_none = not before or before[-1].isspace() or after[:1].isspace()
    return after if needs_none else delimiter + after

"""Generate coverage.md from the ids of tests: `python docs/coverage.py > docs/coverage.md`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jingu.model.families import FAMILIES

ROOT = Path(__file__).parents[1]
OPENING = """\
# Coverage

What is proved for each family, and by which test. A number stands for a test below, run with this family; hover over it
for the id. A dash means that no test proves it: it may work, or be refused.

`python docs/coverage.py > docs/coverage.md` generates this page from the tests that exist; a test checks that it is up
to date. All of them ran on CPUs, with small models of the family. [Families](guides/families.md) has the components of
each.

"""
PARITY = "tests/parity/test_family_proofs.py::"
TASKS = "tests/parity/test_family_tasks.py::"
TRANSFORMERS = "tests/parity/test_transformers.py::"
ENCODERS = "tests/parity/test_encoder_decoder.py::"
# Tests of each capability, of which the first one that runs with a family counts, and what they prove.
PROOFS: dict[str, dict[str, str]] = {
    "load": {
        "tests/parity/test_tabled_families.py::test_logits_through_files_both_ways": "the logits of files that "
        "transformers wrote are those of transformers, and the other way round",
        f"{PARITY}test_generation_in_a_batch_equals_one_by_one_uncached_and_transformers": "a folder of transformers "
        "generates its greedy text",
        f"{TRANSFORMERS}test_what_is_exported_is_opened_to_the_last_bit_and_by_transformers": "files both ways",
        f"{ENCODERS}test_what_is_exported_is_opened_to_the_last_bit_and_by_transformers": "files both ways",
    },
    "full": {
        f"{PARITY}test_loss_and_gradients": "loss and all gradients equal those of transformers, in fp32 and fp64",
        f"{TRANSFORMERS}test_logits_loss_and_gradients_equal": "logits, loss and gradients equal the reference",
        f"{ENCODERS}test_logits_loss_and_gradients_equal": "logits, loss and gradients equal the reference",
    },
    "LoRA": {
        f"{PARITY}test_a_trained_adapter_in_peft_and_back": "a trained adapter computes the same in peft, and comes "
        "back",
        "tests/formats/test_peft.py::test_adapters_of_models_that_are_exported_as_another_family": "adapters in peft",
        "tests/tune/test_methods.py::test_methods_learn_and_exchange_files_with_peft": "methods learn, and exchange "
        "files with peft",
    },
    "preferences": {
        f"{TASKS}test_preferences_are_learned": "DPO begins at ln 2 in fp64, and its loss falls",
    },
    "rewards": {
        f"{TASKS}test_rewards_are_learned_from_what_was_sampled": "GRPO trains on the log-probabilities that it "
        "sampled from, to 1e-9",
        "tests/align/test_policy_variants.py::test_exact_ratios_are_1_at_learning_rate_0": "ratios of GRPO are 1 to "
        "the bit",
    },
    "layouts": {
        f"{PARITY}test_layouts_equal_one_rank": "losses and gradients of tensor, pipeline, context and data "
        "parallelism equal those of one rank",
        "tests/dist/test_layouts.py::test_tensor": "tensor parallelism equals one rank",
    },
    "packed": {
        f"{PARITY}test_sequences_together_equal_each_alone": "documents in one row equal each alone, with gradients",
        "tests/model/test_encoder_decoder.py::test_documents_equal_separate_runs": "documents in one row equal each "
        "alone",
    },
    "evaluate": {
        f"{TASKS}test_scores_are_those_of_transformers": "log-probabilities of continuations are those of transformers",
        "tests/parity/test_lm_eval.py::test_results_are_those_of_the_harness": "results are those of the harness",
    },
    "serve": {
        f"{TASKS}test_greedy_text_over_http_is_that_of_transformers": "greedy text over HTTP is that of transformers",
    },
    "export": {
        f"{PARITY}test_export_restores_the_folder": "an export has the files that transformers wrote, to the bit",
        f"{TRANSFORMERS}test_what_is_exported_is_opened_to_the_last_bit_and_by_transformers": "files both ways",
        f"{ENCODERS}test_what_is_exported_is_opened_to_the_last_bit_and_by_transformers": "files both ways",
    },
    "GGUF": {
        "tests/formats/test_gguf_export.py::test_llama_cpp_computes_the_same": "llama.cpp computes the same from an "
        "exported file",
    },
}
# Parts of an id that must be there where a function proves several things.
NEEDED = {f"{PARITY}test_sequences_together_equal_each_alone": "documents"}


def collect_ids() -> dict[str, list[str]]:
    """Return the parameters of all tests of the functions of `PROOFS`, such as `gemma2-fp64`."""
    functions = {function for proofs in PROOFS.values() for function in proofs}
    files = sorted({function.partition("::")[0] for function in functions})
    options = ["--collect-only", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib -q"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    ids: dict[str, list[str]] = {function: [] for function in functions}
    for line in lines:
        match = re.fullmatch(r"(tests/\S+?)\[(.+)\]", line)
        if match and match[1] in ids:
            ids[match[1]].append(match[2])
    return ids


def find_id(family: str, parameters: Sequence[str], needed: str | None) -> str | None:
    """Return the first parameters that name a family; None if none do."""
    fitting = [each for each in parameters if family in each.split("-") and (needed or "") in each]
    return min(fitting, key=lambda each: each != family) if fitting else None


def guide(ids: dict[str, list[str]]) -> str:
    """Return the page.

    Args:
        ids: the parameters of tests by function.
    """
    numbers = {
        function: number
        for number, function in enumerate(dict.fromkeys(each for proofs in PROOFS.values() for each in proofs), start=1)
    }
    lines = [OPENING + "| family | " + " | ".join(PROOFS) + " |", "|---" * (len(PROOFS) + 1) + "|"]
    for family in sorted(FAMILIES.built_in):
        cells = []
        for proofs in PROOFS.values():
            found = ((function, find_id(family, ids[function], NEEDED.get(function))) for function in proofs)
            cell = next(((function, each) for function, each in found if each is not None), None)
            cells.append("—" if cell is None else f'[{numbers[cell[0]]}](#tests "{cell[0]}[{cell[1]}]")')
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    words = {function: text for proofs in PROOFS.values() for function, text in proofs.items()}
    lines += ["", "## Tests", ""]
    lines += [f"{number}. `{function}`: {words[function]}." for function, number in numbers.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(guide(collect_ids()), end="")

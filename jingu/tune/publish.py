"""`jingu export --push`: upload an export to Hugging Face's hub, with a model card."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from jingu.checkpoint.resume import run_config
from jingu.config.schema import RunConfig
from jingu.errors import JinguError, join_words
from jingu.evaluate.result_files import RESULT_SUFFIX
from jingu.formats.export import convert_calibrated
from jingu.formats.gguf_export import LLAMA_CPP_TYPES, PACKAGE_TYPES, export_gguf
from jingu.formats.models import open_model
from jingu.formats.provenance import Record, read_provenance
from jingu.formats.quantized_forms import CALIBRATED_FORMS, FORMS
from jingu.runtime.device import DTYPES
from jingu.runtime.files import read_json, write_text_atomically
from jingu.runtime.hub import HubName, explain_hub_errors, local_path, parse_name
from jingu.tune import adapter_commands
from jingu.version import __version__


def export(
    model: Path,
    to: Path | None = None,
    dtype: str = "auto",
    check: bool = False,
    push: str | None = None,
    public: bool = False,
    yes: bool = False,
    calibrate: Path | None = None,
) -> None:
    """Write any model as a Hugging Face folder or a GGUF file, and upload it.

    Args:
        to: the new folder, or a .gguf file; None: only the hub gets the export.
        dtype: as for `convert`.
        check: as for `convert`.
        push: ORG/NAME on the hub; None: nothing is uploaded.
        public: whether a new repository is public.
        yes: whether files of an existing repository are replaced without a question.
        calibrate: as for `convert_calibrated`.

    Raises:
        JinguError: as for `convert`; or the upload is refused.
    """
    if dtype not in {"auto", *DTYPES, *FORMS, *PACKAGE_TYPES, *LLAMA_CPP_TYPES}:
        raise JinguError(f"there is no dtype {dtype}.", where="--dtype", fix="Such as bf16, fp8, q8_0 or q4_k_m.")
    if calibrate is not None and dtype not in (*CALIBRATED_FORMS, *LLAMA_CPP_TYPES):
        what = f"{dtype} has nothing to calibrate."
        fix = f"Leave it out, or set --dtype to {join_words((*CALIBRATED_FORMS, *LLAMA_CPP_TYPES))}."
        raise JinguError(what, where="--calibrate", fix=fix)
    if to is not None and to.suffix == ".gguf":
        file = to
        if dtype in set(FORMS) - PACKAGE_TYPES.keys():
            what = f"{dtype} is a type of Hugging Face folders only."
            raise JinguError(what, where="--dtype", fix="Name a folder with --to, or use a type such as q4_k_m.")

        if calibrate is not None and dtype not in LLAMA_CPP_TYPES:
            what = f"{dtype} of GGUF files has nothing to calibrate."
            raise JinguError(what, where="--calibrate", fix="Leave it out, or set --dtype to a type such as q4_k_m.")

        def write(_folder: Path) -> None:
            export_gguf(open_model(model), file, dtype, check, calibrate)

        _write_and_push(model, file.parent, push, write, public, yes, file.name)
        return
    if dtype in {*PACKAGE_TYPES, *LLAMA_CPP_TYPES} - {*DTYPES, *FORMS}:
        what = f"{dtype} is a type of GGUF files only."
        raise JinguError(what, where="--dtype", fix="Name the file with --to MODEL.gguf.")
    _write_and_push(
        model, to, push, lambda folder: convert_calibrated(model, folder, dtype, check, calibrate), public, yes
    )


def export_adapters(
    run: Path, to: Path | None = None, push: str | None = None, public: bool = False, yes: bool = False
) -> None:
    """Write the adapters of a run as a folder that peft loads, or a GGUF file, and upload it.

    Arguments and errors: as for `export`.
    """
    file = to if to is not None and to.suffix == ".gguf" else None
    place = to if file is None else file.parent
    name = "" if file is None else file.name
    _write_and_push(run, place, push, lambda folder: adapter_commands.export(run, file or folder), public, yes, name)


def _write_and_push(
    model: Path,
    to: Path | None,
    push: str | None,
    write: Callable[[Path], None],
    public: bool,
    yes: bool,
    file: str = "",
) -> None:
    """Call `write` with the folder of the export, and upload what it wrote.

    Args:
        file: name of the only file that is uploaded, with its Modelfile and the card; empty: the whole folder.
    """
    if push is None:
        if to is None:
            raise JinguError("an export needs a place.", where="--to", fix="Set --to FOLDER, --push ORG/NAME, or both.")
        write(to)
        return
    name = _read_name(push)
    # A refused upload is known before the export takes its time.
    _check_repository(name, yes=yes)
    with tempfile.TemporaryDirectory(prefix="jingu-export-") as temporary:
        folder = to or Path(temporary) / "export"
        write(folder)
        write_text_atomically(folder / CARD_NAME, write_card(model, folder, name.repository))
        _upload(name, folder, [file, "Modelfile", CARD_NAME] if file else None, public=public)


def _read_name(text: str) -> HubName:
    # A local folder of the same name does not matter: a repository is meant.
    name = parse_name(text if ":" in text else f"hf:{text}")
    if name is None or name.service != "hf" or name.file is not None or name.parts or name.revision:
        raise JinguError("this is not the name of a repository.", where="--push", fix="Write ORG/NAME.")
    return name


def _check_repository(name: HubName, *, yes: bool) -> None:
    """Raise JinguError if the repository has files already and nobody agrees that they are replaced."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    with explain_hub_errors(name):
        api = HfApi()
        api.whoami()
        try:
            files = [file for file in api.list_repo_files(name.repository) if file != ".gitattributes"]
        except RepositoryNotFoundError:
            files = []
    if not files or yes:
        return
    question = f"{name.repository} has {len(files)} files already. Replace those of the same name? [y/N] "
    if not sys.stdin.isatty():
        what = f"the repository has {len(files)} files already, and they are not replaced without a question."
        raise JinguError(what, where=name.repository, fix="Add --yes, or choose another name.")
    if input(question).strip().lower() not in ("y", "yes"):
        raise JinguError("nothing was uploaded.", where=name.repository, fix="Choose another name.")


def _upload(name: HubName, folder: Path, files: list[str] | None, *, public: bool) -> None:
    from huggingface_hub import HfApi

    with explain_hub_errors(name):
        api = HfApi()
        # Only a new repository becomes private or public: an existing one stays as it is.
        url = api.create_repo(name.repository, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=name.repository,
            folder_path=folder,
            allow_patterns=files,
            commit_message="Upload the export of jingu",
        )
    print(f"Uploaded it to {url}.")


# The model card of an export: README.md with what a run says of its model, in the format of Hugging Face's hub.

CARD_NAME = "README.md"
_FIX = "Evaluate the task again, or delete the file."


def write_card(model: Path, folder: Path, name: str) -> str:
    """Return the text of a model card.

    Args:
        model: the run (or a step of it) that trained the model, or any other model.
        folder: the export.
        name: title of the card.
    """
    run = next((path for path in (model, model.absolute().parent.parent) if (path / "model.json").is_file()), None)
    config = None if run is None else run_config(run)
    record = read_provenance(model)
    sections = [
        f"# {name}",
        _describe_training(config, record),
        _describe_data(record),
        "" if run is None else _describe_scores(run / "evaluations"),
        _describe_template(folder),
        _describe_use(name, folder),
        f"Written by [jingu](https://github.com/jingu-llm/jingu) {__version__}.",
    ]
    header = yaml.safe_dump(_header(config, record, folder), sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _header(config: RunConfig | None, record: Record | None, folder: Path) -> dict[str, Any]:
    """Return the metadata of the card, which the hub indexes."""
    base = _base_name(record)
    header: dict[str, Any] = {"library_name": "peft" if (folder / "adapter_config.json").is_file() else "transformers"}
    if base is not None and (hub_name := parse_name(base)) is not None:
        header["base_model"] = hub_name.repository
    header["license"] = _license(base)
    header["tags"] = ["jingu", *([] if config is None else [config.task.type])]
    names = [name for path in _data_inputs(config) if (name := parse_name(path)) is not None]
    if names:
        header["datasets"] = sorted({name.repository for name in names})
    return header


def _data_inputs(config: RunConfig | None) -> list[str]:
    inputs: list[str] = []
    for source in [] if config is None else config.data.all_sources:
        inputs += [source.input] if isinstance(source.input, str) else source.input
    return inputs


def _base_name(record: Record | None) -> str | None:
    """Return the path or name of the model that training started from; None if it started from random weights."""
    return None if record is None or record["initial"] is None else str(record["initial"]["model"])


def _license(base: str | None) -> str:
    """Return the license that the base's own card names; `other` if it is unknown."""
    card = None if base is None else local_path(base) / CARD_NAME
    if card is None or not card.is_file():
        return "other"
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", maxsplit=2)
    try:
        header = yaml.safe_load(parts[1]) if len(parts) == 3 else None
    except yaml.YAMLError:
        header = None
    return str(header.get("license", "other")) if isinstance(header, dict) else "other"


def _describe_training(config: RunConfig | None, record: Record | None) -> str:
    if config is None:
        return ""
    base = _base_name(record)
    rows = [
        ("task", config.task.type),
        ("initial model", f"`{base}`" if base is not None else "random weights"),
        ("tuning", config.tune.type),
        ("steps", f"{config.train.steps:,}"),
        ("sequences per step", f"{config.batch.global_batch_size:,}"),
        ("sequence length", f"{config.batch.sequence_length:,}"),
        ("optimizer", f"{config.optimizer.type}, learning rate {config.optimizer.lr:g}"),
        ("precision", config.precision.type),
        ("seed", str(config.seed)),
    ]
    lines = ["## Training", "", "| setting | value |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows)])


def _describe_data(record: Record | None) -> str:
    """Return a list of the data sets of the model and of all its ancestors."""
    lines: list[str] = []
    while record is not None:
        for data in record["data"]:
            lines.append(f"- `{data.get('path', 'unknown')}`")
        record = None if record["initial"] is None else record["initial"]["record"]
    return "\n".join(["## Data", "", *dict.fromkeys(lines)]) if lines else ""


def _describe_scores(folder: Path) -> str:
    """Return a table of the results of `jingu evaluate`, each with its 95% interval."""
    rows = []
    for file in sorted(folder.glob(f"*{RESULT_SUFFIX}")):
        content = read_json(file, _FIX)
        if "model" not in content:
            continue  # another file of results, such as the spread of a metric
        precision = content["model"].get("precision", "unknown")
        for key, metric in content["results"].items():
            low, high = metric.get("interval_low"), metric.get("interval_high")
            interval = "unknown" if low is None or high is None else f"{low:.4f} to {high:.4f}"
            name = key.removesuffix(",none")
            rows.append(f"| {content['task']} | {name} | {metric['value']:.4f} | {interval} | {precision} |")
    header = ["## Evaluation", "", "| task | metric | value | 95% interval | precision |", "|---|---|---|---|---|"]
    return "\n".join([*header, *rows]) if rows else ""


def _describe_template(folder: Path) -> str:
    if not (folder / "chat_template.jinja").is_file():
        return ""
    return "## Chat\n\nThe model was trained with the chat template in `chat_template.jinja`; transformers applies it."


def _describe_use(name: str, folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")',
        ]
    else:
        lines = ["from transformers import pipeline", f'generate = pipeline("text-generation", model="{name}")']
    code = "\n\n".join(lines)
    return f"## Use\n\n```python\n{code}\n```\n\n```sh\njingu chat {name}\n```"

"""`jingu export --push`: upload an export to Hugging Face's hub, with a model card."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from jingu.errors import JinguError
from jingu.formats.export import convert
from jingu.formats.gguf_export import LLAMA_CPP_TYPES, PACKAGE_TYPES, export_gguf
from jingu.formats.models import open_model
from jingu.runtime.device import DTYPES
from jingu.runtime.files import write_text_atomically
from jingu.runtime.hub import HubName, explain_hub_errors, parse_name
from jingu.tune import adapter_commands
from jingu.tune.model_card import CARD_NAME, write_card


def export(
    model: Path,
    to: Path | None = None,
    dtype: str = "auto",
    check: bool = False,
    push: str | None = None,
    public: bool = False,
    yes: bool = False,
) -> None:
    """Write any model as a Hugging Face folder or a GGUF file, and upload it.

    Args:
        to: the new folder, or a .gguf file; None: only the hub gets the export.
        dtype: as for `convert`.
        check: as for `convert`.
        push: ORG/NAME on the hub; None: nothing is uploaded.
        public: whether a new repository is public.
        yes: whether files of an existing repository are replaced without a question.

    Raises:
        JinguError: as for `convert`; or the upload is refused.
    """
    if to is not None and to.suffix == ".gguf":
        file = to

        def write(_folder: Path) -> None:
            export_gguf(open_model(model), file, dtype, check)

        _write_and_push(model, file.parent, push, write, public, yes, file.name)
        return
    if dtype in {*PACKAGE_TYPES, *LLAMA_CPP_TYPES} - DTYPES.keys():
        what = f"{dtype} is a type of GGUF files only."
        raise JinguError(what, where="--dtype", fix="Name the file with --to MODEL.gguf.")
    _write_and_push(model, to, push, lambda folder: convert(model, folder, dtype, check), public, yes)


def export_adapters(
    run: Path, to: Path | None = None, push: str | None = None, public: bool = False, yes: bool = False
) -> None:
    """Write the adapters of a run as a folder that peft loads, and upload it. Arguments and errors: as for `export`."""
    _write_and_push(run, to, push, lambda folder: adapter_commands.export(run, folder), public, yes)


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

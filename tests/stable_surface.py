"""What is stable (docs/stability.md), as data: `python -m tests.stable_surface` writes the state of a release.

Each part of the surface is a mapping of names to descriptions. `tests/stable_surface.json` has them as of the last
release. `tests/test_stability.py` compares: what has gone or changed since must be named in the changelog.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

import jingu
from jingu import api
from jingu.checkpoint import manifest
from jingu.command_table import COMMANDS
from jingu.config.introspect import accepted_types, describe_types, fields_by_key, item_section_types, section_types
from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings
from jingu.plugins import INTERFACE, KINDS, Registry
from jingu.tables import import_name
from jingu.version import __version__

ROOT = Path(__file__).parents[1]
SNAPSHOT = ROOT / "tests" / "stable_surface.json"
Surface = dict[str, dict[str, str]]
# The bases and the records of the plug-in interface, beside the tables of `KINDS`.
INTERFACE_CLASSES = (
    "jingu.align.scorer:RewardContext",
    "jingu.align.scorer:RewardScorer",
    "jingu.align.verifiers:Verifier",
    "jingu.config.sections.optimizers:OptimizerBase",
    "jingu.config.sections.optimizers:Slot",
    "jingu.config.sections.pairs:AnswerLogProbs",
    "jingu.config.sections.pairs:PairBase",
    "jingu.config.sections.pairs:Scored",
    "jingu.config.sections.policies:AdvantageEntry",
    "jingu.config.sections.rewards:RewardBase",
    "jingu.config.sections.rewards:VerifierBase",
    "jingu.config.sections.schedules:Moment",
    "jingu.config.sections.schedules:ScheduleBase",
    "jingu.config.sections.task_base:TaskBase",
    "jingu.model.families.family:Family",
    "jingu.training.optimizer:ShardedOptimizer",
    "jingu.training.task:Task",
    "jingu.training.task:TaskFactory",
    "jingu.training.trackers:Tracker",
)


def settings_surface() -> dict[str, str]:
    """Every key of a run's file, with what it accepts and its default; each of several choices by itself."""
    return dict(_keys(RunConfig, ""))


def _keys(section: type[Settings], prefix: str) -> Iterator[tuple[str, str]]:
    for key, field in fields_by_key(section).items():
        default = field.get_default(call_default_factory=True)
        nested = section_types(field) or item_section_types(field)
        if not nested:
            types = accepted_types(field)
            choices = [each.value for each in types if each.type is Literal]
            others = [each for each in types if each.type is not Literal]
            yield f"{prefix}{key}", f"{describe_types(others) if others else 'a choice'}; {default!r}"
            yield from ((f"{prefix}{key}={choice}", "accepted") for choice in choices if choice is not None)
        for tag, variant in nested.items():
            yield from _keys(variant, f"{prefix}{key}." if not tag else f"{prefix}{key}({tag}).")


def command_surface() -> dict[str, str]:
    """The commands, and the names of their arguments."""
    names = dict.fromkeys(COMMANDS, "command")
    return names | {
        f"{name} {argument}": "argument" for name, command in COMMANDS.items() for argument, _ in command.arguments
    }


def python_surface() -> dict[str, str]:
    """The Python interface: the members of `jingu` and of its classes, with their signatures."""
    members = {
        name: getattr(api, name) for name in jingu.__all__ if name not in ("Config", "JinguError", "__version__")
    }
    return dict(item for name, member in members.items() for item in _signatures(f"jingu.{name}", member))


def _signatures(name: str, member: Any) -> Iterator[tuple[str, str]]:
    """Yield a function's signature; of a class those of its public methods, and the names of its fields."""
    if not inspect.isclass(member):
        yield name, str(inspect.signature(member))
        return
    yield name, "class"
    for field in getattr(member, "model_fields", getattr(member, "__annotations__", {})):
        if not field.startswith("_"):
            yield f"{name}.{field}", "field"
    for key, value in vars(member).items():
        is_hook = key in ("__len__", "__getitem__", "__iter__") or (key == "__init__" and member is api.Dataset)
        if (is_hook or not key.startswith("_")) and inspect.isfunction(value):
            yield f"{name}.{key}", str(inspect.signature(value))
        elif isinstance(value, property) and not key.startswith("_"):
            yield f"{name}.{key}", "property"


def plugin_surface() -> dict[str, str]:
    """The plug-in interface: its version, its tables, and the classes that plug-ins extend or make."""
    surface = {"interface": str(INTERFACE)}
    for kind, reference in KINDS.items():
        registry: Registry[Any] = import_name(reference)
        surface[kind] = "table"
        surface |= {f"{kind} {name}": "entry" for name in registry.built_in}
    for reference in INTERFACE_CLASSES:
        surface |= dict(_signatures(reference.rpartition(":")[2], import_name(reference)))
    return surface


def http_surface() -> dict[str, str]:
    """The fields of every protocol that are carried."""
    spec = spec_from_file_location("protocols_guide", ROOT / "docs" / "guides" / "protocols.py")
    assert spec is not None and spec.loader is not None
    guide = module_from_spec(spec)
    spec.loader.exec_module(guide)
    bodies = {title: body for title, (_, body) in guide.PROTOCOLS.items()}
    bodies |= {inner.__name__: inner for body in bodies.values() for inner in guide.inner_classes(body)}
    return {
        f"{title}: {name}": "required" if field.is_required() else "optional"
        for title, body in bodies.items()
        for key, field in body.model_fields.items()
        for name in guide.names_of_field(key, field)
    }


def run_surface(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The lines of metrics.jsonl with the types of their values, and the checkpoints of a run with an evaluation.

    Args:
        folder: a folder for the run.
    """
    text = folder / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps over the lazy dog\n" * 20)
    config = {
        "name": "stable",
        "runs_dir": str(folder / "runs"),
        "tokenizer": {"path": str(folder / "tokenizer"), "vocab_size": 300},
        "data": {"input": str(text), "path": str(folder / "data"), "validation_fraction": 0.3, "num_workers": 1},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
        "batch": {"sequence_length": 16, "global_batch_size": 4},
        "train": {"steps": 2, "log_every": 1, "compile": False},
        "evaluation": {"every": 2, "num_sequences": 2, "sample_prompts": ["the"], "max_new_tokens": 2},
        "precision": {"type": "fp32"},
        "device": {"type": "cpu", "threads": 1},
    }
    jingu.train_tokenizer(config)
    jingu.build_dataset(config)
    run = jingu.train(config)
    metrics: dict[str, str] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for key, value in row.items():
            metrics[f"{row['type']}: {key}"] = "number" if type(value) in (int, float) else type(value).__name__
    (step,) = (run / "checkpoints").glob("step-*")
    record = manifest.read_manifest(step / manifest.MANIFEST)
    state = json.loads((step / manifest.STATE).read_text(encoding="utf-8"))
    checkpoint = {"version": str(manifest.VERSION)}
    checkpoint |= {f"file {path.name}": "a run's file" for path in run.iterdir()}
    checkpoint |= {f"file {path.name}": "a checkpoint's file" for path in step.iterdir()}
    checkpoint |= {f"tensor {name}": str(list(tensor.shape)) for name, tensor in record.tensors.items()}
    for part in (manifest.Manifest, manifest.FileRecord, manifest.TensorRecord, manifest.Piece):
        checkpoint |= {f"manifest {part.__name__}.{name}": "field" for name in part.model_fields}
    checkpoint |= {f"state {key}": type(value).__name__ for key, value in state.items()}
    return metrics, checkpoint


def surface(folder: Path) -> Surface:
    """Return the whole surface. A run is made in `folder`."""
    metrics, checkpoint = run_surface(folder)
    return {
        "settings": settings_surface(),
        "commands": command_surface(),
        "python": python_surface(),
        "plug-ins": plugin_surface(),
        "http": http_surface(),
        "metrics": metrics,
        "checkpoint": checkpoint,
    }


def main() -> None:
    """Write the surface as that of the current version."""
    with tempfile.TemporaryDirectory() as folder:
        content = {"version": __version__, **surface(Path(folder))}
    SNAPSHOT.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

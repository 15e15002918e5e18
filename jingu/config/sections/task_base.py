"""What every task declares: its factory, its phases, and the models that it holds beside the trained one."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from jingu.config.sections.base import Settings


class AuxiliaryModel(NamedTuple):
    """A model that a task holds beside the trained one.

    Attributes:
        name: its name in plans, and of its tensors in checkpoints if it is trained.
        path: where it is loaded from; None: it has the shape of the trained model, without its adapter.
        role: frozen: it scores answers, and is sharded like the trained model. trained: also has an optimizer, and is
            saved. whole: unsharded in the first rank's main memory, in fp32. before: it is loaded before the first
            step only.
        has_score_head: whether it has a scalar head.
    """

    name: str
    path: str | None
    role: Literal["frozen", "trained", "whole", "before"]
    has_score_head: bool = False


class TaskBase(Settings):
    """Settings of every task."""

    # The task's `TaskFactory`, as module:name. Settings and plans do not import it.
    FACTORY: ClassVar[str]
    # The phases of a step, which run one after another.
    PHASES: ClassVar[tuple[Literal["generation", "update"], ...]] = ("update",)

    type: str

    def models(self, initial: str | None) -> tuple[AuxiliaryModel, ...]:
        """Return the models that the task holds beside the trained one.

        Args:
            initial: the model that the run starts from, `initialize.from`.
        """
        return ()

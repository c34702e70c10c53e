"""The interface of a recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from ebbtide_recipes.skeleton.config import RecipeConfig

if TYPE_CHECKING:
    from ebbtide_recipes.skeleton.trainer import RecordedTrainer

ConfigT = TypeVar("ConfigT", bound=RecipeConfig)


class Recipe(ABC, Generic[ConfigT]):
    """A kind of training. ``run.main(recipe, config)`` calls these in order: ``check_data``, ``check``,
    ``prepare``, ``finish``.

    Everything else (flags that all recipes share, torchrun, FSDP's settings, the output folder, log and run file,
    offloading, checkpoints and resuming) is the skeleton's.

    Attributes:
        name: The verb of the command line.
        packages: What must be installed.
        extra: The extra of ebbtide that installs them.
    """

    name: ClassVar[str]
    packages: ClassVar[Sequence[str]]
    extra: ClassVar[str] = "recipes"

    @abstractmethod
    def check_data(self, config: ConfigT) -> None:
        """Reject data sets that do not exist or whose first rows cannot be used, without importing torch if possible.

        Raises:
            EbbtideError: A data set cannot be used.
        """

    @abstractmethod
    def check(self, config: ConfigT) -> None:
        """Reject settings that must fail, before anything is loaded, fetched or written.

        Raises:
            EbbtideError: A setting must fail.
        """

    @abstractmethod
    def prepare(self, config: ConfigT) -> RecordedTrainer | None:
        """Load model and data, and make the trainer. Checks come before slow steps.

        Returns:
            The trainer; ``None`` if the flags request preparation only.

        Raises:
            EbbtideError: The model or the data cannot be used.
        """

    def finish(self, config: ConfigT, trainer: RecordedTrainer, folder: Path) -> None:
        """Write further output next to the trained model; by default nothing."""

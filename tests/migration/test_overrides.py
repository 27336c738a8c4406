"""Other systems' ways to configure a trainer by methods are refused where the class is defined."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop import Trainer
from eventloop.bridges import DrivenTrainer
from eventloop.events import Event
from eventloop.events.base import known_events


@pytest.mark.parametrize(
    ("method", "meant"),
    [
        ("build_writers", r"use writers=\[...\] of the Trainer"),
        ("build_hooks", r"use hooks=\[...\] of the Trainer"),
        ("build_optimizer", "use optimizer=..."),
        ("build_lr_scheduler", r"use schedulers=\[...\]"),
        ("run_step", r"use train_step=... of the Trainer, a function \(trainer, batch\)"),
        ("training_step", "use train_step="),
        ("validation_step", "use val_step="),
        ("configure_optimizers", "use optimizer=... and schedulers="),
        ("compute_loss", "use loss_fn=... or train_step="),
        ("get_train_dataloader", "use train_loader="),
        ("after_train_epoch", r"use after_train_epoch\(self, trainer, event\) of a Hook"),
        ("on_train_start", r"use before_train\(self, trainer, event\) of a Hook"),
        ("after_step", r"use after_step\(self, trainer, event\) of a Hook"),
        ("before_epoch", r"use before_epoch\(self, trainer, event\) of a Hook"),
        ("on_batch_end", r"use after_iter\(self, trainer, event\) of a Hook"),
        ("training_epoch_end", r"use after_train_epoch\(self, trainer, event\) of a Hook"),
        ("validation_epoch_end", "use evaluator=..."),
    ],
)
@pytest.mark.parametrize("base", [Trainer, DrivenTrainer])
def test_a_method_that_is_never_called_is_refused(base: type[Trainer], method: str, meant: str) -> None:
    """The error names the class and the method, and says what to write."""
    with pytest.raises(TypeError, match=rf"Mine\.{method} would never be called.*{meant}"):
        type("Mine", (base,), {method: lambda self, *args: []})


def test_static_and_class_methods_are_refused_too() -> None:
    """detectron2's builders are class methods."""
    with pytest.raises(TypeError, match=r"Mine\.build_train_loader would never be called"):
        type("Mine", (Trainer,), {"build_train_loader": classmethod(lambda cls, cfg: [])})


def test_a_mixin_is_looked_at() -> None:
    """A method that comes from another base class would not be called either."""

    class Mixin:
        def build_hooks(self) -> list[Any]:
            return []

    with pytest.raises(TypeError, match=r"Mine\.build_hooks would never be called"):
        type("Mine", (Mixin, Trainer), {})


def test_own_methods_are_accepted() -> None:
    """Methods of the trainer, attributes, and helpers that the class calls itself, whatever their name."""

    class Mine(Trainer):
        training_step: Any = None

        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch)

        def compute_loss(self, batch: Any) -> Any:
            return super().train_step(batch)

        def forward(self, batch: Any) -> Any:
            return self.compute_loss(batch)

        def report(self) -> str:
            return "mine"

    assert Mine.report is not None


def test_a_method_may_have_the_name_of_a_programs_event() -> None:
    """Only the events of the trainer itself belong to a hook."""

    class Harvested(Event):
        pass

    class Mine(Trainer):
        def harvested(self) -> str:
            return "mine"

    assert Harvested in known_events()["harvested"]
    assert Mine.harvested is not None


def test_a_mixin_may_take_options() -> None:
    """Keyword arguments of the class statement reach the other base class."""

    class Registered:
        def __init_subclass__(cls, tag: str, **options: Any) -> None:
            super().__init_subclass__(**options)
            tags.append(tag)

    tags: list[str] = []

    class Mine(Trainer, Registered, tag="a"):
        pass

    assert (tags, issubclass(Mine, Trainer)) == (["a"], True)

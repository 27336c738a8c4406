"""Fields of live objects: refused where the event is declared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Optional, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec import StructMeta
from torch import Tensor, nn

from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.catalogue import declared_events
from tests.support import process_handlers


def declare(annotation: Any, module: str = __name__) -> type[Event]:
    """The class statement, with a field `size` and one of this annotation."""
    fields = {"__module__": module, "__annotations__": {"size": "int", "what": annotation}}
    return cast(type[Event], StructMeta("LiveProbe", (Event,), fields))


TENSORS: list[Any] = [
    torch.Tensor,
    Tensor | None,
    list[Tensor],
    dict[str, tuple[int, list[Tensor]]],
    Annotated[Tensor, "of the loss"],
    Optional[Tensor],  # noqa: UP045  # which is another class than `Tensor | None`
    list["Tensor"],
    "Tensor",
    "torch.Tensor | None",
    "'Tensor'",
    "Annotated[Tensor, time.strptime('7', '%H')]",  # imports, as NumPy's does in Python 3.13
]
OTHERS: list[tuple[Any, str]] = [
    (nn.Module, "torch.nn.modules.module.Module"),
    (nn.Parameter, "torch.nn.parameter.Parameter"),
    (nn.Linear, "torch.nn.modules.linear.Linear"),
    ("dict[str, list[nn.Module]]", "torch.nn.modules.module.Module"),
    (np.ndarray, "numpy.ndarray"),
    (npt.NDArray[np.float32], "numpy.ndarray"),
    ("npt.NDArray[np.float32]", "numpy.ndarray"),
]
CURES = {
    "torch.Tensor": r"give it a number \(x.item\(\)\), a list \(x.tolist\(\)\), or bytes with their shape and dtype",
    "numpy.ndarray": r"a list \(x.tolist\(\)\)",
    "torch.nn.modules.module.Module": "give it a name; a sync handler finds the module itself in trainer.model",
}


@pytest.mark.parametrize(
    ("annotation", "named"), [*((each, "torch.Tensor") for each in TENSORS), *OTHERS], ids=repr
)
def test_a_live_field_is_refused(annotation: Any, named: str) -> None:
    """With the event, the field, its type and what to do; alone, within others, and as a text; it is not declared."""
    message = rf"field 'what' of event {__name__}.LiveProbe is a {named}, and an event holds plain"
    with pytest.raises(TypeError, match=f"{message}.*{CURES.get(named, '')}"):
        declare(annotation)

    assert "live_probe" not in {event_name(event) for event in declared_events()}


def test_what_only_a_type_checker_imports_is_found() -> None:
    """By the name of its module, where somebody has imported that."""
    assert not hasattr(process_handlers, "torch")

    with pytest.raises(TypeError, match=r"tests\.support\.process_handlers\.LiveProbe is a torch\.Tensor"):
        declare("torch.Tensor", process_handlers.__name__)


class Plain(Event):
    """An event of what may be in one, as it is written."""

    tensors: ClassVar[list[Tensor]] = []
    kind: Literal["torch.Tensor"] = "torch.Tensor"
    labelled: Annotated[float, "torch.Tensor"] = 0.0
    number: np.float32 = np.float32(0)
    anything: Any = None
    nested: dict[str, list[float | None]] = msgspec.field(default_factory=dict)


@pytest.mark.parametrize(
    "annotation",
    [
        "NobodyKnows",
        "NobodyKnows[Tensor]",
        "nobody.knows",
        "not even (python",
        type[Tensor],
        "Callable[[Tensor], int]",
        Callable[[Tensor], int],
        int,
        pytest.param(object(), id="an object"),
    ],
    ids=repr,
)
def test_what_is_no_live_object_or_cannot_be_told_is_passed_over(annotation: Any) -> None:
    """A name that is not found, and a type that holds no such object: the events' encoding tells the rest."""
    declared = declare(annotation, module=f"probes.of.{len(declared_events())}")

    assert declared in declared_events()


def test_looking_at_fields_imports_nothing(python: Any) -> None:
    """A class that names no library declares itself without it."""
    ran = python(
        "import sys\nfrom eventloop.events import Event\n"
        "class Mine(Event):\n    a: 'torch.Tensor' = None\n    b: 'np.ndarray' = None\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )

    assert (ran.stdout, ran.stderr) == ("False False\n", "")
    assert "torch" in sys.modules  # in this process, where it is refused

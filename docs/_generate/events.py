"""Write `docs/events.md`, the list of all events, from their classes: `python -m docs._generate.events`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

PAGE = Path(__file__).resolve().parents[1] / "events.md"
from eventloop.events import health, types
from eventloop.events.base import Event, event_name

FAMILIES = {
    "Run": "BeforeRun",
    "Phases": "BeforeTrain",
    "Epochs": "BeforeTrainEpoch",
    "Iterations": "BeforeTrainIter",
    "The optimizer's step": "AfterBackward",
    "Checkpoints": "BeforeSaveCheckpoint",
    "Logging": "ScalarsLogged",
    "A run that is steered": "CommandApplied",
    "Control and health": "StopRequested",
}
"""The first event of each family, in the order of `eventloop.events.types`, then `eventloop.events.health`."""

HEAD = """\
# All events

<!-- Written by `python -m docs._generate.events` from eventloop/events/types.py and health.py: change it there, and run that again. -->

Subscribe by name, as `@trainer.bus.on("after_train_iter")`, or by class, as
`from eventloop.events import AfterTrainIter`. [The concepts](concepts/events.md) say how to declare an event of your own.

## Fields that events share

| field | type | default | meaning |
|---|---|---|---|
| `iter` | `int` | `0` | the index of the current train iteration, from 0; after an epoch, the index of the next one |
| `epoch` | `int` | `0` | the index of the current epoch, from 0; in a validation after an epoch, the number of completed epochs |
| `max_iters` | `int \\| None` | `None` | the length of the run in iterations, where it is known |
| `max_epochs` | `int \\| None` | `None` | the length of the run in epochs, where it has one |

Every event has these four, except where its family says otherwise. The column *fields* lists what an event has besides.
Events of a phase also have the class attribute `mode`: `"train"`, `"val"`, `"test"` or `"predict"`.

The column *every* says what the filter `every=` counts, from 1:

| every | counts |
|---|---|
| iter | train iterations |
| batch | batches of the validation, test or prediction; of several loaders, those of each |
| epoch | train epochs |
| val_epoch | completed train epochs; how often the event was emitted, where the run has no epochs |
| occurrence | how often the event was emitted |
"""


def page() -> str:
    """Return the page as it has to be."""
    return "\n".join([HEAD, *(line for family in families() for line in _section(*family))]).rstrip() + "\n"


def families() -> Iterator[tuple[str, list[type[Event]]]]:
    """Yield the families with their events, in the order of their definition."""
    heads = {first: family for family, first in FAMILIES.items()}
    family, members = "", list[type[Event]]()
    for cls in own_events():
        if cls.__name__ in heads:
            if members:
                yield family, members
            family, members = heads[cls.__name__], []
        members.append(cls)
    yield family, members


def own_events() -> list[type[Event]]:
    """Return eventloop's events, in the order of their definition; bases are left out."""
    return [
        cls
        for module in (types, health)
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, Event)
        if cls.__module__ == module.__name__ and not cls.__name__.startswith("_")
    ]


def _section(family: str, events: list[type[Event]]) -> Iterator[str]:
    yield f"## {family}"
    yield ""
    if events[0].background_born:
        yield "Hooks cannot subscribe to these: they are made in the background, where a value may be waited for."
        yield ""
    yield from ("| event | meaning | every | fields |", "|---|---|---|---|")
    for cls in events:
        meaning = " ".join((cls.__doc__ or "").split()).replace("|", "\\|")
        yield f"| `{event_name(cls)}` | {meaning} | {cls.counter} | {_fields(cls)} |"
    without = [cls for cls in events if not issubclass(cls, types._LoopEvent)]
    if without:
        names = [f"`{event_name(cls)}`" for cls in without]
        yield ""
        yield f"{', '.join(names[:-1])} and {names[-1]} have no counters of the run."
    yield ""


def _fields(cls: type[Event]) -> str:
    """Return the fields that the events of the loop do not share, with types and defaults."""
    hints = get_type_hints(cls)
    shared = {field.name for field in msgspec.structs.fields(types._LoopEvent)}
    own = [field for field in msgspec.structs.fields(cls) if field.name not in shared]
    return "<br>".join(f"`{field.name}: {_type(hints[field.name])} = {_default(field)}`" for field in own)


def _type(hint: Any) -> str:
    return inspect.formatannotation(hint).replace("|", "\\|")


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

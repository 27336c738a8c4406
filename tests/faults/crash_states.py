"""What a power cut may leave on the disk, for every moment of a commit.

The model is that of ALICE (Pillai et al., OSDI 2014): what was not synced may be there or not, each piece for itself.
The bytes of a file are there after a sync of the file; a name, new, changed or removed, after a sync of its
directory. A rename is there or not, or the new name is and the old one still: no file system gives up the old
name before it has the new one.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eventloop.checkpoint import load_best, load_newest, save_checkpoint
from eventloop.checkpoint.commit import Removals, commit
from eventloop.checkpoint.directory import scan
from eventloop.checkpoint.manifest import Label
from eventloop.checkpoint.serialize import serialize
from eventloop.temporary.leftovers import leftovers, remove_dead
from tests.checkpoints import orphan
from tests.faults.operations import state, value_of, values
from tests.faults.shim import Operation, clear_durable_directories, shimmed

Tree = dict[str, Any]
"""Names, and the bytes of a file or the tree of a directory."""


# --- the model -------------------------------------------------------------------------------------------------


@dataclass
class File:
    """A file: its bytes, and how many of them were synced."""

    data: bytes = b""
    synced: bool = False

    def states(self) -> list[bytes]:
        """What may be left of it."""
        if self.synced:
            return [self.data]
        half = self.data[: len(self.data) // 2]
        lost = [b"", half, half.ljust(len(self.data), b"\0"), b"\xa5" * len(self.data), self.data]
        return list(dict.fromkeys(lost))


Entries = dict[str, "File | Folder"]


@dataclass
class Change:
    """One change of a directory's names."""

    added: Entries = field(default_factory=dict)
    removed: tuple[str, ...] = ()

    def apply(self, entries: Entries) -> Entries:
        """The names after it."""
        return {**{name: node for name, node in entries.items() if name not in self.removed}, **self.added}

    def states(self) -> list[Change | None]:
        """What may be left of it."""
        return [None, self, *([Change(self.added)] if self.added and self.removed else [])]


@dataclass
class Folder:
    """A directory: the names that were synced, and what was done since."""

    synced: Entries = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    @property
    def now(self) -> Entries:
        """The names a program sees."""
        entries = self.synced
        for change in self.pending:
            entries = change.apply(entries)
        return entries

    def sync(self) -> None:
        """What was done is there to stay."""
        self.synced, self.pending = self.now, []

    def states(self) -> Iterator[Tree]:
        """What may be left of it."""
        for kept in itertools.product(*(change.states() for change in self.pending)):
            entries = self.synced
            for change in filter(None, kept):
                entries = change.apply(entries)
            for contents in itertools.product(*(node.states() for node in entries.values())):
                yield dict(zip(entries, contents, strict=True))


class Model:
    """A disk, given the operations one by one.

    Args:
        base: the directory that is known to be there; what is above it does not matter.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self.root = _read(base)

    def steps(self, operation: Operation) -> list[Callable[[], None]]:
        """The changes that an operation is made of; a crash may come between any two of them."""
        path = operation.path
        if not path.is_relative_to(self._base):
            return []
        if operation.name == "sync_directory":
            return [self._folder(path).sync]
        folder, name = self._folder(path.parent), path.name
        if operation.name == "make_directory":
            return [lambda: folder.pending.append(Change({name: Folder()}))]
        if operation.name == "create":
            return [lambda: folder.pending.append(Change({name: File()}))]
        if operation.name == "rename":
            assert operation.target is not None
            assert operation.target.parent == path.parent
            change = Change({operation.target.name: folder.now[name]}, (name,))
            return [lambda: folder.pending.append(change)]
        if operation.name == "remove":
            return list(_removal(folder, name))
        file = folder.now[name]
        assert isinstance(file, File)
        return [lambda: _change(file, operation)]

    def add_unsynced(self, path: Path) -> None:
        """Somebody made a directory, and did not sync its name."""
        self._folder(path.parent).pending.append(Change({path.name: Folder()}))

    def _folder(self, path: Path) -> Folder:
        folder = self.root
        for part in path.relative_to(self._base).parts:
            found = folder.now[part]
            assert isinstance(found, Folder)
            folder = found
        return folder


def _change(file: File, operation: Operation) -> None:
    if operation.name == "sync":
        file.synced = True
    else:
        file.data, file.synced = file.data + operation.data, False


def _removal(folder: Folder, name: str) -> Iterator[Callable[[], None]]:
    node = folder.now.get(name)
    if isinstance(node, Folder):
        for inner in node.now:
            yield from _removal(node, inner)
    if node is not None:
        yield lambda: folder.pending.append(Change({}, (name,)))


def _read(path: Path) -> Folder:
    """What is there already, and has been for a while."""
    found: Entries = {}
    for each in path.iterdir():
        found[each.name] = _read(each) if each.is_dir() else File(each.read_bytes(), synced=True)
    return Folder(found)


def write_tree(tree: Tree, path: Path) -> None:
    """Make a state."""
    path.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            write_tree(content, path / name)
        else:
            (path / name).write_bytes(content)


# --- what is done ----------------------------------------------------------------------------------------------


class Save(NamedTuple):
    """One of a scenario's saves: its name, which is also its place in order, and what it replaces."""

    name: str
    value: int
    replaces: tuple[str, ...] = ()
    best: bool = False


class Scenario(NamedTuple):
    """What is there, and what is saved then.

    Attributes:
        unsynced: the directory was made by somebody who did not sync its name.
        missing: it is not there at all.
    """

    before: tuple[Save, ...]
    saves: tuple[Save, ...]
    unsynced: bool = False
    missing: bool = False


SCENARIOS = {
    "first": Scenario((), (Save("iter_1", 1),)),
    "first in a new directory": Scenario((), (Save("iter_1", 1),), missing=True),
    "first in a directory of others": Scenario((), (Save("iter_1", 1),), unsynced=True),
    "second": Scenario((Save("iter_1", 1),), (Save("iter_2", 2),)),
    "same name": Scenario((Save("iter_1", 1), Save("iter_2", 2)), (Save("iter_2", 3),)),
    "same name alone": Scenario((Save("iter_2", 2),), (Save("iter_2", 3),)),
    "pruning": Scenario((Save("iter_1", 1), Save("iter_2", 2)), (Save("iter_3", 3, ("iter_1",)),)),
    "pruning the only one": Scenario((Save("iter_1", 1),), (Save("iter_2", 2, ("iter_1",)),)),
    "best": Scenario(
        (Save("best_iter_1", 1, best=True), Save("iter_2", 2)),
        (Save("best_iter_3", 3, ("best_iter_1",), best=True),),
    ),
    "three": Scenario(
        (Save("iter_1", 1),),
        (Save("iter_2", 2, ("iter_1",)), Save("iter_2", 3), Save("iter_4", 4, ("iter_2",))),
    ),
}


def _save(directory: Path, save: Save) -> None:
    save_checkpoint(state(save.value), directory / save.name, _label(save))


def _label(save: Save) -> Label:
    best = Label(best={"acc": "greater"}, metrics={"acc": float(save.value)}) if save.best else Label()
    return Label(sequence=save.value, best=best.best, metrics=best.metrics)


def _commit(directory: Path, save: Save, removals: Removals) -> None:
    """Save as the saver's process does, which leaves the replaced ones to the next save."""
    encoded = serialize(state(save.value), directory / save.name, _label(save))
    (outcome,) = commit(
        [encoded._replace(replaces=tuple(directory / name for name in save.replaces))], removals=removals
    )
    assert outcome.error is None


class Crash(NamedTuple):
    """A state after a power cut, and what is to be found in it.

    Attributes:
        newest: what the newest checkpoint may hold; None where there may be none.
        best: the same for the best one; empty where none was saved as one.
        still: what must be there besides.
    """

    tree: Tree
    newest: frozenset[int | None]
    best: frozenset[int | None]
    still: frozenset[str]
    after: str


def crashes(base: Path, scenario: Scenario) -> Iterator[Crash]:
    """Every state that a power cut may leave of a scenario, each once."""
    run = base / "run"
    if not scenario.missing and not scenario.unsynced:
        run.mkdir(parents=True)
    for save in scenario.before:
        _save(run, save)
    base.mkdir(exist_ok=True)
    model = Model(base)
    if scenario.unsynced:
        run.mkdir()
        model.add_unsynced(run)
    seen: set[str] = set()
    for made, expected in _moments(run, scenario, model):
        for tree in model.root.states():
            if (key := repr((tree, expected))) not in seen:
                seen.add(key)
                yield Crash(tree, *expected, after=made)


def _moments(
    run: Path, scenario: Scenario, model: Model
) -> Iterator[tuple[str, tuple[frozenset[int | None], frozenset[int | None], frozenset[str]]]]:
    """The model after each step, and what must hold there."""
    durable = list(scenario.before)
    removals = Removals()
    for save in scenario.saves:
        made: list[Operation] = []

        def recorded(operation: Operation, made: list[Operation] = made) -> Any:
            made.append(operation)
            return operation.do()

        clear_durable_directories()
        with shimmed(recorded):
            _commit(run, save, removals)
            if save is scenario.saves[-1]:
                removals.finish()
        renamed = next(number for number, each in enumerate(made) if each.name == "rename")
        written = next(n for n, each in enumerate(made) if n > renamed and each.name == "sync_directory") + 1
        gone = {*save.replaces, save.name}
        for number, operation in enumerate(made):
            going = gone if number >= written else {save.name}
            still = frozenset(each.name for each in durable if each.name not in going)
            after = [*durable, save] if number >= written else durable
            either = frozenset({_newest(after), save.value})
            either_best = frozenset({_newest(after, best=True), *([save.value] if save.best else [])})
            for step in model.steps(operation):
                step()
                yield str(operation), (either, either_best, still)
        durable = [*(each for each in durable if each.name not in gone), save]
        settled = frozenset({_newest(durable)}), frozenset({_newest(durable, best=True)})
        yield "the end", (*settled, frozenset(each.name for each in durable))


def _newest(saves: Iterable[Save], *, best: bool = False) -> int | None:
    return max((save.value for save in saves if save.best or not best), default=None)


def check_crash(place: Path, crash: Crash) -> None:
    """Make the state, and look at it as a run that begins there would."""
    write_tree(crash.tree, place)
    run = place / "run"
    there = values(run)
    assert crash.still <= set(there), f"{set(crash.still) - set(there)} is lost after {crash.after}"
    newest = value_of(load_newest(run)[0]) if there else None
    assert newest in crash.newest, f"found {newest} and not {crash.newest} after {crash.after}"
    try:
        best = value_of(load_best(run)[0])
    except FileNotFoundError:
        best = None
    assert best in crash.best, f"the best is {best} and not {crash.best} after {crash.after}"
    if run.exists():
        _check_it_goes_on(run, [*there])
    shutil.rmtree(place)


def _check_it_goes_on(run: Path, there: list[str]) -> None:
    """What was left over goes, nothing else does, and a save under a name that may be taken is the newest."""
    orphan(run)
    remove_dead(run)
    assert not leftovers(run)
    assert [path.name for path in scan(run).paths] == there
    _save(run, Save("iter_2", 99))
    assert value_of(load_newest(run)[0]) == 99

"""Every sync, rename, wait and copy of the checkpoint code, left out one at a time: found by reading the code, so that a
new one need not be put on a list."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.faults.mutants import COPY, LINE, MUTANTS, PUBLISHED, STORE

NAMES = frozenset(
    {
        "fsync",
        "fdatasync",
        "sync",
        "sync_directory",
        "write_file",
        "rename",
        "replace",
        "link",
        "join",
        "wait",
        "synchronize",
        "wait_event",
        "wait_stream",
        "record_event",
        "record_stream",
        "copy",
        "copy_",
        "_foreach_copy_",
        "clone",
        "deepcopy",
        "memmove",
        "move",
    }
)
"""Of the functions and methods that are called."""
COPIES = frozenset({"copy", "clone", "deepcopy"})
"""Those that are asked for what they return."""

_SAVER = (*COPY, "tests/checkpoint/test_saver_process.py", "tests/stops/test_second_interrupt.py")
BY_VALUE = "tests/faults/test_by_value.py"
_RESUMED = (
    BY_VALUE,
    "tests/resume/test_resume_refused.py",
    "tests/resume/test_resume_settings.py",
    "tests/resume/test_resume.py",
    "tests/resume/test_resume_samplers.py",
    "tests/resume/test_resume_exact.py",
    "tests/resume/test_resume_late.py",
)
_AVERAGED = (
    "tests/checkpoint/test_copying.py",
    "tests/hooks/test_ema_checkpoint.py",
    "tests/hooks/test_ema.py",
)
TESTS = {
    "checkpoint/saving/buffers.py": COPY,
    "checkpoint/store.py": STORE,
    "checkpoint/saving/overlapped_copy.py": COPY,
    "checkpoint/disk.py": STORE,
    "model/average_checkpoint.py": _AVERAGED,
    "model/average_pairs.py": _AVERAGED,
    "hooks/checkpoint.py": COPY,
    "hooks/ema.py": _AVERAGED,
    "checkpoint/saving/publish.py": PUBLISHED,
    "checkpoint/retention/pending.py": COPY,
    "data/index_reader.py": (BY_VALUE, "tests/resume/test_resume_samplers.py"),
    "checkpoint/manifest.py": ("tests/checkpoint/test_manifest.py", *STORE),
    "optim/optimizer_states.py": _RESUMED,
    "data/loader_state.py": (BY_VALUE, "tests/resume/test_resume_samplers.py"),
    "checkpoint/prune.py": ("tests/cli/test_checkpoints_prune.py",),
    "resume/gathering.py": ("tests/resume/test_resume_ranks.py",),
    "resume/loading.py": ("tests/resume/test_resume_ranks.py",),
    "resume/restoring.py": COPY,
    "data/rng.py": (BY_VALUE, "tests/resume/test_resume_samplers.py"),
    "checkpoint/saving/group_writer.py": _SAVER,
    "checkpoint/saving/saver.py": _SAVER,
    "checkpoint/saving/saver_client.py": _SAVER,
    "checkpoint/saving/saver_process.py": _SAVER,
    "checkpoint/saving/saver_thread.py": _SAVER,
    "resume/settings.py": _RESUMED,
    "resume/apply.py": _RESUMED,
    "checkpoint/directory.py": (*LINE, *STORE),
    "checkpoint/saving/snapshot.py": (BY_VALUE, *COPY[:3], "tests/metrics/test_cuda_path.py"),
    "state/rollback.py": _RESUMED,
    "temporary/leftovers.py": ("tests/temporary/test_leftovers.py",),
    "temporary/sync.py": STORE,
    "checkpoint/archive.py": STORE,
    "checkpoint/commit.py": STORE,
    "checkpoint/serialize.py": STORE,
    "checkpoint/weights.py": (
        "tests/hooks/test_precise_bn.py",
        "tests/checkpoint/test_weights_refused.py",
        *_RESUMED,
    ),
}
"""The checkpoint code, and what is to turn red where something of a file is left out."""


class Place(NamedTuple):
    """Calls that are written alike, in one function of one file."""

    file: str
    function: str
    call: str


_NEW = "NumPy and Python make a new one each time they are asked for their state"
HARMLESS = {
    Place("data/rng.py", "_as_tensors", "state.view(np.uint8).copy()"): _NEW,
    Place("data/rng.py", "_tensor", "words.view(np.int32).copy()"): _NEW,
    Place(
        "data/rng.py", "_as_arrays", "state.numpy().view(like.dtype).copy()"
    ): "NumPy copies what it is given",
}
"""Those that may be left out, and why nothing is lost then."""


class Removal(NamedTuple):
    """A call that is left out: nothing is done in its place, or for a copy, what was to be copied is taken itself."""

    place: Place
    number: int
    """Of those that are written alike, from 0 on."""

    @property
    def what(self) -> str:
        """For people."""
        return f"{self.place.function} without {self.place.call}, {self.number + 1}"

    @property
    def file(self) -> str:
        """In the package."""
        return self.place.file

    @property
    def tests(self) -> tuple[str, ...]:
        """What is to turn red."""
        return TESTS[self.place.file]

    def apply(self, source: str) -> str:
        """The source without it."""
        node, statement = calls_in(source)[self.place[1:]][self.number]
        lines = source.encode().splitlines(keepends=True)
        begin, end = (
            sum(map(len, lines[: line - 1])) + column
            for line, column in (
                (node.lineno, node.col_offset),
                (node.end_lineno or 0, node.end_col_offset or 0),
            )
        )
        whole = b"".join(lines)
        return (whole[:begin] + _instead(node, statement).encode() + whole[end:]).decode()


def removals(package: Path) -> list[Removal]:
    """All of a package but those that one of `MUTANTS` is about already, and those that are harmless."""
    return [
        Removal(Place(file, *written), number)
        for file in TESTS
        for written, count in _left_alone(file, (package / file).read_text()).items()
        if Place(file, *written) not in HARMLESS
        for number in range(count)
    ]


def _left_alone(file: str, source: str) -> Counter[tuple[str, str]]:
    """How many of the calls of a file none of `MUTANTS` takes away."""
    there = _counted(source)
    for mutant in MUTANTS:
        if mutant.file == file:
            with suppress(ValueError):  # it cannot be put into the code any more, which is told by a test
                there &= there - (_counted(source) - _counted(mutant.apply(source)))
    return there


def _counted(source: str) -> Counter[tuple[str, str]]:
    return Counter({written: len(calls) for written, calls in calls_in(source).items()})


@cache
def calls_in(source: str) -> dict[tuple[str, str], list[tuple[ast.Call, bool]]]:
    """By function and text the calls that count, each with whether it is a statement."""
    found: dict[tuple[str, str], list[tuple[ast.Call, bool]]] = {}
    for function, node, statement in _walk(ast.parse(source), ()):
        if _name(node) in NAMES and not _of_a_text(node):
            found.setdefault((function, ast.unparse(node)), []).append((node, statement))
    return found


def _walk(parent: ast.AST, within: tuple[str, ...]) -> Iterator[tuple[str, ast.Call, bool]]:
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, ast.Call):
            yield ".".join(within), child, isinstance(parent, ast.Expr)
        named = (
            (child.name,) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ()
        )
        yield from _walk(child, (*within, *named))


def _name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _of_a_text(node: ast.Call) -> bool:
    """`", ".join(...)`, `name.replace("a", "b")`."""
    own = node.func.value if isinstance(node.func, ast.Attribute) else None
    return any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in (own, *node.args))


def _instead(node: ast.Call, statement: bool) -> str:
    if statement or _name(node) not in COPIES:
        return "None"
    if node.args:
        return ast.unparse(node.args[0])
    return ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else "None"

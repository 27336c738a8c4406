"""Faults that are put into the checkpoint code itself: each must turn a test red. `mutation` tries them."""

from __future__ import annotations

from typing import NamedTuple

STORE = (
    "tests/faults/test_system.py",
    "tests/faults/test_crash_states.py",
    "tests/faults/test_operations.py",
    "tests/checkpoint/test_disk.py",
    "tests/checkpoint/test_checkpoint_store.py",
)
READ = (
    "tests/faults/test_damage.py",
    "tests/checkpoint/test_verify.py",
    "tests/checkpoint/test_manifest.py",
    "tests/checkpoint/test_checkpoint_found.py",
)
COPY = (
    "tests/faults/test_copies.py",
    "tests/checkpoint/test_snapshot.py",
    "tests/checkpoint/test_copying.py",
    "tests/checkpoint/test_saver.py",
    "tests/checkpoint/test_saver_process.py",
)
PUBLISHED = ("tests/hooks/test_published_safetensors.py",)
LINE = ("tests/faults/test_line.py", "tests/checkpoint/test_line.py")


class Mutant(NamedTuple):
    """A change to the code: the text occurs once in the file, after `after` where that is given."""

    what: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...] = STORE
    after: str = ""

    def apply(self, source: str) -> str:
        """The source with the change.

        Raises:
            ValueError: the text is not there, or more than once.
        """
        head, after, tail = source.partition(self.after) if self.after else ("", "", source)
        count = tail.count(self.text)
        if count != 1 and not (self.after and count):
            raise ValueError(f"{self.file} has {self.text!r} {count} times, expected once: {self.what}")
        return head + after + tail.replace(self.text, self.becomes, 1)


def _of(file: str, tests: tuple[str, ...], *rows: tuple[str, ...]) -> list[Mutant]:
    """The mutants of a file that the same tests must see: each what is wrong, the text, what it becomes, and after what."""
    return [Mutant(row[0], file, row[1], row[2], tests, *row[3:]) for row in rows]


MUTANTS = (
    *_of(
        "checkpoint/disk.py",
        STORE,
        ("no fsync of a file", "os.fsync(file.fileno())", "pass"),
        ("no sync of what was written", "disk.sync(file)", "pass"),
        ("no sync of the directory above", "disk.sync_directory(path.parent)", "pass"),
        (
            "a directory of others is taken for durable",
            "elif _identity(path) in _durable or path.is_mount()",
            "elif True",
        ),
    ),
    *_of(
        "checkpoint/commit.py",
        STORE,
        ("no sync of the new directory", "[*files, lambda: self._disk.sync_directory(work)]", "[*files]"),
        (
            "no sync of the new name",
            "            disk.sync_directory(named[0].path.parent)\n",
            "            pass\n",
        ),
        ("no sync of the exchange", "            self._disk.sync_directory(self.path.parent)\n", ""),
        ("no sync before a removal", "    disk.sync_directory(path.parent)\n", ""),
        ("no name of its own while it is written", 'temporary_path(self.path, "tmp")', "self.path"),
        ("removed under its name", "    disk.rename(path, temporary)\n", "    temporary = path\n"),
    ),
    *_of(
        "checkpoint/disk.py",
        STORE,
        ("what is there is written over", '"xb"', '"wb"'),
    ),
    *_of(
        "temporary/sync.py",
        STORE,
        ("no fsync of a directory", "os.fsync(descriptor)", "pass"),
    ),
    *_of(
        "temporary/names.py",
        STORE,
        (
            "a name that was used before",
            "    return next(name for name in names if not os.path.lexists(name))",
            "    return next(names)",
        ),
    ),
    *_of(
        "checkpoint/commit.py",
        STORE,
        (
            "the former one goes before the new one is there",
            "        self._name = next(name for name in names if not name.exists())\n",
            "        if self.path.exists():\n            self._disk.remove(self.path)\n        self._name = next(names)\n",
        ),
        (
            "no way back of an exchange",
            "                    self._disk.rename(former, self.path)\n",
            "                    pass\n",
        ),
        (
            "no way back of a name",
            "                remove_checkpoint(self._name, self._disk)\n",
            "                pass\n",
        ),
        (
            "what somebody else has made is removed",
            "moved = self._name is not None and not self._work.exists()",
            "moved = True",
        ),
        ("what is left is not removed", "            self._disk.remove(self._work)\n", "            pass\n"),
    ),
    *_of(
        "checkpoint/disk.py",
        STORE,
        ("a short write is taken for a whole one", "piece = piece[written:]", "piece = piece[len(piece):]"),
        ("no waiting for the hash", "hasher.join()", "pass"),
    ),
    *_of(
        "checkpoint/store.py",
        STORE,
        ("the cause of a failure is lost", "        raise outcome.error\n", "        return 0\n"),
    ),
    *_of(
        "checkpoint/commit.py",
        (*STORE, *COPY),
        (
            "replaced ones go first",
            "        _sync_contents(staged)\n",
            "        replaced.rename([p for s in saves for p in s.replaces])\n        replaced.finish()\n        _sync_contents(staged)\n",
        ),
    ),
    *_of(
        "checkpoint/saving/group_writer.py",
        COPY,
        (
            "a failure in the process is not tried again",
            "(outcomes[number],) = self._commit_here([save])",
            "pass",
        ),
    ),
    *_of(
        "checkpoint/saving/saver_client.py",
        COPY,
        (
            "the process's death is not seen",
            'raise ProcessGoneError(f"it ended: {self.end(0.0)}")',
            "return pickle.dumps([Outcome()])",
            "def _answer",
        ),
    ),
    *_of(
        "checkpoint/manifest.py",
        READ,
        ("no check of a hash", "if digest != entry.sha256", "if False"),
        ("no check of a size", "if size != entry.bytes", "if False"),
    ),
    *_of(
        "checkpoint/manifest.py",
        READ,
        ("no check of a manifest's hash", "if sealed(field, body) != raw", "if False"),
        ("no check of a manifest's version", "if version not in schemas", "if False"),
    ),
    *_of(
        "checkpoint/manifest.py",
        LINE,
        ("no check of a line's hash", "if sealed(field, body) != raw", "if False"),
    ),
    *_of(
        "checkpoint/store.py",
        READ,
        ("what is read may execute", "weights_only=True)\n    except", "weights_only=False)\n    except"),
        (
            "what was verified is not what is read",
            "with open_verified(path, PAYLOAD, manifest) as file",
            'with open(path / PAYLOAD, "rb") as file',
        ),
        (
            "a damaged one ends the search",
            "                passed.append(str(error))\n                continue",
            "                raise",
        ),
        (
            "what a run has removed is not looked for again",
            "if gone := scan_number < MOST_SCANS and found.was_replaced(path)",
            "if gone := False",
        ),
    ),
    *_of(
        "checkpoint/directory.py",
        READ,
        ("what goes while it is listed", "if not gone or scan_number == MOST_SCANS", "if True"),
    ),
    *_of(
        "checkpoint/manifest.py",
        READ,
        (
            "a manifest that nobody could read",
            "        msgspec.json.decode(body, type=Manifest)\n    except",
            "    except",
        ),
    ),
    *_of(
        "checkpoint/directory.py",
        STORE,
        ("hidden ones are looked at", ' if not name.startswith(".")', ""),
    ),
    *_of(
        "checkpoint/directory.py",
        READ,
        ("the order of names", "(manifests[path].sequence, manifests[path].iter)", "0"),
    ),
    *_of(
        "checkpoint/directory.py",
        LINE,
        ("a sequence is given twice", ", *[step.newest for step in steps]", ""),
    ),
    *_of(
        "checkpoint/directory.py",
        LINE,
        (
            "no sync of the line's bytes",
            "write_file(work, lambda sink: sink.write(raw), disk=disk)",
            "work.write_bytes(raw)",
        ),
        ("no sync of the line's name", "        disk.sync_directory(directory)\n", ""),
        (
            "the line is written over",
            "        disk.rename(work, directory / LINE)\n",
            "        (directory / LINE).write_bytes(raw)\n",
        ),
        ("what is left of a line stays", "            disk.remove(work)\n", "            pass\n"),
    ),
    *_of(
        "checkpoint/saving/snapshot.py",
        COPY,
        ("nothing is copied at once", "        _copy(now)\n", ""),
        (
            "the rest is not copied",
            "            for source, view in self._late:\n",
            "            for source, view in ():\n",
        ),
        ("no waiting for the copy", "        self._done.wait()\n", "", "def join(self)"),
        ("no waiting before it is written", "        self._done.wait()\n", "", "def wait(self)"),
    ),
    *_of(
        "checkpoint/saving/snapshot.py",
        COPY,
        ("no look whether it was changed", "        if self._changed:\n", "        if False:\n"),
    ),
    *_of(
        "checkpoint/saving/overlapped_copy.py",
        COPY,
        ("no join before a step", "        if self._joins:\n            self.join()\n", "        pass\n"),
        (
            "no hook on another optimizer",
            "if [*map(id, optimizers)] != [id(each) for each, _ in self._hooked]",
            "if not self._hooked",
        ),
        (
            "no join at the end",
            "        self.join()\n        self._remove_hooks()\n",
            "        self._remove_hooks()\n",
        ),
    ),
    *_of(
        "hooks/checkpoint.py",
        COPY,
        ("no join before the next save", "        trainer.copying.join()", "        pass"),
    ),
    *_of(
        "resume/restoring.py",
        COPY,
        (
            "no join before a resume",
            "        check_changed(changed)\n        trainer.copying.join()\n",
            "        check_changed(changed)\n",
        ),
        (
            "no join before weights are loaded",
            "nullcontext():\n        trainer.copying.join()\n",
            "nullcontext():\n        pass\n",
        ),
    ),
    *_of(
        "checkpoint/saving/saver.py",
        COPY,
        (
            "no join before a save is dropped",
            "        self.join()  # nothing may be copied into their buffers any more\n",
            "",
        ),
        (
            "one that is being written is dropped",
            "                if not (task.begun or task.job.must):\n                    task.begun = True\n                    task.written.set_exception(SaveReplacedError",
            "                if True:\n                    task.begun = True\n                    task.written.set_exception(SaveReplacedError",
        ),
        (
            "no waiting when it is closed",
            "            task.written.wait()\n",
            "            pass\n",
            "def close",
        ),
    ),
    *_of(
        "hooks/checkpoint.py",
        PUBLISHED,
        (
            "the end does not wait",
            "        self.saves.finish(trainer)\n        if event.reason != ERROR and self.can_be_resumed",
            "        if event.reason != ERROR and self.can_be_resumed",
        ),
    ),
    *_of(
        "checkpoint/saving/publish.py",
        PUBLISHED,
        ("no sync of a published name", "    DISK.sync_directory(target.parent)\n", ""),
        (
            "a published one is written under its name",
            "        DISK.rename(work, target)\n",
            "        target.write_bytes(work.read_bytes())\n        work.unlink()\n",
        ),
    ),
    *_of(
        "checkpoint/saving/saver.py",
        COPY,
        ("buffers that are being written from", "buffers not in used", "True"),
        (
            "everything may come later",
            "later() if later is not None and task.size > AT_ONCE else ()",
            "{t.data_ptr() for ts in snapshot._tensors.values() for t in ts}",
        ),
    ),
)

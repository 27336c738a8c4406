"""Faults that are put into the checkpoint code itself: each must turn a test red. `mutation` tries them."""

from __future__ import annotations

from typing import NamedTuple

STORE = (
    "tests/faults/test_system.py", "tests/faults/test_crash_states.py", "tests/faults/test_operations.py",
    "tests/checkpoint/test_disk.py", "tests/checkpoint/test_checkpoint_store.py",
)  # fmt: skip
READ = (
    "tests/faults/test_damage.py", "tests/checkpoint/test_verify.py", "tests/checkpoint/test_manifest.py",
    "tests/checkpoint/test_checkpoint_found.py",
)  # fmt: skip
COPY = (
    "tests/faults/test_copies.py", "tests/checkpoint/test_snapshot.py", "tests/checkpoint/test_copying.py",
    "tests/checkpoint/test_saver.py", "tests/checkpoint/test_saver_process.py",
)  # fmt: skip
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


MUTANTS = (
    # --- what is durable
    Mutant("no fsync of a file", "checkpoint/disk.py", "os.fsync(file.fileno())", "pass"),
    Mutant("no fsync of a directory", "checkpoint/disk.py", "os.fsync(descriptor)", "pass"),
    Mutant("no sync of what was written", "checkpoint/disk.py", "disk.sync(file)", "pass"),
    Mutant(
        "no sync of the directory above", "checkpoint/disk.py", "disk.sync_directory(path.parent)", "pass"
    ),
    Mutant(
        "a directory of others is taken for durable",
        "checkpoint/disk.py",
        "elif _identity(path) in _durable or path.is_mount()",
        "elif True",
    ),
    Mutant(
        "no sync of the new directory",
        "checkpoint/commit.py",
        "        self._disk.sync_directory(self._work)\n",
        "",
    ),
    Mutant(
        "no sync of the new name",
        "checkpoint/commit.py",
        "            disk.sync_directory(named[0].path.parent)\n",
        "            pass\n",
    ),
    Mutant(
        "no sync of the exchange",
        "checkpoint/commit.py",
        "            self._disk.sync_directory(self.path.parent)\n",
        "",
    ),
    Mutant("no sync before a removal", "checkpoint/commit.py", "    disk.sync_directory(path.parent)\n", ""),
    # --- names
    Mutant(
        "no name of its own while it is written",
        "checkpoint/commit.py",
        'temporary_path(self.path, "tmp")',
        "self.path",
    ),
    Mutant(
        "removed under its name",
        "checkpoint/commit.py",
        "    disk.rename(path, nameless)\n",
        "    nameless = path\n",
    ),
    Mutant("what is there is written over", "checkpoint/disk.py", '"xb"', '"wb"'),
    Mutant(
        "a name that was used before",
        "checkpoint/commit.py",
        "    return next(name for name in names if not name.exists())",
        "    return next(names)",
        after="def temporary_path",
    ),
    Mutant(
        "the former one goes before the new one is there",
        "checkpoint/commit.py",
        "        self._name = next(name for name in names if not name.exists())\n",
        "        if self.path.exists():\n            self._disk.remove(self.path)\n        self._name = next(names)\n",
    ),
    Mutant(
        "no way back of an exchange",
        "checkpoint/commit.py",
        "                    self._disk.rename(former, self.path)\n",
        "                    pass\n",
    ),
    Mutant(
        "no way back of a name",
        "checkpoint/commit.py",
        "                remove_checkpoint(self._name, self._disk)\n",
        "                pass\n",
    ),
    Mutant(
        "what somebody else has made is removed",
        "checkpoint/commit.py",
        "moved = self._name is not None and not self._work.exists()",
        "moved = True",
    ),
    Mutant(
        "what is left is not removed",
        "checkpoint/commit.py",
        "            self._disk.remove(self._work)\n",
        "            pass\n",
    ),
    # --- writing
    Mutant(
        "a short write is taken for a whole one",
        "checkpoint/disk.py",
        "piece = piece[written:]",
        "piece = piece[len(piece):]",
    ),
    Mutant("no waiting for the hash", "checkpoint/disk.py", "hashed.result()", "pass"),
    Mutant(
        "the cause of a failure is lost",
        "checkpoint/store.py",
        "        raise outcome.error\n",
        "        return 0\n",
    ),
    Mutant(
        "replaced ones go first",
        "checkpoint/commit.py",
        "(_Staged.write, _Staged.sync, _Staged.take_name)",
        "(_Staged.remove_replaced, _Staged.write, _Staged.sync, _Staged.take_name)",
        tests=(*STORE, *COPY),
    ),
    Mutant(
        "a failure in the process is not tried again",
        "checkpoint/saving/saver.py",
        "outcome if outcome.error is None else",
        "outcome if True else",
        tests=COPY,
    ),
    Mutant(
        "the process's death is not seen",
        "checkpoint/saving/saver_client.py",
        'raise ProcessGoneError(f"it ended: {self.end(0.0)}")',
        "return [Outcome() for _ in saves]",
        tests=COPY,
    ),
    # --- reading
    Mutant("no check of a hash", "checkpoint/verify.py", "if digest != entry.sha256", "if False", tests=READ),
    Mutant("no check of a size", "checkpoint/verify.py", "if size != entry.bytes", "if False", tests=READ),
    Mutant(
        "no check of a manifest's hash",
        "checkpoint/manifest.py",
        ".hexdigest() != envelope.sha256",
        " is None",
        tests=READ,
    ),
    Mutant(
        "no check of a manifest's end",
        "checkpoint/manifest.py",
        "if msgspec.json.encode(envelope) != raw",
        "if False",
        tests=READ,
    ),
    Mutant(
        "no check of a manifest's version",
        "checkpoint/manifest.py",
        "if schema != SCHEMA",
        "if False",
        tests=READ,
    ),
    Mutant(
        "what is read may execute",
        "checkpoint/store.py",
        "weights_only=True)\n    except",
        "weights_only=False)\n    except",
        tests=READ,
    ),
    Mutant(
        "what was verified is not what is read",
        "checkpoint/store.py",
        "open_verified(path, PAYLOAD) if path.is_dir()",
        'open(path / PAYLOAD, "rb") if path.is_dir()',
        tests=READ,
    ),
    Mutant(
        "a damaged one ends the search",
        "checkpoint/store.py",
        "                passed.append(str(error))\n                continue",
        "                raise",
        tests=READ,
    ),
    Mutant(
        "what a run has removed is not looked for again",
        "checkpoint/store.py",
        "if gone := look < LOOKS and found.was_replaced(path)",
        "if gone := False",
        tests=READ,
    ),
    Mutant(
        "what goes while it is listed",
        "checkpoint/directory.py",
        "if not gone or look == LOOKS",
        "if True",
        tests=READ,
    ),
    Mutant(
        "a manifest that nobody could read",
        "checkpoint/manifest.py",
        "        msgspec.json.decode(body, type=Manifest)\n    except",
        "    except",
        tests=READ,
    ),
    Mutant("hidden ones are looked at", "checkpoint/directory.py", '"[!.]*"', '"*"'),
    Mutant(
        "the order of names",
        "checkpoint/directory.py",
        "(manifests[path].sequence, manifests[path].iter)",
        "0",
    ),
    Mutant(
        "a sequence is given twice",
        "checkpoint/directory.py",
        ", *(step.newest for step in steps)",
        "",
        tests=LINE,
    ),
    # --- the line
    Mutant(
        "no sync of the line's bytes",
        "checkpoint/lineage.py",
        "write_file(work, lambda sink: sink.write(raw), disk=disk)",
        "work.write_bytes(raw)",
        tests=LINE,
    ),
    Mutant(
        "no sync of the line's name",
        "checkpoint/lineage.py",
        "        disk.sync_directory(directory)\n",
        "",
        tests=LINE,
    ),
    Mutant(
        "the line is written over",
        "checkpoint/lineage.py",
        "        disk.rename(work, directory / LINE)\n",
        "        (directory / LINE).write_bytes(raw)\n",
        tests=LINE,
    ),
    Mutant(
        "what is left of a line stays",
        "checkpoint/lineage.py",
        "            disk.remove(work)\n",
        "            pass\n",
        tests=LINE,
    ),
    Mutant(
        "no check of a line's hash",
        "checkpoint/lineage.py",
        ".hexdigest() != envelope.sha256",
        " is None",
        tests=LINE,
    ),
    # --- copying
    Mutant(
        "nothing is copied at once", "checkpoint/saving/snapshot.py", "        now.copy()\n", "", tests=COPY
    ),
    Mutant(
        "the rest is not copied",
        "checkpoint/saving/snapshot.py",
        "            self._pairs.move()\n",
        "            pass\n",
        tests=COPY,
    ),
    Mutant(
        "no waiting for the copy",
        "checkpoint/saving/snapshot.py",
        "        self._done.wait()\n",
        "",
        tests=COPY,
        after="def join(self)",
    ),
    Mutant(
        "no waiting before it is written",
        "checkpoint/saving/saver.py",
        "        self.packed.rest.wait()\n",
        "        pass\n",
        tests=COPY,
    ),
    Mutant(
        "no look whether it was changed",
        "checkpoint/saving/snapshot.py",
        "    if changed:\n",
        "    if False:\n",
        tests=COPY,
    ),
    Mutant(
        "no join before a step",
        "checkpoint/saving/overlapped_copy.py",
        "        if self._joins:\n            self.join()\n",
        "        pass\n",
        tests=COPY,
    ),
    Mutant(
        "no hook on another optimizer",
        "checkpoint/saving/overlapped_copy.py",
        "if [*map(id, optimizers)] != [id(each) for each, _ in self._hooked]",
        "if not self._hooked",
        tests=COPY,
    ),
    Mutant(
        "no join at the end",
        "checkpoint/saving/overlapped_copy.py",
        "        self.join()\n        self._take_hooks_off()\n",
        "        self._take_hooks_off()\n",
        tests=COPY,
    ),
    Mutant(
        "no join before the next save",
        "hooks/checkpoint.py",
        "        trainer.copying.join()",
        "        pass",
        tests=COPY,
    ),
    Mutant("no join before a resume", "resume/state.py", "        trainer.copying.join()\n", "", tests=COPY),
    Mutant(
        "no join before weights are loaded",
        "resume/state.py",
        "        self._trainer.copying.join()\n",
        "",
        tests=COPY,
    ),
    Mutant(
        "no join before a save is dropped",
        "checkpoint/saving/saver.py",
        "        self.join()  # nothing may be copied into their buffers any more\n",
        "",
        tests=COPY,
    ),
    Mutant(
        "one that is being written is dropped",
        "checkpoint/saving/saver.py",
        "                if not task.begun:\n                    task.begun = True\n                    task.written.set_exception(SaveReplacedError",
        "                if True:\n                    task.begun = True\n                    task.written.set_exception(SaveReplacedError",
        tests=COPY,
    ),
    Mutant(
        "no waiting when it is closed",
        "checkpoint/saving/saver.py",
        "            task.written.wait()\n",
        "            pass\n",
        tests=COPY,
        after="def close",
    ),
    Mutant(
        "the end does not wait",
        "hooks/checkpoint.py",
        "        self.saves.finish(trainer)\n        if event.reason != ERROR and self.saves.newest",
        "        if event.reason != ERROR and self.saves.newest",
        tests=PUBLISHED,
    ),
    Mutant(
        "no sync of a published name",
        "checkpoint/saving/publish.py",
        "    DISK.sync_directory(target.parent)\n",
        "",
        tests=PUBLISHED,
    ),
    Mutant(
        "a published one is written under its name",
        "checkpoint/saving/publish.py",
        "        DISK.rename(work, target)\n",
        "        target.write_bytes(work.read_bytes())\n        work.unlink()\n",
        tests=PUBLISHED,
    ),
    Mutant(
        "buffers that are being written from",
        "checkpoint/saving/saver.py",
        "each not in used",
        "True",
        tests=COPY,
    ),
    Mutant(
        "everything may come later",
        "checkpoint/saving/saver.py",
        "later() if later is not None and task.size > AT_ONCE else ()",
        "{t.data_ptr() for t in tensors_of(state)}",
        tests=COPY,
    ),
)

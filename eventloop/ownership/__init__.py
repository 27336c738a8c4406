"""Give each directory that a run writes one live owner, also on a shared file system without locks.

Start with `acquiring`, which makes a process the owner of a directory, waits for another owner, or refuses.
`owner` reads and writes the records of owners, files in the directory, and decides whether an owner is alive.
`holding` renews the record of a living owner and releases directories, and `run_ownership` owns all
directories of a trainer's run. `status` reads and writes the run's progress. The package imports `temporary`
and `util`, and no torch: the checkpoints and the other ranks of a run are reached by functions that it is
given.

A run creates its record, and then looks for the records of other runs. If two runs begin at the same time, at
least one finds the record of the other, so they never own the directory both. This needs a file system that
lists a file once it has been created, shows the contents of a file once it has been closed, and takes the
times of all files in a directory from one clock. Nothing is assumed about locks, links and renames.
"""

from __future__ import annotations

from eventloop.ownership.owner import Owner as Owner
from eventloop.ownership.owner import read_owner as read_owner
from eventloop.util.errors import WorkDirInUseError as WorkDirInUseError

"""Give each directory that a run writes one live owner, also on a shared file system without locks.

Start with `acquiring`, which acquires a directory, waits or refuses. `owner` reads and writes the records of
owners, and decides whether the run that wrote one lives, `holding` gives signs of life and releases
directories, and `run_ownership` owns all directories of a trainer's run. The package imports `temporary` and
`util`, and no torch: what a run needs of its checkpoints and of other ranks is given to it as functions.

A run creates its record, and then looks for the records of others. Of two runs that begin at one moment at
least one finds the other, so both never own the directory. That needs a file system that lists a file once it
has been created, shows what was written once a file has been closed, and gives all files of a directory their
times by one clock. Nothing is assumed about locks, links and renames.
"""

from __future__ import annotations

from eventloop.ownership.owner import Owner as Owner
from eventloop.ownership.owner import read_owner as read_owner
from eventloop.util.errors import WorkDirInUseError as WorkDirInUseError

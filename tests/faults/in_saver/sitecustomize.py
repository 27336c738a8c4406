"""Makes the process that writes checkpoints kill itself; on its path in tests alone."""

import json
import os
import sys

if "eventloop.checkpoint.saving.saver_process" in sys.orig_argv:
    from tests.faults.shim import Kill, install

    install(Kill(*json.loads(os.environ["EVENTLOOP_TESTS_KILL"])))

"""The interpreter of the process that writes checkpoints, in tests alone: it notes its number, and kills itself."""

import json
import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    with open(os.environ["EVENTLOOP_TESTS_SAVERS"], "a") as file:
        file.write(f"{os.getpid()}\n")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if "EVENTLOOP_TESTS_KILL" in os.environ:
        from tests.faults.shim import Kill, Slow, install

        kill = Kill(*json.loads(os.environ["EVENTLOOP_TESTS_KILL"]))
        install(Slow(kill, float(os.environ.get("EVENTLOOP_TESTS_SLOW", "0"))))
    sys.argv = [argument for argument in sys.argv[1:] if argument not in ("-I", "-S")]
    runpy.run_path(sys.argv[0], run_name="__main__")

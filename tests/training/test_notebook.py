"""Training on a thread that runs an event loop: in a Jupyter kernel, and under `asyncio.run`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

from tests import forked
from tests.conftest import DEADLINE

pytestmark = pytest.mark.slow

Cell = Callable[..., str]

BUILD = """
import asyncio, os
import torch, torch.nn.functional as F
from eventloop import Trainer
model = torch.nn.Linear(2, 3)
data = [(torch.ones(2, 2), torch.tensor([0, 1]))] * 5

def build(name, **options):
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy, train_loader=data,
        writers=[], work_dir=name, **{"max_epochs": 10**9, **options},
    )
    trainer.bus.subscribe(lambda event: print("begun", flush=True), "after_train_iter", once=True, name="tells")
    return trainer
"""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """Run a cell in a real kernel, interrupt it once it prints `interrupt_at`, and return what it printed; its error is
    the last line."""
    home = tmp_path_factory.mktemp("kernel")
    manager = KernelManager(kernel_name="python3")
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": forked.ROOT, "OMP_NUM_THREADS": "1"}
    manager.start_kernel(cwd=str(home), env=environment, stderr=subprocess.DEVNULL)
    client = manager.client()
    client.start_channels()

    def run(code: str, interrupt_at: str = "") -> str:
        sent, printed = client.execute(code), ""
        while True:
            message = client.get_iopub_msg(timeout=DEADLINE)
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                printed += content["text"]
                if interrupt_at and interrupt_at in printed:
                    manager.interrupt_kernel()
                    interrupt_at = ""
            elif kind == "error":
                printed += f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return printed

    try:
        client.wait_for_ready(timeout=DEADLINE)
        assert run(BUILD) == ""
        yield run
    finally:
        manager.shutdown_kernel(now=True)
        client.stop_channels()
        manager.context.destroy()


@pytest.mark.parametrize("awaits", ["", "await asyncio.sleep(0)\n"], ids=["plain", "with await"])
def test_an_interrupt_ends_the_cell(cell: Cell, awaits: str) -> None:
    """Behind the checkpoint, with a KeyboardInterrupt, so that nothing that follows runs; a later cell trains on."""
    name = "awaits" if awaits else "plain"
    cell(f"trainer = build({name!r})")

    printed = cell(f"{awaits}trainer.train()\nprint('went on')", interrupt_at="begun")

    assert printed.splitlines()[0] == "begun"
    assert printed.splitlines()[1].startswith("KeyboardInterrupt")
    assert "went on" not in printed
    resumed = cell("at = trainer.iter; trainer.resume(); print(at > 0, trainer.iter == at)")
    assert resumed == "True True\n"
    assert cell(
        "trainer.max_epochs = trainer.epoch + 2\n"
        "@trainer.bus.on('after_train_epoch')\n"
        "async def take(event): print('epoch', event.epoch - at // 5, flush=True)\n"
        "trainer.train()\n"
    ).splitlines() == ["epoch 0", "epoch 1"]


def test_a_handler_on_the_kernels_loop(cell: Cell) -> None:
    """While a cell trains the loop cannot run: the events are delivered when the cell has ended."""
    printed = cell(
        "trainer, seen = build('loop', max_epochs=2), []\n"
        "@trainer.bus.on('after_train_epoch', loop=asyncio.get_running_loop())\n"
        "async def take(event): seen.append(event.epoch)\n"
        "trainer.train()\n"
        "print(seen)"
    )
    assert printed.splitlines() == ["begun", "[]"]
    assert cell("await asyncio.to_thread(trainer.bus.flush)\nprint(seen)") == "[0, 1]\n"


UNDER_ASYNCIO = (
    BUILD
    + """
async def main():
    build("run").train()
    print("went on", flush=True)

asyncio.run(main())
print("went on", flush=True)
"""
)


def test_ctrl_c_under_asyncio_run(tmp_path: Path) -> None:
    """It ends the program behind the checkpoint, not only where the coroutine awaits next."""
    process = forked.Forked(
        ["-c", UNDER_ASYNCIO], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"

    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=DEADLINE)

    assert printed == ""
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt\nthe newest checkpoint to resume from is" in errors
    assert [*(tmp_path / "run").glob("*/state.pth")]

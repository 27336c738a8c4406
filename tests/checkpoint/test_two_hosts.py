"""Tests of a training of two hosts, which are two namespaces of this machine: own names, networks and mounts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventloop.checkpoint import find_checkpoints, load_checkpoint

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, signal, sys
import torch, torch.distributed as dist, torch.nn.functional as F
from pathlib import Path
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from eventloop import Trainer
from eventloop.checkpoint.sharded import session
from eventloop.hooks import CheckpointHook, Hook

session.SHARED_SECONDS = 3.0
rank, work_dir, killed_at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=sys.argv[4], rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
generator = torch.Generator().manual_seed(1)
data = [(torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(8)]

class Kill(Hook):
    priority = "LOWEST"
    def after_train_iter(self, trainer, event):
        if event.iter + 1 == killed_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

trainer = Trainer(
    model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), train_loader=data, loss_fn=F.cross_entropy,
    max_iters=8, work_dir=work_dir, writers=[], hooks=[Kill()], default_hooks=dict(checkpoint=CheckpointHook(interval=1)))
if rank == 0:
    trainer.bus.subscribe(lambda event: print(json.dumps(["saved", int(event.path.rpartition("_")[2])]), flush=True), "checkpoint_saved")
try:
    at = trainer.resume("auto").name
except FileNotFoundError:
    at = ""
try:
    trainer.train()
except OSError as error:
    print(json.dumps(["refused", str(error)]), flush=True)
else:
    print(json.dumps(["resumed", at]), flush=True)
os._exit(0)
"""


class Hosts:
    """Two hosts with a cable between them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, os.getpid() % 200
        (folder / "program.py").write_text(PROGRAM)
        for host, other in ((0, 1), (1, 0)):
            _ip("netns", "add", self._name(host))
            if host:
                names = self._card(host), self._card(other)
                _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for host in (0, 1):
            inside = ("-n", self._name(host))
            _ip("link", "set", self._card(host), "netns", self._name(host))
            _ip(*inside, "addr", "add", f"{self._address(host)}/24", "dev", self._card(host))
            for card in (self._card(host), "lo"):
                _ip(*inside, "link", "set", card, "up")
        self._meetings = 0
        self.acknowledged = 0
        """The iterations of the newest checkpoint that rank 0 of the last training knew to be durable."""

    def train(self, *, killed_at: int = 0, shared: bool = True) -> list[tuple[int, list[str]]]:
        """Run one rank on each host, and return its exit code and what it printed."""
        self._meetings += 1
        meeting = f"tcp://{self._address(0)}:{29500 + self._meetings}"
        ranks = [self._start(host, meeting, killed_at, shared=shared or host == 0) for host in (0, 1)]
        if killed_at:
            ranks[1].wait()
            ranks[0].send_signal(signal.SIGKILL)  # as a launcher does, which lost a host
        told = [rank.communicate()[0] for rank in ranks]
        saved = [json.loads(line)[1] for line in told[0].splitlines() if line.startswith('["saved"')]
        self.acknowledged = max(saved, default=0)
        lines = [[line for line in text.splitlines() if line.startswith('["re')] for text in told]
        return [
            (rank.returncode, json.loads(found[-1]) if found else [])
            for rank, found in zip(ranks, lines, strict=True)
        ]

    def _start(self, host: int, meeting: str, killed_at: int, *, shared: bool) -> subprocess.Popen[str]:
        run = self.folder / "run"
        run.mkdir(exist_ok=True)
        mount = "" if shared else f"mount -t tmpfs none {run} && "
        program = f"{sys.executable} {self.folder / 'program.py'} {host} {run} {killed_at} {meeting}"
        script = f"{mount}hostname host-{'ab'[host]} && exec {program}"
        command = ["ip", "netns", "exec", self._name(host), "unshare", "-m", "-u", "sh", "-c", script]
        own = {"GLOO_SOCKET_IFNAME": self._card(host), "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | own)

    def close(self) -> None:
        """Remove the hosts; the cable goes with them."""
        for host in (0, 1):
            subprocess.run(["ip", "netns", "del", self._name(host)], check=False, capture_output=True)

    def _name(self, host: int) -> str:
        return f"eventloop-{os.getpid()}-{host}"

    def _card(self, host: int) -> str:
        return f"el{os.getpid() % 10**6}{'ab'[host]}"

    def _address(self, host: int) -> str:
        return f"10.77.{self.number}.{host + 1}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, if this process may make namespaces."""
    probe = f"eventloop-probe-{os.getpid()}"
    if (
        shutil.which("ip") is None
        or shutil.which("unshare") is None
        or subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs the right to make network namespaces")
    _ip("netns", "del", probe)
    hosts = Hosts(tmp_path)
    try:
        yield hosts
    finally:
        hosts.close()


def test_a_host_that_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    """After the loss of a host the job resumes from a whole checkpoint, never older than the last one that was
    acknowledged, and ends as one without a loss."""
    (first, _), (second, _) = hosts.train(killed_at=5)
    assert (first, second) == (-signal.SIGKILL, -signal.SIGKILL)
    acknowledged = hosts.acknowledged
    resumed = hosts.train()
    (at,) = {told[1] for _, told in resumed}
    assert at in {f"iter_{count}" for count in range(max(1, acknowledged), 6)}
    killed = load_checkpoint(tmp_path / "run" / "iter_8")
    shutil.rmtree(tmp_path / "run")
    assert [told for _, told in hosts.train()] == [["resumed", ""], ["resumed", ""]]
    whole = load_checkpoint(tmp_path / "run" / "iter_8")
    for name, tensor in whole["state_dict"].items():
        assert tensor.equal(killed["state_dict"][name])


def test_hosts_without_a_shared_directory(hosts: Hosts, tmp_path: Path) -> None:
    """They are refused before the first iteration; the error names the directory and both hosts."""
    for _, (what, why) in hosts.train(shared=False):
        assert what == "refused"
        assert f"{tmp_path / 'run'} is not shared" in why
        assert "rank 0 on host host-a does not see the files of rank 1 on host host-b" in why
    assert find_checkpoints(tmp_path / "run") == []

"""`eventloop run`: a script of another engine, which knows nothing of eventloop, with a bridge attached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from eventloop import WRITERS, cli
from eventloop.autoattach.written_loop import LINES
from eventloop.costs.records import read_costs
from eventloop.writers import read_jsonl
from tests import forked
from tests.cli.conftest import ENVIRONMENT
from tests.support.internals import substitute

SCRIPTS = Path(__file__).parent / "scripts"
WATCHER = {
    "lightning": "Watcher.on_train_epoch_end",
    "transformers": "Watcher.on_epoch_end",
    "ignite": "EarlyStopping",
    "mmengine": "Watcher.after_train_epoch",
}
"""A callback of each script, as its row is called."""
VALIDATES = {"lightning": "val_loss", "transformers": "eval_loss", "ignite": "nll"}
HOSTS = [
    pytest.param(host, marks=pytest.mark.skipif(find_spec(host) is None, reason=f"{host} is not installed"))
    for host in WATCHER
]
MINIMAL = """
import torch, torch.nn.functional as F
from ignite.engine import Engine, create_supervised_trainer, create_supervised_evaluator
data = [(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))] * 3
def train():
    model = torch.nn.Linear(2, 3)
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy)
    trainer.run(data, max_epochs=1)
"""
needs_a_host = pytest.mark.skipif(
    not any(find_spec(host) for host in WATCHER),
    reason="none of the engines is installed, and nothing is run",
)
needs_ignite = pytest.mark.skipif(find_spec("ignite") is None, reason="ignite is not installed")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a program."""
    return forked.run(["-m", "eventloop", "run", *arguments], env=ENVIRONMENT)


def write(text: str, name: str = "train.py") -> str:
    """Write a script to the working directory."""
    Path(name).write_text(text, encoding="utf-8")
    return name


def run_directory(ran: subprocess.CompletedProcess[str]) -> Path:
    """Return the directory that the last line names."""
    return Path(ran.stderr.splitlines()[-1].rpartition("eventloop report --all ")[2])


@pytest.mark.parametrize("host", HOSTS)
def test_an_unmodified_script_is_recorded_and_its_weights_are_its_own(host: str) -> None:
    """Numbers and costs are in the run's directory; each callback has its cost; the weights do not change."""
    script = SCRIPTS / f"{host}_script.py"

    ran = run("--writers", "jsonl", script, "--epochs", "2")

    assert ran.returncode == 0, ran.stderr
    directory = run_directory(ran)
    lines = [*read_jsonl(directory / "metrics.jsonl")]
    assert {"loss"} | ({VALIDATES[host]} if host in VALIDATES else set()) <= set().union(*lines)
    assert WATCHER[host] in {row.name for row in read_costs(directory).handlers}
    assert "8 iterations of " in ran.stderr
    assert "trainer.costs()" not in ran.stderr, "the trainer of the script has no such method"
    alone = forked.run([script, "--epochs", "2"], env=ENVIRONMENT)
    assert ran.stdout.splitlines()[-1] == alone.stdout.splitlines()[-1]


def test_the_help_and_the_page_name_each_writer(capsys: pytest.CaptureFixture[str]) -> None:
    """A writer that is added is named in both lists."""
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])

    written = [name for name in WRITERS.names() if WRITERS.find(name).__module__.startswith("eventloop.")]
    names = {name.removesuffix("Writer").lower() for name in written}
    assert names <= set(re.findall(r"\w+", capsys.readouterr().out))
    page = Path(__file__).parents[2] / "docs/howto/run.md"
    if page.exists():  # the wheel has no pages
        assert names <= set(re.findall(r"`(\w+)`", page.read_text()))


@pytest.mark.parametrize("host", HOSTS)
def test_an_error_of_the_script_is_its_own(host: str) -> None:
    """The exit code is Python's, the traceback begins at the script, and the run ends with the error."""
    ran = run(SCRIPTS / f"{host}_script.py", "--fail")

    assert ran.returncode == 1
    traceback = ran.stderr.rpartition("Traceback (most recent call last):\n")[2]
    assert traceback.splitlines()[0].endswith(("in <module>", "in main"))
    assert f"{host}_script.py" in traceback.splitlines()[0]
    assert traceback.splitlines()[-1] == "ArithmeticError: the script's own error"
    assert "4 iterations of " in ran.stderr


@needs_a_host
def test_a_script_runs_as_by_python() -> None:
    """It is `__main__`, with its arguments and its folder; no torch is imported before; a module runs, too."""
    Path("folder").mkdir()
    write("", "folder/neighbour.py")
    script = write(
        "import sys; before = 'torch' in sys.modules\nimport neighbour\n"
        "print(__name__, before, sys.argv, sys.modules['__main__'].__dict__ is globals())",
        "folder/train.py",
    )

    for arguments in ([script], ["-m", "folder.train"]):
        ran = subprocess.run(
            [
                sys.executable,
                "-m",
                "eventloop",
                "run",
                "--work-dir",
                "x",
                *arguments,
                "--writers",
                "--",
                "-h",
            ],
            env=ENVIRONMENT
            | ({"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:folder"} if "-m" in arguments else {}),
            capture_output=True,
            text=True,
            check=False,
        )
        given = os.path.abspath(script) if "-m" in arguments else script
        assert ran.stdout == f"__main__ False {[given, '--writers', '--', '-h']} True\n", ran.stderr


@needs_a_host
@pytest.mark.parametrize(
    ("script", "code", "error"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("import sys; sys.exit('usage: ...')", 1, "usage: ...\n"),
        ("x = (", 1, "train.py\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n"),
        ("1 / 0", 1, "line 1, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero\n"),
    ],
)
def test_exit_codes_are_the_scripts(script: str, code: int, error: str) -> None:
    """Errors are shown as by Python, without frames above the script."""
    ran = run(write(script))

    assert (ran.returncode, ran.stdout) == (code, "")
    assert ran.stderr.endswith(error)
    assert "eventloop/" not in ran.stderr
    assert "ran no trainer" not in ran.stderr


@needs_ignite
def test_a_ctrl_c_is_the_scripts() -> None:
    """The run ends with its files, and the process as it would without the command."""
    script = write(
        f"{MINIMAL}\nimport os, signal\n"
        "def step(engine, batch):\n"
        "    if engine.state.iteration == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "Engine(step).run(data)\n"
    )

    ran = run("--work-dir", "out", script)

    alone = forked.run([script], env=ENVIRONMENT)
    assert ran.returncode == alone.returncode != 0
    assert ran.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1] == "KeyboardInterrupt"
    lines = [*read_jsonl("out/metrics.jsonl")]
    assert [line["event"] for line in lines if "event" in line][-1] == "after_run"


@needs_ignite
def test_several_trainers_have_a_directory_each() -> None:
    """The second trainer in one directory writes to `trainer-2` within it, and each has its summary."""
    ran = run("--work-dir", "out", "--writers", "csv,JSONLWriter", write(f"{MINIMAL}\ntrain(); train()"))

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("3 iterations of ") == 2
    for directory in (Path("out"), Path("out/trainer-2")):
        assert "JSONLWriter" in {row.name for row in read_costs(directory).subscribers}
        assert (directory / "metrics.jsonl").exists()
        assert [*directory.glob("*.csv")]


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize("root", [None, "out"])
def test_a_lightning_trainer_without_a_logger(root: str | None) -> None:
    """A run has a new directory under runs/ rather than files in the current one, or `default_root_dir`."""
    script = write(
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        f"trainer = Trainer(max_steps=1, logger=False, enable_checkpointing=False, default_root_dir={root!r})\n"
        "model = BoringModel()\n"
        "trainer.fit(model), trainer.validate(model)"
    )

    directories = [run_directory(run(script)) for _ in range(2)]

    if root is None:
        assert directories == sorted(Path("runs").iterdir())
        assert not Path("eventloop").exists()
    else:
        assert directories == [Path("out/eventloop")] * 2


@needs_ignite
def test_callbacks_are_not_measured_if_nobody_wants_it() -> None:
    """With --no-measure the host's own handlers have no rows."""
    ran = run("--no-measure", "--work-dir", "out", SCRIPTS / "ignite_script.py")

    assert ran.returncode == 0, ran.stderr
    assert "EarlyStopping" not in {row.name for row in read_costs(Path("out")).handlers}


@needs_ignite
def test_a_script_whose_trainer_never_runs() -> None:
    """One line says that there was no run."""
    ran = run(write("from ignite.engine import Engine\nEngine(lambda engine, batch: None)"))

    assert ran.returncode == 0
    assert "train.py ran no trainer of Lightning, Transformers, ignite or MMEngine" in ran.stderr


OWN_BRIDGE = {
    "lightning": """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from eventloop.bridges.lightning import EventLoopCallback
Trainer(callbacks=[EventLoopCallback()], max_steps=1, logger=False, enable_checkpointing=False).fit(BoringModel())
""",
    "transformers": """
import torch
from transformers import Trainer, TrainingArguments
from eventloop.bridges.transformers import EventLoopCallback
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x): return {"loss": self.layer(x).sum()}
args = TrainingArguments("out", max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
Trainer(Model(), args, train_dataset=[{"x": torch.ones(2)}] * 2, callbacks=[EventLoopCallback()]).train()
""",
    "ignite": """
from ignite.engine import Engine
from eventloop.bridges.ignite import attach
engine = Engine(lambda engine, batch: None)
attach(engine)
engine.run([1])
""",
    "mmengine": """
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from eventloop.bridges.mmengine import EventLoopHook
class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, mode="loss"): return {"loss": self.layer(x).sum()}
Runner(Model(), "out", train_dataloader=torch.utils.data.DataLoader([{"x": torch.ones(2)}]),
       optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}}, train_cfg={"by_epoch": True, "max_epochs": 1},
       custom_hooks=[EventLoopHook()]).train()
""",
}
"""Scripts that attach a bridge themselves."""


@pytest.mark.parametrize(
    "host",
    [
        pytest.param(
            host, marks=pytest.mark.skipif(find_spec(host) is None, reason=f"{host} is not installed")
        )
        for host in OWN_BRIDGE
    ],
)
def test_a_script_with_a_bridge_of_its_own_keeps_it(host: str) -> None:
    """One line says that the script's bridge has recorded the run."""
    ran = run(write(OWN_BRIDGE[host]))

    assert ran.returncode == 0, ran.stderr
    names = {"lightning": "Lightning", "transformers": "Transformers", "mmengine": "MMEngine"}
    name = names.get(host, host)
    assert f"eventloop: train.py has attached a bridge to {name} itself" in ran.stderr


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_the_callbacks_of_a_lightning_trainer_are_the_scripts() -> None:
    """Between runs a trainer has those that the script gave it; another trainer may have them, too."""
    script = write(
        "from lightning.pytorch import Callback, Trainer\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "options = dict(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,\n"
        "               enable_model_summary=False)\n"
        "given = [Callback(), Callback()]\n"
        "first = Trainer(callbacks=given, **options)\n"
        "callbacks = first.callbacks\n"
        "assert callbacks == given\n"
        "first.validate(BoringModel(), verbose=False)\n"
        "first.fit(BoringModel())\n"
        "assert first.callbacks is callbacks and callbacks == given\n"
        "Trainer(callbacks=first.callbacks, **options).fit(BoringModel())\n"
    )

    ran = run("--work-dir", "out", script)

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("1 iterations of ") == 2
    assert [path.is_file() for path in (Path("out/costs.json"), Path("out/trainer-2/costs.json"))] == [
        True
    ] * 2


@needs_ignite
def test_a_script_that_only_evaluates_has_no_trainer_of_eventloop() -> None:
    """A script is not said to import what the command has imported."""
    ran = run(
        write(
            "import torch\nfrom ignite.engine import create_supervised_evaluator\n"
            "create_supervised_evaluator(torch.nn.Linear(1, 1)).run([(torch.ones(1, 1), torch.ones(1, 1))])"
        )
    )

    assert "train.py ran no trainer of Lightning, Transformers, ignite or MMEngine" in ran.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize("installed", [True, False])
def test_ranks_that_lightning_starts_have_a_bridge_or_none_has(tmp_path: Path, installed: bool) -> None:
    """Lightning starts the script again, and finds the callback by the entry point; without that, a line says why."""
    known = any(
        "lightning_ranks" in each.value for each in entry_points(group="lightning.pytorch.callbacks_factory")
    )
    if known and not installed:
        pytest.skip("the installed eventloop has the entry point")
    info = tmp_path / "torch_eventloop_here-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-eventloop-here\nVersion: 1\n")
    point = "eventloop = eventloop.autoattach.lightning_ranks:callbacks"
    (info / "entry_points.txt").write_text(
        f"[lightning.pytorch.callbacks_factory]\n{point if installed and not known else ''}\n"
    )

    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "eventloop",
            "run",
            "--work-dir",
            "out",
            SCRIPTS / "lightning_script.py",
            "--strategy",
            "ddp",
            "--devices",
            "2",
        ],
        env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(tmp_path)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert ran.returncode == 0, ran.stderr
    assert ("2 iterations of " in ran.stderr) == installed
    assert ("Lightning ran without a bus: Lightning starts the script again" in ran.stderr) != installed


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_the_summary_of_ranks_that_the_script_makes(strategy: str) -> None:
    """The run of rank 0 ends in another process, and the command prints its summary and its directory."""
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "eventloop",
            "run",
            SCRIPTS / "lightning_script.py",
            "--strategy",
            strategy,
            "--devices",
            "2",
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("2 iterations of ") == 1
    assert WATCHER["lightning"] in {row.name for row in read_costs(run_directory(ran)).handlers}


@needs_a_host
def test_a_script_without_an_engine_is_told_what_to_write() -> None:
    """The lines that it is told run, and record the loop; the exit code is the script's."""
    ran = run(write("print('trained by hand')"))

    assert (ran.returncode, ran.stdout) == (0, "trained by hand\n")
    assert ran.stderr.startswith(
        "eventloop: train.py ran no trainer of Lightning, Transformers, ignite or MM"
    )
    told = "".join(line.removeprefix("    ") + "\n" for line in ran.stderr.splitlines()[3:])
    assert told == LINES
    loop = write(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader, epochs = [torch.ones(4, 2)] * 3, 2\n"
        "def train_on(batch):\n    loss = model(batch).sum()\n    loss.backward()\n    optimizer.step()\n    return loss\n"
        + told
    )
    by_hand = forked.run([loop], env=ENVIRONMENT)
    assert by_hand.returncode == 0, by_hand.stderr
    assert "6 iterations of " in by_hand.stdout
    again = run(loop)
    assert "It imports eventloop's own Trainer, which needs no `eventloop run`" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.py"], "no file at absent.py: give a Python script, or -m and a module"),
        (["-m", "absent.module"], "no module named 'absent.module' in "),
        (["data.json"], "expected a Python script, got data.json: give a file that ends in .py"),
        (["empty"], "no file at empty: give a Python script, or -m and a module"),
        (
            ["--writers", "jsnol", "train.py"],
            "--writers has an unknown writer 'jsnol': did you mean 'jsonl'?",
        ),
        (["--writers", "x", "train.py"], "--writers has an unknown writer 'x': known are console, csv, "),
        (
            ["--work-dir", "data.json", "train.py"],
            "--work-dir must be a directory that can be written, got data.json: ",
        ),
        (
            ["--work-dir", "data.json/a", "train.py"],
            "--work-dir must be a directory that can be written, got data.json/a: ",
        ),
        (
            ["--work-dir", "/proc/self", "train.py"],  # it exists where there is /proc
            "--work-dir must be a directory that can be written, got /proc/self: ",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says what was expected and what came, before anything runs."""
    substitute(monkeypatch, "hosts.any_installed", lambda: True)
    Path("empty").mkdir()
    write("{}", "data.json")
    write("raise AssertionError('it runs')")

    assert cli.main(["run", *arguments]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"eventloop: {message}")
    assert error.count("\n") == 1


def test_arguments_of_the_script_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the option that the command does not have, and says where those of a script go."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--epochs", "3", write("")])

    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(
        "unrecognized arguments: --epochs; arguments of the script come after it: eventloop run SCRIPT ARGUMENTS"
    )


def test_no_engine_is_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the engines, and the trainer for a loop of one's own."""
    substitute(monkeypatch, "hosts.PACKAGES", {"None": ("no_such_package",)})

    assert cli.main(["run", write("")]) == 2

    error = capsys.readouterr().err
    assert "expected one of Lightning, Transformers, ignite and MMEngine, got none installed" in error
    assert "DrivenTrainer" in error

"""Bridges to Lightning that are copied, and arguments and versions that are refused."""

from __future__ import annotations

import copy
import os
import pickle
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install 'torch-eventloop[lightning]'"
)

from lightning.pytorch.callbacks import Callback

from eventloop.bridges.foreign import Foreign
from eventloop.bridges.lightning import EventLoopCallback
from eventloop.hooks import EMAHook, OptimizerHook
from eventloop.writers import JSONLWriter
from tests import forked
from tests.support.internals import substitute
from tests.support.lightning import Classifier, MakeBridge, fit, loader, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of loaders without workers, and more


def test_a_bridge_is_copied_and_pickled_with_its_options(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A copy, or a pickle for another process, is a bridge with the same hooks that has not run."""
    bridge = make_bridge(hooks=[EMAHook()])
    fit(tmp_path, bridge)

    for twin in (copy.deepcopy(bridge), pickle.loads(pickle.dumps(make_bridge(hooks=[EMAHook()])))):
        fit(tmp_path, twin)
        assert isinstance(twin, EventLoopCallback)
        assert isinstance(twin, Callback)
        assert twin.bus is not bridge.bus


def test_a_trainer_is_pickled_after_its_run(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """What holds the trainer, such as a progress bar, can be pickled with a bridge whose writers have written."""
    trainer = fit(tmp_path, make_bridge(hooks=[EMAHook()], writers=[JSONLWriter()]), max_epochs=1)

    twin = pickle.loads(pickle.dumps(trainer)).callbacks[0]

    assert isinstance(twin, EventLoopCallback)
    assert not twin.bus.stats()


def test_a_bus_with_handlers_is_not_copied(make_bridge: MakeBridge) -> None:
    """Handlers would be missing in a copy, so the copy is refused."""
    bridge = make_bridge()
    bridge.bus.subscribe(lambda event: None, "after_run", name="show")

    with pytest.raises(TypeError, match=r"without the handlers of its bus, and show was given to it"):
        copy.deepcopy(bridge)


def test_two_bridges_on_one_trainer(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """The trainer refuses a second bridge when it is made, and one that joins later when it begins."""
    with pytest.raises(RuntimeError, match=r"more than one stateful callback of type `EventLoopCallback`"):
        make_trainer(tmp_path, make_bridge(), make_bridge())
    trainer = make_trainer(tmp_path, make_bridge())
    trainer.callbacks.append(make_bridge())
    with pytest.raises(ValueError, match=r"expected one EventLoopCallback in the callbacks.*, got 2"):
        trainer.fit(Classifier(), loader())


def test_hooks_that_own_the_step_are_refused() -> None:
    """A hook that does Lightning's part is an error at the line that makes the bridge."""
    with pytest.raises(ValueError, match=r"OptimizerHook does .* itself, which Lightning does here"):
        EventLoopCallback(hooks=[OptimizerHook()])


def test_the_hosts_own_callbacks_are_the_hosts() -> None:
    """A callback of Lightning among the hooks of a bridge to Lightning is refused where the bridge is made."""
    with pytest.raises(
        ValueError, match=r"Foreign\(Callback.* which itself trains here: give the callback to Lightning"
    ):
        EventLoopCallback(hooks=[Foreign(Callback())])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bus": 3}, r"bus must be a Bus, as Bus\(\) makes one, got 3"),
        ({"hooks": "EMAHook"}, r"hooks must be a list, got 'EMAHook'"),
        ({"measure": 1}, r"measure must be True or False, got 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: str) -> None:
    """Each argument is checked where the bridge is made."""
    with pytest.raises(TypeError, match=words):
        EventLoopCallback(**arguments)


def test_no_trainer_before_the_first_run() -> None:
    """The attribute `trainer` says that the host has not begun a run."""
    with pytest.raises(RuntimeError, match=r"no trainer before the first run of Lightning"):
        _ = EventLoopCallback().trainer


def test_a_lightning_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old version is an error that names the version needed, the one found, and the extra."""
    substitute(monkeypatch, "host.version", lambda _: "1.9.5")
    with pytest.raises(ImportError, match=r"needs lightning>=2\.4, got 1\.9\.5: pip install .*\[lightning\]"):
        EventLoopCallback()


def test_a_module_without_an_optimizer(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A module that returns no optimizer is trained as without the bridge, and the trainer has none."""

    class Without(Classifier):
        def configure_optimizers(self) -> None:
            return None

    bridge, seen = make_bridge(), []
    bridge.bus.subscribe(lambda trainer, event: seen.append(trainer.optimizer), "before_train")

    fit(tmp_path, bridge, model=Without())

    assert seen == [None]


@pytest.mark.slow
def test_the_other_package(tmp_path: Path) -> None:
    """A program of `pytorch_lightning` trains with the bridge, and one with both packages can use either."""
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    program = f"""
        import {{first}}
        from pytorch_lightning import Trainer
        from pytorch_lightning.callbacks import Callback
        from pytorch_lightning.demos.boring_classes import BoringModel
        from eventloop.bridges.lightning import EventLoopCallback
        bridge, seen = EventLoopCallback(work_dir={str(tmp_path)!r}), []
        assert isinstance(bridge, Callback)
        bridge.bus.subscribe(lambda event: seen.append(event.iter), "after_train_iter")
        Trainer(max_steps=2, callbacks=[bridge], logger=False, enable_checkpointing=False, accelerator="cpu",
                default_root_dir={str(tmp_path)!r}).fit(BoringModel())
        assert seen == [0, 1]
    """
    for first in ("pytorch_lightning", "lightning.pytorch"):
        text = textwrap.dedent(program.format(first=first))
        ran = forked.run(["-c", text], env={**os.environ, "PYTHONPATH": forked.ROOT})
        assert ran.returncode == 0, ran.stderr

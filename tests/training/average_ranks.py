"""A program for each rank of a training with an average on a mesh, to be run after `mesh_ranks.SETUP`."""

from __future__ import annotations

PROGRAM = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from eventloop.hooks import BaseAveragedModel, ExponentialMovingAverage, StochasticWeightAverage
from eventloop.model import average_checkpoint
from eventloop.model.average_pairs import Swap

TYPES = {"ExponentialMovingAverage": dict(momentum=0.3), "StochasticWeightAverage": {},
    "MomentumAnnealingEMA": dict(momentum=0.2, gamma=3)}

def gathered(state):
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).flatten().tolist() for name, t in state.items()}

def by_hand():
    model, weights = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for inputs, target in zip(x.split(8), y.split(8)):
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(torch.tensor(whole(model), dtype=torch.float64))
    return weights

def averaged(shares):
    average = weights[0]
    for n, new in enumerate(weights[1:], 1):
        average = average + shares(n) * (new - average)
    return average.tolist()

weights = by_hand()
said = {"expected": {
    "ExponentialMovingAverage": averaged(lambda n: 0.3),
    "StochasticWeightAverage": averaged(lambda n: 1 / (n + 1)),
    "MomentumAnnealingEMA": averaged(lambda n: max(0.2, 3 / (3 + n))),
}, "own expected": weights[-1].tolist(), "ours": {}}
plain = build(divided(), val_loader=loader(), max_epochs=2)
plain.train()
said["without"] = whole(plain.model)

for kind, arguments in TYPES.items():
    hook = EMAHook(kind, **arguments)
    trainer = build(divided(), hook, max_epochs=2, val_loader=loader())
    trainer.max_epochs = 1
    trainer.train()
    ours = said["ours"][kind] = {"average": whole(hook.ema_model), "own": whole(trainer.model), "val": trainer.val()}
    ours["predicted"] = trainer.predict(loader()).tolist()
    ours["own after"], ours["average after"] = whole(trainer.model), whole(hook.ema_model)
    alone = Net()
    nn.utils.vector_to_parameters(torch.tensor(ours["average"]), alone.parameters())
    with torch.no_grad():
        out = alone(x)
    ours["output"], ours["loss"] = out.tolist(), F.cross_entropy(out, y).item()
    trainer.max_epochs = 2
    trainer.train()
    ours["longer"] = whole(trainer.model)

# the model's own weights and the average, each in turn
trainer = build(divided(), hook := EMAHook(momentum=0.3, validate="both"), max_epochs=1, val_loader=loader())
trainer.train()
said["both"], said["both expected"] = [trainer.val(), trainer.val()], {}
for prefix, found in (("", trainer.model), ("ema/", hook.ema_model)):
    alone = Net()
    nn.utils.vector_to_parameters(torch.tensor(whole(found)), alone.parameters())
    with torch.no_grad():
        said["both expected"][f"{prefix}loss"] = F.cross_entropy(alone(x), y).item()

class Step:
    fails = False
    def __call__(self, trainer, batch):
        trainer.model(batch[0])
        if self.fails:
            trainer.model(torch.ones(8, 5))
        return {"seen": torch.zeros(())}

step = Step()
trainer = build(divided(), EMAHook(momentum=0.3), val_loader=loader(), val_step=step, sanity_val=0)
trainer.train()
before, step.fails = whole(trainer.model), True
try:
    trainer.val()
except RuntimeError as error:
    said["raised"] = str(error)
said["own came back"] = whole(trainer.model) == before
step.fails, trainer.max_epochs = False, 2
trainer.train()
said["after an error"] = whole(trainer.model)

# what an average stores
hook = EMAHook(momentum=0.3)
trainer = build(divided(), hook)
trainer.train()
model, average, swap = trainer.model, hook.ema_model, Swap()
said["values"] = {"average": gathered(average.module.state_dict()), "own": gathered(model.state_dict())}
for name in ("stored", "stored while the average is in"):
    checkpoint = {"meta": {}, "state_dict": model.state_dict(), "hooks": {"EMAHook": hook.state_dict()}}
    average_checkpoint.store(checkpoint, average, model, swap)
    average_checkpoint.check(checkpoint, strict=True, source="here")
    average_checkpoint.separate(checkpoint, "EMAHook")
    said[name] = {"average": gathered(checkpoint["hooks"]["EMAHook"]["average"]),
        "own": gathered(average_checkpoint.own_weights(checkpoint))}
    if name == "stored":
        with torch.no_grad():
            model(x)
        swap.put(average.pairs_with(model))
        model(x).sum().backward()
swap.back()
said["put back"] = gathered(model.state_dict())
other = divided()
loaded = ExponentialMovingAverage(other)
loaded.load_state_dict(average.state_dict())
said["loaded"], said["loaded steps"] = gathered(loaded.module.state_dict()), [average.steps, loaded.steps]
resumed = build(divided(), again := EMAHook(momentum=0.3))
again._model_of(resumed)
again.load_state_dict(checkpoint["hooks"]["EMAHook"])
said["resumed"] = gathered(again.ema_model.module.state_dict())
said["called"] = ""
try:
    average(x)
except RuntimeError as error:
    said["called"] = str(error)

# models that are not Net alone
def listed(module):
    return [[name for name, _ in found] for found in (module.named_parameters(), module.named_buffers(),
        module.state_dict().items())]

class Odd(Net):
    def __init__(self):
        super().__init__()
        self.two = checkpoint_wrapper(self.two)
        self.tied, self.nothing = self.head, None
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_parameter("absent", None)

class Renamed(Net):
    def state_dict(self, **options):
        return {f"net.{name}": value for name, value in super().state_dict(**options).items()}

class Locals(BaseAveragedModel):
    seen = set()
    def avg_func(self, averaged_param, source_param, steps):
        self.seen |= {isinstance(averaged_param, DTensor), isinstance(source_param, DTensor)}
        return source_param + 1

odd = divided(Odd, "two._checkpoint_wrapped_module")
odd.seen += 3
average = ExponentialMovingAverage(odd)
said["names"] = [listed(odd), listed(average.module)]
stored = average.module.state_dict()
copy = ExponentialMovingAverage(divided(Odd, "two._checkpoint_wrapped_module"))
said["wrapped"] = str(copy.module.load_state_dict({name: t.clone().zero_() for name, t in stored.items()}))
said["zeros"] = sum(map(sum, gathered(copy.module.state_dict()).values()))
try:
    ExponentialMovingAverage(divided(Renamed))
except TypeError as error:
    said["renamed"] = str(error)
model = divided()
own = Locals(model)
for _ in range(2):
    own.update_parameters(model)
said["locals"] = [[*Locals.seen], [a - b for a, b in zip(whole(own), whole(model))]]

half = divided().bfloat16()
mean = StochasticWeightAverage(half)
for step in range(3):
    with torch.no_grad():
        for p in half.parameters():
            p.copy_(p * 0 + (1.0 + step / 128))
    mean.update_parameters(half)
said["half"] = [str(mean.module.one.weight.dtype), [*{*whole(mean)}]]

model = Net()
mean = StochasticWeightAverage(model)
mean.update_parameters(model)
late = divided(lambda: model)
with torch.no_grad():
    late.one.weight.zero_()
for _ in range(2):
    mean.update_parameters(late)
said["divided later"] = [type(mean.module.one.weight).__name__, whole(mean) == whole(late)]

model = divided()
mean = StochasticWeightAverage(model)
mean.update_parameters(model)
with torch.no_grad():
    model.one.weight.zero_()
model.more = nn.Linear(2, 2)
before = gathered(mean.module.state_dict())["one.weight"]
mean.update_parameters(model)
said["grown"] = [before, gathered(mean.module.state_dict())["one.weight"]]

model = divided()
mean = StochasticWeightAverage(model)
mean.update_parameters(model)
before = gathered(mean.module.state_dict())["one.weight"]
model.to_empty(device="cpu")
with torch.no_grad():
    for p in model.parameters():
        p.zero_()
mean.update_parameters(model)
said["moved"] = [before, gathered(mean.module.state_dict())["one.weight"]]
print(json.dumps(said))
dist.destroy_process_group()
"""

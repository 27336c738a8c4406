"""Give advice on adding the bus to a loop that no known engine runs."""

ADVICE = """\
{script} ran no trainer of Lightning, Transformers, ignite or MMEngine, so no events, costs or metrics were
recorded. In a loop of your own, with or without Accelerate, write:

"""
LINES = """\
from eventloop.bridges import DrivenTrainer
from eventloop.writers import JSONLWriter

driven = DrivenTrainer(model, optimizer=optimizer, writers=[JSONLWriter()])
driven.begin_run()
for epoch in range(epochs):
    driven.begin_epoch(len(loader))
    for batch in loader:
        if driven.begin_iter(batch):
            loss = train_on(batch)              # your forward, backward and optimizer.step()
            if driven.end_iter({"loss": loss}):
                break
    driven.end_epoch()
driven.end_run()
print(driven.summary())
"""
HAS_A_TRAINER = (
    "{script} ran no trainer of another engine. It imports eventloop's own Trainer, which needs no "
    "`eventloop run`: print(trainer.summary()) at its end, or `eventloop report` of its work_dir"
)


def advice(script: str) -> str:
    """Return the advice for a script without a known engine, with lines of code to add."""
    lines = "".join(f"    {line}".rstrip() + "\n" for line in LINES.splitlines())
    return ADVICE.format(script=script) + lines

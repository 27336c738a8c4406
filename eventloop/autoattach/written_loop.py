"""Give the texts that `eventloop run` prints for a script that ran no trainer of a supported engine."""

ADVICE = """\
{script} ran no trainer of Lightning, Transformers, ignite or MMEngine, so no events, costs or metrics were
recorded. In a loop of your own, with or without Accelerate, write:

"""
LINES = """\
from eventloop.bridges import DrivenTrainer
from eventloop.writers import JSONLWriter

trainer = DrivenTrainer(model, optimizer=optimizer, max_epochs=epochs, writers=[JSONLWriter()])
for _ in trainer.epochs():
    for batch in trainer.batches(loader):
        loss = train_on(batch)              # your forward, backward and optimizer.step()
        trainer.outputs = {"loss": loss}
print(trainer.summary())
"""
HAS_A_BRIDGE = (
    "{script} has attached a bridge to {hosts} itself, which records the run without `eventloop run`: see "
    "`eventloop report` of its work_dir"
)
HAS_A_TRAINER = (
    "{script} ran no trainer of another engine. It imports eventloop's own Trainer, which needs no "
    "`eventloop run`: print(trainer.summary()) at its end, or `eventloop report` of its work_dir"
)


def advice(script: str) -> str:
    """Return the advice for a script with a loop of its own, with the lines of code to add."""
    lines = "".join(f"    {line}".rstrip() + "\n" for line in LINES.splitlines())
    return ADVICE.format(script=script) + lines

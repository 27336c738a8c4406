"""Apply commands to a running training: those of `eventloop tell` and those of its own handlers.

Start with `commands`, which receives commands on a background thread and applies them on the training thread
at the end of an iteration. `builtin` has the commands that every run knows, `signature` makes one of a
function, `repetition` applies those of an earlier run again, `rollback` goes back to a checkpoint, and
`methods` has what `Trainer` inherits. The package may import lower packages (`stops`, `resume`, `ownership`
and `commands`), and not `training`.
"""

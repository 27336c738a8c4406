"""Apply the commands of `eventloop tell`, and of the training's own handlers, to a running training.

Start with `commands`, which receives commands on a background thread and applies them on the training thread
at the end of an iteration. `builtin` has the commands that every run knows, `signature` makes a command of a
function, `repetition` applies the commands of an earlier run again, `rollback` goes back to a checkpoint, and
`methods` has the methods that `Trainer` inherits. This package may import lower packages (`stops`, `resume`,
`ownership` and `commands`), and not `training`.
"""

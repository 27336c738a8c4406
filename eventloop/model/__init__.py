"""Act on a module as a whole: averages of its weights, BatchNorm statistics, unused parameters.

Start with `averages`. The hooks EMAHook and PreciseBNHook stand on it.
"""

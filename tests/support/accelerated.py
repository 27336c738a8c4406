"""Forget the state of Accelerate, which a process has once and for which its public names have no reset."""

from __future__ import annotations


def reset_accelerator() -> None:
    """Reset Accelerate's singletons."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

"""Count the floating-point operations of an iteration, and look up the peak FLOP/s of well-known GPUs."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

PEAKS = {
    r"\bA100\b": 312e12,  # "NVIDIA A100 Tensor Core GPU" data sheet, both SXM and PCIe
    r"\bH100 PCIe\b": 756e12,  # "NVIDIA H100 Tensor Core GPU" data sheet: 1,513 with sparsity
    r"\bH100 80GB HBM3\b": 989e12,  # the SXM module, same data sheet: 1,979 with sparsity
    r"\bH200$": 989e12,  # the SXM module, "NVIDIA H200 Tensor Core GPU" data sheet: 1,979 with sparsity
}
"""The peak FLOP/s in bfloat16 and float16, without sparsity, by patterns of `torch.cuda.get_device_name`."""
HALF = (torch.bfloat16, torch.float16)
"""The dtypes for which `PEAKS` has the peak."""


def known_peak(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Return the peak FLOP/s of a device for matrix products of a dtype, or None if it is unknown.

    It is unknown for a device that is not in `PEAKS`, for a slice of a GPU (MIG), and for float32, whose
    products may use TF32.
    """
    if device.type != "cuda" or dtype not in HALF:
        return None
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:
        return None
    return next((peak for pattern, peak in PEAKS.items() if re.search(pattern, name)), None)


class FlopCounter:
    """Count the operations in a `with` block, on this thread and in the backward passes that it starts.

        with FlopCounter() as counter:
            loss_fn(model(inputs), target).backward()
        counter.flops

    It uses PyTorch's `FlopCounterMode`: matrix products, convolutions and attention are counted, with a
    multiplication and an addition as two operations. Compiled functions run uncompiled in the block. Without
    `force_eager` PyTorch would find that it cannot compile a new function in the block, and would skip it
    from then on, also after the block.
    """

    def __enter__(self) -> Self:
        """Begin to count, and let compiled functions run uncompiled."""
        self._types = _Types()
        self._mode = FlopCounterMode(display=False)
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(warnings.catch_warnings())
                # `FlopCounterMode` adds global hooks, which compiled modules warn about
                warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
            stack.enter_context(self._types)
            stack.enter_context(self._mode)
            self._scope = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.close()

    @property
    def flops(self) -> int:
        """Return the number of operations so far."""
        return int(self._mode.get_total_flops())

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the results of most counted operations; None if nothing was counted."""
        return max(self._types.calls, key=self._types.calls.__getitem__, default=None)


class _Types(TorchDispatchMode):
    """Count the calls of the operations that `FlopCounterMode` counts, by the dtypes of their results."""

    supports_higher_order_operators = True  # like `FlopCounterMode`, for `flex_attention`

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the dtype of its result if `FlopCounterMode` counts the operation."""
        out = func(*args, **(kwargs or {}))
        if getattr(func, "_overloadpacket", None) in flop_registry:
            # only the first of several results counts, because the others may have another dtype
            results = out if isinstance(out, tuple | list) else (out,)
            self.calls.update(result.dtype for result in results[:1] if isinstance(result, torch.Tensor))
        return out

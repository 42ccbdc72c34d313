"""What a caller has set in torch, for its thread or for the process, does not reach the engine.

Nothing is changed where nothing is set, so a step pays for a few questions. What torch keeps for
the whole process, which are deterministic algorithms and the precision of fp32 matmuls, is put back
after the step.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING = nullcontext()


def defaults_of_torch(device_type: str) -> AbstractContextManager[object]:
    """Returns a context in which torch computes as in a new process: without default device, modes,
    autocast on this type of device, deterministic algorithms, or less precise fp32 matmuls.

    Not the default dtype and the grad mode: code within it names dtypes, and uses inference mode.
    """
    if (
        torch._C._len_torch_function_stack()  # the default device is one of these
        or torch._C._len_torch_dispatch_stack()
        or torch.is_autocast_enabled(device_type)
        or torch.are_deterministic_algorithms_enabled()
        or torch.get_float32_matmul_precision() != "highest"
    ):
        return _set_defaults(device_type)
    return _NOTHING


@contextmanager
def _set_defaults(device_type: str) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.callback(
                torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack()
            )
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.are_deterministic_algorithms_enabled():
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(False)
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=warns)
        precision = torch.get_float32_matmul_precision()
        if precision != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, precision)
        yield


class EmptyTensors(TorchFunctionMode):
    """Gives the parameters of layers, which are made by `torch.empty`, this dtype, in this thread
    alone: torch's default dtype is that of all threads."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        return func(*args, **({"dtype": self._dtype} | given if func is torch.empty else given))

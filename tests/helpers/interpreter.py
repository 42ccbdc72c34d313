"""Makes Triton's interpreter, which runs the kernels on CPUs, faster."""

from inspect import ismodule
from types import FunctionType
from typing import Any

import pytest


def patch_once(patch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter patch Triton's language once per launch.

    It does so again at each call of one kernel function by another, which changes nothing: what it
    looks for, in all names of the language, has been replaced. That takes a third of its time.
    """
    from triton import language
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang

    def patch_unless_patched(function: FunctionType) -> Any:
        modules = [m for m in function.__globals__.values() if ismodule(m)]
        used = [m for m in modules if m is language or m is language.core]
        if any(language.core.is_builtin(m.load) for m in used):
            return patch_lang(function)
        return interpreter._LangPatchScope()

    patch.setattr(interpreter, "_patch_lang", patch_unless_patched)

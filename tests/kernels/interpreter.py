"""
A plugin of pytest's for processes in which kernels are interpreted: it makes Triton's interpreter faster.

A launch replaces the functions of Triton's language by interpreted ones, and so does every call of a function inside
the kernel, all over again: a third of the time goes there. Here it is done once per launch. What a kernel computes is
the same. With a Triton that is made differently, nothing is done.
"""

import triton.language as tl
from triton.runtime import interpreter


LANGUAGE = (tl, tl.core)  # the modules in which Triton replaces functions, where a kernel can see them


def pytest_configure() -> None:
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = once_per_launch(interpreter._patch_lang)


def once_per_launch(patch):
    """`patch(fn)`, for what the launch that is under way has not patched yet."""
    patched, seen_by = set(), {}

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_once(fn):
        if fn not in seen_by:
            modules = [value for value in fn.__globals__.values() if any(value is module for module in LANGUAGE)]
            seen_by[fn] = {module.__name__ for module in modules}
        outermost = not patched
        if seen_by[fn] <= patched:
            return interpreter._LangPatchScope()
        patched.update(seen_by[fn])
        scope = patch(fn)
        if outermost:
            scope.__class__ = Launch
        return scope

    return patch_once

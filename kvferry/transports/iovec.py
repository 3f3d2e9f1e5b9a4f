"""Tables of the system's ``struct iovec``, and calls of the C library, for Numba kernels.

``sendmsg``, ``recvmsg`` and ``process_vm_readv`` take the same kind of table. A row is a contiguous
piece of memory; a call may stop in the middle of a row.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kvferry.layouts.compiled import kernel
from kvferry.layouts.intrinsics import intrinsic

MAX_ROWS = 1024
"""Largest number of rows in one call: the kernel's ``UIO_MAXIOV``."""

IOVEC_DTYPE = np.dtype([("address", np.int64), ("nbytes", np.int64)])
"""The system's ``struct iovec``."""

INT64, INT32 = ir.IntType(64), ir.IntType(32)


def system_call(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Wraps a function of the C library as an intrinsic that kernels call with int64 values.

    The intrinsic returns an int64: the result of the call, or the negative of its ``errno``.

    Args:
        name: name of the function in the C library.
        result: type of the result in C, :data:`INT64` or :data:`INT32`.
        arguments: types of the arguments in C; an address is an :data:`INT64`.
    """

    def call(_context: Any, *_values: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            known = builder.module.globals
            function = known.get(name) or ir.Function(
                builder.module, ir.FunctionType(result, arguments), name
            )
            errno = known.get("__errno_location") or ir.Function(
                builder.module, ir.FunctionType(INT32.as_pointer(), []), "__errno_location"
            )
            narrowed = [
                arg if kind is INT64 else builder.trunc(arg, kind)
                for arg, kind in zip(args, arguments, strict=True)
            ]
            done = builder.call(function, narrowed)
            if result is not INT64:
                done = builder.sext(done, INT64)
            zero = ir.Constant(INT64, 0)
            failed = builder.sub(zero, builder.sext(builder.load(builder.call(errno, [])), INT64))
            return builder.select(builder.icmp_signed("<", done, zero), failed, done)

        return types.int64(*[types.int64] * len(arguments)), generate

    # Numba takes the number of arguments from this signature.
    names = ("context", *(f"value_{number}" for number in range(len(arguments))))
    parameters = [Parameter(each, Parameter.POSITIONAL_ONLY) for each in names]
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(call)


@kernel
def end_of(rows: Any, count: int) -> int:
    """Address after the last of the first ``count`` rows of a table; -1 if ``count`` is 0."""
    if count == 0:
        return -1
    end: int = rows[count - 1].address + rows[count - 1].nbytes
    return end


@kernel
def skip(rows: Any, first: int, nbytes: int) -> int:
    """Removes ``nbytes`` from the rows from ``first`` on; returns the first row left."""
    while nbytes > 0:
        row = rows[first]
        if nbytes < row.nbytes:
            row.address += nbytes
            row.nbytes -= nbytes
            return first
        nbytes -= row.nbytes
        first += 1
    return first

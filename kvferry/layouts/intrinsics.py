"""Loads, stores and copies on raw addresses, as LLVM instructions for Numba kernels.

Addresses and sizes are int64. The instructions check nothing: callers check the bounds.
"""
# ruff: noqa: ARG001  (Numba reads an intrinsic's signature; only the generated code has the values)

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic as _numba_intrinsic

_BYTE = ir.IntType(8)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that kernels can call from a function that generates its code."""
    made: Callable[..., Any] = _numba_intrinsic(function)
    return made


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _mover(width: int, *, stream: bool) -> Callable[..., Any]:
    """``move(target, source)`` of ``width`` bytes; streaming stores need an aligned target."""
    pointee = ir.VectorType(ir.IntType(64), width // 8) if width > 8 else ir.IntType(8 * width)

    def move(_context: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[1], pointee), align=1)
            store = builder.store(
                value, _pointer(builder, args[0], pointee), align=width if stream else 1
            )
            if stream:
                one = ir.Constant(ir.IntType(32), 1)
                store.set_metadata("nontemporal", builder.module.add_metadata([one]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return intrinsic(move)


move_1 = _mover(1, stream=False)
move_2 = _mover(2, stream=False)
move_4 = _mover(4, stream=False)
move_8 = _mover(8, stream=False)
move_16 = _mover(16, stream=False)
move_64 = _mover(64, stream=False)

#: Stores that go around the cache, so that a large copy never reads the target's lines. The target
#: must be aligned to the width. :func:`fence` must follow before other threads may look.
stream_16 = _mover(16, stream=True)
stream_64 = _mover(64, stream=True)


def _transposer(width: int) -> Callable[..., Any]:
    """``transpose(target, target_step, source, source_step)`` of a square of 16-byte rows.

    The square has ``16 // width`` rows and columns of ``width`` bytes each. Row ``i`` lies at
    ``source + i * source_step``; column ``j`` goes to ``target + j * target_step``.
    """
    edge = 16 // width
    row_type = ir.VectorType(ir.IntType(8 * width), edge)
    # Interleaving the upper half of the rows with the lower half, log2(edge) times, transposes.
    halves = [
        ir.Constant(
            ir.VectorType(ir.IntType(32), edge),
            [half * edge // 2 + i // 2 + i % 2 * edge for i in range(edge)],
        )
        for half in (0, 1)
    ]

    def transpose(
        _context: Any, target: Any, target_step: Any, source: Any, source_step: Any
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            def row(base: Any, step: Any, index: int) -> Any:
                offset = builder.mul(step, ir.Constant(ir.IntType(64), index))
                return _pointer(builder, builder.add(base, offset), row_type)

            rows = [builder.load(row(args[2], args[3], i), align=1) for i in range(edge)]
            for _ in range(edge.bit_length() - 1):
                pairs = list(zip(rows[: edge // 2], rows[edge // 2 :], strict=True))
                rows = [
                    builder.shuffle_vector(one, two, half) for one, two in pairs for half in halves
                ]
            for j, column in enumerate(rows):
                builder.store(column, row(args[0], args[1], j), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return intrinsic(transpose)


transpose_1 = _transposer(1)
transpose_2 = _transposer(2)
transpose_4 = _transposer(4)
transpose_8 = _transposer(8)


@intrinsic
def memcpy(_context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """``memcpy(target, source, nbytes)``; source and target must not overlap."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte_pointer = _BYTE.as_pointer()
        function = builder.module.declare_intrinsic(
            "llvm.memcpy", [byte_pointer, byte_pointer, ir.IntType(64)]
        )
        builder.call(
            function,
            [
                _pointer(builder, args[0], _BYTE),
                _pointer(builder, args[1], _BYTE),
                args[2],
                ir.Constant(ir.IntType(1), 0),
            ],
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def fence(_context: Any) -> Any:
    """Orders streaming stores before everything after the fence."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def prefetch(_context: Any, address: Any) -> Any:
    """Requests a cache line for the second-level cache; harmless without memory at the address."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), i32, i32, i32])
        function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, kind, "llvm.prefetch.p0"
        )
        hints = [ir.Constant(i32, value) for value in (0, 2, 1)]  # a read, second level, data
        builder.call(function, [_pointer(builder, args[0], _BYTE), *hints])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _loader(width: int) -> Callable[..., Any]:
    """``load(address)``: ``width`` bytes as a uint64."""
    pointee = ir.IntType(8 * width)

    def load(_context: Any, address: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[0], pointee), align=1)
            return value if width == 8 else builder.zext(value, ir.IntType(64))

        return types.uint64(types.int64), generate

    return intrinsic(load)


load_1 = _loader(1)
load_2 = _loader(2)
load_4 = _loader(4)
load_8 = _loader(8)


@intrinsic
def atomic_add(_context: Any, counter: Any, value: Any) -> Any:
    """``atomic_add(counter, value)``: adds to the first element; returns the value before.

    ``counter`` is an int64 array, for example a field of a structured array. A thread that sees the
    sum also sees all earlier writes of the adding thread.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, args[1], "seq_cst")

    return types.int64(counter, types.int64), generate


@intrinsic
def atomic_load(_context: Any, counter: Any) -> Any:
    """``atomic_load(counter)``: the first element, with all updates of other threads so far."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.load_atomic(array.data, "seq_cst", 8)

    return types.int64(counter), generate

"""Shares compiled loops among the OpenMP threads that torch itself computes on.

These threads are awake, on cores of their own, and as many as the engine has. Threads of ours would not be: an OpenMP thread
that waits for its next region spins for a while on its core, so that a helper which is woken then lands on the caller's core,
and two threads take as long as one (measured on two cores: a restore of 94 MB 8.2 ms against 4.4). The loops call the runtime
from compiled code, since taking the interpreter lock between shares costs up to 5 ms each where another thread of the process
is busy. And this is no `prange`: two of numba's three layers abort when two threads start loops at once, and all of them start
threads of their own.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["SHARES_PER_THREAD", "share", "team_address"]

SHARES_PER_THREAD = 16  # so that a core that is busy elsewhere holds up a sixteenth of its work, not all of it

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_TURN, _FAILED, _ARGUMENTS = range(3)  # fields of what the threads share


@functools.cache
def team_address() -> int:
    """Returns the address of the function that runs another on every thread of torch's OpenMP runtime.

    Raises:
        RuntimeError: No OpenMP runtime is loaded.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except AttributeError as error:
        raise RuntimeError(f"torch's OpenMP threads cannot be reached ({error})") from error
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


@intrinsic(prefer_literal=False)
def share(_typing, team, threads, shares, items, loop, arguments):  # type: ignore[no-untyped-def]
    """Calls `loop(low, high, *arguments)` on a team's threads until `items` items are done; returns whether all went well.

    Args:
        _typing: numba's.
        team: `team_address()`.
        threads: Threads to use; 1 runs the loop on the caller alone.
        shares: Calls of the loop, from 0 to `items`; each takes a stretch `[low, high)`.
        items: How many items there are.
        loop: A compiled loop without a result.
        arguments: A tuple of its further arguments.
    """
    kinds = (types.int64, types.int64, *arguments.types)
    assert loop.get_call_type(_typing, kinds, {}).return_type == types.none

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> ir.Value:
        team, threads, shares, items, _, packed = values
        compiled = loop.dispatcher.overloads[kinds]
        context.add_linking_libs([compiled.library])
        target = context.declare_function(builder.module, compiled.fndesc)
        given = [shares, items, *cgutils.unpack_tuple(builder, packed)]
        kind = ir.LiteralStructType([_I64, _I64, *(value.type for value in given)])
        shared = cgutils.alloca_once(builder, kind)
        zero = ir.Constant(_I64, 0)
        for field, value in enumerate([zero, zero, *given]):
            builder.store(value, cgutils.gep_inbounds(builder, shared, 0, field))

        void = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        body = ir.Function(builder.module, void, builder.module.get_unique_name("share"))
        body.linkage = "internal"
        at = ir.IRBuilder(body.append_basic_block("entry"))
        fields = at.bitcast(body.args[0], kind.as_pointer())
        pointers = [cgutils.gep_inbounds(at, fields, 0, field) for field in range(len(kind.elements))]
        shares, items, *rest = (at.load(pointer) for pointer in pointers[_ARGUMENTS:])
        one = ir.Constant(_I64, 1)
        more, work, done = (body.append_basic_block(name) for name in ("more", "work", "done"))
        at.branch(more)
        at.position_at_end(more)
        turn = at.atomic_rmw("add", pointers[_TURN], one, "seq_cst")
        at.cbranch(at.icmp_signed("<", turn, shares), work, done)
        at.position_at_end(work)
        low, high = (at.sdiv(at.mul(x, items), shares) for x in (turn, at.add(turn, one)))
        status, _ = context.call_conv.call_function(at, target, types.none, kinds, [low, high, *rest])
        with at.if_then(status.is_error):
            at.store(one, pointers[_FAILED])
        at.branch(more)
        at.position_at_end(done)
        at.ret_void()

        opaque = builder.bitcast(shared, cgutils.voidptr_t)
        with builder.if_else(builder.icmp_signed(">", threads, one)) as (together, alone):
            with together:
                start = ir.FunctionType(ir.VoidType(), [void.as_pointer(), cgutils.voidptr_t, _I32, _I32])
                function = builder.inttoptr(team, start.as_pointer())
                builder.call(function, [body, opaque, builder.trunc(threads, _I32), ir.Constant(_I32, 0)])
            with alone:
                builder.call(body, [opaque])
        return builder.icmp_signed("==", builder.load(cgutils.gep_inbounds(builder, shared, 0, _FAILED)), zero)

    return types.boolean(team, threads, shares, items, loop, arguments), generate

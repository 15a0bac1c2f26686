"""Emits vector steps as LLVM IR: loads, float32 arithmetic and the one rounding to a KV dtype, on a fixed number of lanes."""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils

__all__ = ["F32", "I8", "I16", "I32", "LINE_BYTES", "Vector"]

I8, I16, I32 = (ir.IntType(n) for n in (8, 16, 32))
F16, F32 = ir.HalfType(), ir.FloatType()
LINE_BYTES = 64
# 2 ** x on [-1/2, 1/2]: the series of exp(x ln 2), highest power first; what it leaves out is near 1e-7.
_EXP2 = [math.log(2.0) ** n / math.factorial(n) for n in range(6, -1, -1)]
_STORED = {types.uint16: I16, types.int16: I16, types.float32: F32}


class Vector:
    """Emits steps on vectors of one length.

    Args:
        builder: Where the instructions go.
        lanes: Elements a vector.
        like: The numba array type whose element names the KV dtype: `uint16` is the bits of a bfloat16, `int16` the bits of
            a float16, `float32` itself.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int, like: types.Type) -> None:
        self.at = builder
        self.lanes = lanes
        self.element = like.dtype

    def of(self, element: ir.Type) -> ir.Type:
        """Returns the vector type of an element type."""
        return ir.VectorType(element, self.lanes)

    def ints(self, value: int) -> ir.Constant:
        """Returns a constant vector of int32."""
        return ir.Constant(self.of(I32), [value] * self.lanes)

    def splat(self, scalar: ir.Value) -> ir.Value:
        """Returns a vector that repeats a scalar."""
        none = ir.Constant(self.of(scalar.type), ir.Undefined)
        one = self.at.insert_element(none, scalar, ir.Constant(I32, 0))
        return self.at.shuffle_vector(one, none, ir.Constant(self.of(I32), [0] * self.lanes))

    def load(self, address: ir.Value, element: ir.Type) -> ir.Value:
        """Loads elements from an address of any alignment."""
        return self.at.load(self.at.inttoptr(address, self.of(element).as_pointer()), align=1)

    def store(self, value: ir.Value, address: ir.Value, align: int = 1) -> ir.Instruction:
        """Stores a vector at an address."""
        return self.at.store(value, self.at.inttoptr(address, value.type.as_pointer()), align=align)

    def elements(self, address: ir.Value) -> ir.Value:
        """Loads elements of the KV dtype as they are stored."""
        return self.load(address, _STORED[self.element])

    def widened(self, raw: ir.Value) -> ir.Value:
        """Returns stored elements as float32."""
        if self.element == types.uint16:
            return self.at.bitcast(self.at.shl(self.at.zext(raw, self.of(I32)), self.ints(16)), self.of(F32))
        if self.element == types.int16:
            return self.at.fpext(self.at.bitcast(raw, self.of(F16)), self.of(F32))
        return raw

    def floats(self, address: ir.Value) -> ir.Value:
        """Loads elements of the KV dtype as float32."""
        return self.widened(self.elements(address))

    def numbers(self, codes: ir.Value) -> ir.Value:
        """Returns int8 codes as float32."""
        return self.at.sitofp(self.at.sext(codes, self.of(I32)), self.of(F32))

    def stream(self, value: ir.Value, address: ir.Value) -> None:
        """Stores whole lines past the caches; the address is aligned to a line."""
        store = self.store(value, address, align=LINE_BYTES)
        store.set_metadata("nontemporal", self.at.module.add_metadata([ir.Constant(I32, 1)]))

    def merged(self, first: ir.Value, second: ir.Value, cut: ir.Value) -> ir.Value:
        """Returns the lanes of `first` below `cut`, then those of `second`."""
        lane = ir.Constant(self.of(I32), list(range(self.lanes)))
        return self.at.select(self.at.icmp_signed("<", lane, self.splat(cut)), first, second)

    def put(self, value: ir.Value, address: ir.Value, *, stream: bool = False) -> None:
        """Stores float32 rounded once, to nearest and ties to even, to elements of the KV dtype."""
        if self.element == types.uint16:
            # A NaN that came from 16 bits has an empty lower half, so the carry cannot turn it into a number.
            bits = self.at.bitcast(value, self.of(I32))
            odd = self.at.and_(self.at.lshr(bits, self.ints(16)), self.ints(1))
            bits = self.at.add(self.at.add(bits, self.ints(0x7FFF)), odd)
            value = self.at.trunc(self.at.lshr(bits, self.ints(16)), self.of(I16))
        elif self.element == types.int16:
            value = self.at.bitcast(self.at.fptrunc(value, self.of(F16)), self.of(I16))
        if stream:
            self.stream(value, address)
        else:
            self.store(value, address)

    def call(self, name: str, returns: ir.Type, *values: ir.Value, fastmath: tuple[str, ...] = ()) -> ir.Value:
        """Calls an LLVM intrinsic."""
        kind = ir.FunctionType(returns, [value.type for value in values])
        function = cgutils.get_or_insert_function(self.at.module, kind, name)
        return self.at.call(function, values, fastmath=fastmath)

    def scaled(self, value: ir.Value, scale: ir.Value) -> ir.Value:
        """Returns value times a scalar."""
        return self.at.fmul(value, self.splat(scale))

    def turned(self, a: ir.Value, b: ir.Value, cos: ir.Value, sin: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns (a cos - b sin, b cos + a sin)."""
        return (
            self.at.fsub(self.scaled(a, cos), self.scaled(b, sin)),
            self.at.fadd(self.scaled(b, cos), self.scaled(a, sin)),
        )

    def rounded(self, value: ir.Value) -> ir.Value:
        """Returns float32 rounded to whole numbers, ties to even."""
        return self.call(f"llvm.rint.v{self.lanes}f32", value.type, value)

    def clamped(self, value: ir.Value, low: float, high: float) -> ir.Value:
        """Returns int32 of whole float32 numbers, clamped; NaN gives `low`."""
        floor, roof = (self.splat(ir.Constant(F32, x)) for x in (low, high))
        value = self.at.select(self.at.fcmp_ordered(">", value, floor), value, floor)
        value = self.at.select(self.at.fcmp_ordered("<", value, roof), value, roof)
        return self.at.fptosi(value, self.of(I32))

    def ordered(self, value: ir.Value) -> ir.Value:
        """Returns int32 that sort as the float32 do: whole-number maxima need no care for NaN and run in vectors."""
        bits = self.at.bitcast(value, self.of(I32))
        return self.at.xor(bits, self.at.and_(self.at.ashr(bits, self.ints(31)), self.ints(0x7FFFFFFF)))

    def largest(self, ints: ir.Value, *, smallest: bool = False) -> ir.Value:
        """Returns the largest (or smallest) int32 of a vector."""
        return self.call(f"llvm.vector.reduce.s{'min' if smallest else 'max'}.v{self.lanes}i32", I32, ints)

    def total(self, value: ir.Value) -> ir.Value:
        """Returns the sum of a float32 vector, added as a tree."""
        name = f"llvm.vector.reduce.fadd.v{self.lanes}f32"
        return self.call(name, F32, ir.Constant(F32, 0.0), value, fastmath=("reassoc",))

    def fused(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Returns a * b + c, rounded once."""
        return self.call(f"llvm.fma.v{self.lanes}f32", a.type, a, b, c)

    def real(self, value: float) -> ir.Constant:
        """Returns a constant vector of float32."""
        return ir.Constant(self.of(F32), [value] * self.lanes)

    def power_of_two(self, value: ir.Value) -> ir.Value:
        """Returns 2 ** value for values up to 0 (0 below -126), within 3 units of the last place."""
        at = self.at
        low = at.fcmp_ordered("<", value, self.real(-126.0))
        value = at.select(low, self.real(-126.0), value)
        whole = self.rounded(value)
        rest = at.fsub(value, whole)
        result = self.real(_EXP2[0])
        for factor in _EXP2[1:]:
            result = self.fused(result, rest, self.real(factor))
        exponent = at.shl(at.add(at.fptosi(whole, self.of(I32)), self.ints(127)), self.ints(23))
        return at.select(low, self.real(0.0), at.fmul(result, at.bitcast(exponent, self.of(F32))))

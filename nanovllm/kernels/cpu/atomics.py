"""What numba lacks for threads that work together: atomic access, and calls of addresses."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def add(typing_context, job, index, value):
    """Adds to an element of `job` atomically; returns what it was before."""

    def generate(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("add", place, args[2], "seq_cst")

    return types.int64(job, types.int64, types.int64), generate


@intrinsic
def exchange(typing_context, job, index, value):
    """Replaces an element of `job` atomically; returns what it was before."""

    def generate(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("xchg", place, args[2], "seq_cst")

    return types.int64(job, types.int64, types.int64), generate


@intrinsic
def read(typing_context, job, index):
    """Returns an element of `job` that other threads change."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "seq_cst", 8)

    return types.int64(job, types.int64), generate


@intrinsic
def write(typing_context, job, index, value):
    """Writes an element of `job` after everything that was written before."""

    def generate(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        builder.store_atomic(args[2], place, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(job, types.int64, types.int64), generate


@intrinsic
def call(typing_context, kernel, arguments, chunk):
    """Calls the kernel at an address for one part; or another C function, of one argument."""

    def generate(context, builder, signature, args):
        kernel, arguments, chunk = args
        null = ir.IntType(64)(0)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 4)
        builder.call(builder.inttoptr(kernel, kind.as_pointer()), [arguments, null, null, chunk])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def pause(typing_context):
    """Tells the CPU that this thread only waits."""

    def generate(context, builder, signature, args):
        if builder.module.triple.startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(
                cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), []
            )
        return context.get_dummy_value()

    return types.void(), generate

"""Matrix products for CPUs: weights stay in the checkpoint's dtype and are widened in registers.

A packed weight is [panels, size, WIDTH]: panel p holds the output features from p * WIDTH on, the
last one padded with zeros. So a step over the input features reads one vector of each panel. Each
result is summed in fp32 in the order of the input features, whatever the number of tokens: a
token's results do not depend on its batch.
"""

import struct

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm.kernels.cpu.compile import address_of
from nanovllm.kernels.cpu.storage import pointer, shifted
from nanovllm.kernels.cpu.threads import run

WIDTH = 16
PANELS_PER_CHUNK = 4
TOKENS_PER_CHUNK = 48  # their activations stay in the second-level cache
MAX_TILE_TOKENS = 6
# A tile's sums fill the vector registers: 12 of 16 with AVX2, two for each vector here; 12 of 32
# with AVX-512.
TILE_VECTORS = 12 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 6
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight [n, size] -> the packed weight, [ceil(n / WIDTH), size, WIDTH]"""
    n, size = weight.shape
    padded = weight.new_zeros(-(-n // WIDTH) * WIDTH, size)
    padded[:n] = weight
    return padded.view(-1, WIDTH, size).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """Undoes `pack` -> [n, size]"""
    return packed.transpose(1, 2).flatten(0, 1)[:n].contiguous()


def rows(packed: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns rows of the weight that was packed: indices int64 [t] -> [t, size]"""
    return packed[indices // WIDTH, :, indices % WIDTH]


def padded(bias: torch.Tensor) -> torch.Tensor:
    """Returns a bias [n] in fp32, with zeros behind it in its storage up to a multiple of WIDTH."""
    storage = torch.zeros(-(-len(bias) // WIDTH) * WIDTH, dtype=torch.float32)
    storage[: len(bias)] = bias
    return storage[: len(bias)]


def _load_wide(builder, address, kind):
    """Emits the load of WIDTH stored numbers as fp32."""
    if isinstance(kind, types.Float):
        return builder.load(builder.bitcast(address, _VECTOR.as_pointer()), align=4)
    bits = ir.VectorType(ir.IntType(16), WIDTH)
    stored = builder.load(builder.bitcast(address, bits.as_pointer()), align=2)
    if kind.signed:  # fp16
        return builder.fpext(builder.bitcast(stored, ir.VectorType(ir.HalfType(), WIDTH)), _VECTOR)
    ints = ir.VectorType(_INT32, WIDTH)
    return builder.bitcast(
        builder.shl(builder.zext(stored, ints), ir.Constant(ints, [16] * WIDTH)), _VECTOR
    )


def _splat(builder, value):
    """Emits a vector of WIDTH copies of an fp32 value."""
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    vector = builder.insert_element(undefined, value, _INT32(0))
    zeros = ir.Constant(ir.VectorType(_INT32, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(vector, undefined, zeros)


def _store(builder, vector, address, count):
    """Emits the store of the first `count` elements of a vector."""
    is_whole = builder.icmp_signed(">=", count, _INT64(WIDTH))
    with builder.if_else(is_whole) as (whole, part):
        with whole:
            builder.store(vector, builder.bitcast(address, _VECTOR.as_pointer()), align=4)
        with part, cgutils.for_range(builder, count, intp=_INT64) as loop:
            value = builder.extract_element(vector, loop.index)
            builder.store(value, builder.gep(address, [loop.index]))


# (tokens, panels) of the tiles whose sums fit, and the most panels by the number of tokens.
TILES = [
    (tokens, panels)
    for tokens in range(1, MAX_TILE_TOKENS + 1)
    for panels in (1, 2, 4)
    if panels == 1 or tokens * panels <= TILE_VECTORS
]
MOST_PANELS = (0, *(max(p for t, p in TILES if t == n) for n in range(1, MAX_TILE_TOKENS + 1)))


def _emit_tile(builder, args, kind, tokens, panels):
    """Emits the product of `tokens` rows of x and `panels` neighbouring panels of the weight."""
    x, weight, bias, size, out, stride, count = args
    index = _INT64
    zero = ir.Constant(_VECTOR, [0.0] * WIDTH)
    firsts = [cgutils.alloca_once_value(builder, zero) for _ in range(panels)]
    for first in firsts:
        builder.store(zero, first)
    with builder.if_then(cgutils.is_not_null(builder, bias)):
        for panel, first in enumerate(firsts):
            address = builder.gep(bias, [index(panel * WIDTH)])
            builder.store(_load_wide(builder, address, types.float32), first)
    # LLVM keeps all sums in registers.
    sums = {
        (t, p): cgutils.alloca_once(builder, _VECTOR) for t in range(tokens) for p in range(panels)
    }
    for (_, panel), place in sums.items():
        builder.store(builder.load(firsts[panel]), place)
    panel_size = builder.mul(size, index(WIDTH))
    with cgutils.for_range(builder, size, intp=index) as loop:
        weights = []
        for panel in range(panels):
            start = builder.mul(panel_size, index(panel))
            offset = builder.add(start, builder.mul(loop.index, index(WIDTH)))
            weights.append(_load_wide(builder, builder.gep(weight, [offset]), kind))
        values = []
        for token in range(tokens):
            offset = builder.add(builder.mul(size, index(token)), loop.index)
            values.append(_splat(builder, builder.load(builder.gep(x, [offset]))))
        for (token, panel), place in sums.items():
            product = builder.fmul(values[token], weights[panel], flags=["contract"])
            total = builder.fadd(product, builder.load(place), flags=["contract"])
            builder.store(total, place)
    for (token, panel), place in sums.items():
        offset = builder.add(builder.mul(stride, index(token)), index(panel * WIDTH))
        _store(builder, builder.load(place), builder.gep(out, [offset]), count)


@intrinsic
def multiply_tile(typing_context, x, weight, bias, size, out, stride, count, tokens, panels):
    """Multiplies `tokens` rows of x by `panels` neighbouring panels, one of `TILES`.

    size: input features. stride: the distance of rows of `out`. count: how many of the panels'
    output features exist; with several panels, all do.
    """

    def generate(context, builder, signature, args):
        kind = signature.args[1].dtype
        *args, tokens, panels = args
        end = builder.append_basic_block("end")
        key = builder.add(builder.mul(tokens, _INT64(8)), panels)
        switch = builder.switch(key, end)
        for tile in TILES:
            block = builder.append_basic_block(f"tile_{tile[0]}_{tile[1]}")
            switch.add_case(_INT64(tile[0] * 8 + tile[1]), block)
            builder.position_at_end(block)
            _emit_tile(builder, args, kind, *tile)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    integers = [types.int64] * 3
    arguments = x, weight, bias, types.int64, out, *integers, types.int64
    return types.void(*arguments), generate


def _matmul(arguments, x_like, weight_like, chunk):
    x, weight = pointer(arguments[0], x_like), pointer(arguments[1], weight_like)
    bias, out = pointer(arguments[2], x_like), pointer(arguments[3], x_like)
    num_tokens, size, n = arguments[4], arguments[5], arguments[6]
    num_blocks = (num_tokens + TOKENS_PER_CHUNK - 1) // TOKENS_PER_CHUNK
    group, block = chunk // num_blocks, chunk % num_blocks
    first, last = num_tokens * block // num_blocks, num_tokens * (block + 1) // num_blocks
    num_tiles = (last - first + MAX_TILE_TOKENS - 1) // MAX_TILE_TOKENS
    most_panels = MOST_PANELS[(last - first + num_tiles - 1) // num_tiles]
    start = group * PANELS_PER_CHUNK * WIDTH
    end = min(start + PANELS_PER_CHUNK * WIDTH, n)
    while start < end:
        panels = most_panels if start + most_panels * WIDTH <= end else 1
        for i in range(num_tiles):
            token = first + (last - first) * i // num_tiles
            tokens = first + (last - first) * (i + 1) // num_tiles - token
            multiply_tile(
                shifted(x, token * size),
                shifted(weight, start * size),
                shifted(bias, start) if arguments[2] else bias,
                size,
                shifted(out, token * n + start),
                n,
                end - start,
                tokens,
                panels,
            )
        start += panels * WIDTH


_pack_arguments = struct.Struct("7q").pack


def linear(
    x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Computes x W^T (+ bias) in fp32: x fp32 [t, size], W of n output features, packed -> [t, n].

    bias: fp32; its storage has zeros behind it up to a multiple of WIDTH.
    """
    num_tokens, size = x.shape
    num_panels = len(packed)
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert packed.is_contiguous()
    assert packed.shape == (-(-n // WIDTH), size, WIDTH)
    out = x.new_empty(num_tokens, n)
    arguments = _pack_arguments(
        x.data_ptr(),
        packed.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        size,
        n,
    )
    chunks = -(-num_panels // PANELS_PER_CHUNK) * -(-num_tokens // TOKENS_PER_CHUNK)
    run(address_of(_matmul, torch.float32, packed.dtype), arguments, chunks)
    return out

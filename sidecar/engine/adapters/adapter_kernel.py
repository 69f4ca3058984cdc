"""
One CUDA kernel that adds what a batch's adapters add to projections in a decode step.

There the host, which encodes kernels, is slower than the device, and the plain form
takes a product with A and one with B for each projection. Elsewhere, and for prompts,
that form is used. Each block of the kernel has one row of the batch, computes that
row's product with A (a warp a column), and adds the product with B to its outputs: the
"shrink and expand" of Punica (Chen et al., 2023) in one launch.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from sidecar.kv.kv_layers import is_on_cuda

logger = logging.getLogger(__name__)

_WARP = 32
_VECTOR = 8  # elements that a thread reads at once
_THREADS = 256
_MAX_RANKS = 8192  # of all projections: a block holds a float of each
_TOLERANCE = 1e-2  # MLX may multiply in TF32; a wrong sum is off by some 30
_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
}

_HEADER = """
#include "mlx/backend/cuda/device/utils.cuh"
template <typename T> struct alignas(sizeof(T) * 8 > 16 ? 16 : sizeof(T) * 8) Eight {
  T at[8];
};
"""

_SHRINK = """
  __shared__ float shrunk[K];  // 48 KB at most: see _MAX_RANKS
  const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Eight<T>* input = reinterpret_cast<const Eight<T>*>(x + (size_t)row * I);
  for (int k = warp; k < K; k += blockDim.x / 32) {
    const Eight<T>* column =
        reinterpret_cast<const Eight<T>*>(a + ((size_t)row * K + k) * I);
    float sum = 0.0f;
    #pragma unroll 4
    for (int i = lane; i < I / 8; i += 32) {
      const Eight<T> one = input[i], other = column[i];
      #pragma unroll
      for (int e = 0; e < 8; e++) {
        sum += static_cast<float>(one.at[e]) * static_cast<float>(other.at[e]);
      }
    }
    for (int apart = 16; apart > 0; apart /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, apart);
    }
    if (lane == 0) shrunk[k] = sum;
  }
  __syncthreads();
  const int o = blockIdx.x * blockDim.x + threadIdx.x;
"""
_EXPAND = """
  if (o >= {output} && o < {output} + O{n}) {{
    const int own = o - ({output});
    float sum = static_cast<float>(y{n}[(size_t)row * O{n} + own]);
    #pragma unroll
    for (int k = 0; k < R{n}; k++) {{
      const T weight = b{n}[((size_t)row * R{n} + k) * O{n} + own];
      sum += shrunk[{rank} + k] * static_cast<float>(weight);
    }}
    sum{n}[(size_t)row * O{n} + own] = static_cast<T>(sum);
  }}
"""


Adder = Callable[..., list[mx.array]]  # x and each projection's y -> their sums


def is_usable(a: mx.array) -> bool:
    """
    Whether the kernel can be used here.

    Args:
        a: of all projections one behind the other (rows, ranks, inputs).
    """
    _, num_ranks, num_inputs = a.shape
    is_readable = num_inputs % (_WARP * _VECTOR) == 0 and a.dtype in _TYPES
    return is_readable and num_ranks <= _MAX_RANKS and is_on_cuda() and _is_right()


def adder(a: mx.array, bs: Sequence[mx.array]) -> Adder:
    """
    What adds x A B to each projection's y, every row with its own matrices.

    Args:
        a: of all projections one behind the other (rows, ranks, inputs).
        bs: of each projection (rows, rank, outputs).
    Returns:
        Takes x (rows, 1, inputs) and each y (rows, 1, outputs), all of one type.
    """
    num_rows, _, num_inputs = a.shape
    widths = [b.shape[2] for b in bs]
    ranks = [b.shape[1] for b in bs]
    kernel = _kernel(a.dtype, num_inputs, tuple(zip(ranks, widths, strict=True)))
    num_blocks = -(-sum(widths) // _THREADS)
    matrices = [a, *bs]
    shape = {
        "grid": (num_blocks * _THREADS, num_rows, 1),
        "threadgroup": (_THREADS, 1, 1),
        "output_shapes": [(num_rows, 1, width) for width in widths],
        "output_dtypes": [a.dtype] * len(bs),
    }

    def add(x: mx.array, *ys: mx.array) -> list[mx.array]:
        found: list[mx.array] = kernel(inputs=[x, *matrices, *ys], **shape)
        return found

    return add


@functools.cache
def _kernel(
    dtype: mx.Dtype, num_inputs: int, sizes: tuple[tuple[int, int], ...]
) -> Callable[..., Any]:
    """
    The kernel for projections of so many ranks and outputs.

    The numbers stand in its text: given as arguments of a template they would be
    written anew at each call, which takes as long as all else of it.
    """
    constants = [f"constexpr int I = {num_inputs};"]
    constants += [f"constexpr int K = {sum(rank for rank, _ in sizes)};"]
    for n, (rank, width) in enumerate(sizes):
        constants += [f"constexpr int R{n} = {rank};", f"constexpr int O{n} = {width};"]
    names = range(len(sizes))
    digits = "_".join(f"{rank}x{width}" for rank, width in sizes)
    kernel: Any = mx.fast.cuda_kernel(
        name=f"add_adapters_{_TYPES[dtype]}_{num_inputs}_{digits}",
        input_names=["x", "a", *(f"b{n}" for n in names), *(f"y{n}" for n in names)],
        output_names=[f"sum{n}" for n in names],
        source=_source(len(sizes)),
        header="\n".join([_HEADER, f"using T = {_TYPES[dtype]};", *constants, ""]),
    )
    return cast(Callable[..., Any], kernel)


def _source(count: int) -> str:
    expands, first_rank, first_output = [], "0", "0"
    for n in range(count):
        expands.append(_EXPAND.format(n=n, rank=first_rank, output=first_output))
        first_rank, first_output = f"{first_rank} + R{n}", f"{first_output} + O{n}"
    return _SHRINK + "".join(expands)


@functools.cache
def _is_right() -> bool:
    """Whether it computes here what MLX's own products do; tried once a process."""
    keys = iter(mx.random.split(mx.random.key(0), 6))  # the global state is others'

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    x, a = normal(3, 1, 256), normal(3, 5, 256)
    bs = [normal(3, rank, 320) for rank in (2, 3)]
    ys = [normal(3, 1, 320) for _ in bs]
    shrunk = (x @ a.swapaxes(1, 2)).astype(mx.float32)
    wanted = [ys[0] + shrunk[..., :2] @ bs[0], ys[1] + shrunk[..., 2:] @ bs[1]]
    try:
        found = adder(a, bs)(x, *ys)
        is_right = all(
            mx.allclose(one, other, atol=1.0, rtol=_TOLERANCE).item()
            for one, other in zip(found, wanted, strict=True)
        )
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises
        logger.warning("adapters are added without a kernel of ours: %s", error)
        return False
    if not is_right:
        logger.warning("adapters are added without a kernel of ours: it is wrong")
    return is_right

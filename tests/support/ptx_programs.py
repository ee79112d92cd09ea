"""Small kernels in PTX, executed by tools/ptx."""

import torch
from ptx.block import Launch
from ptx.counts import Counts
from ptx.decode import Kernel
from ptx.global_memory import GlobalMemory
from ptx.parse import parse

HEAD = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 shared_bytes[];
.visible .entry test(.param .u64 .ptr .global .align 1 a, .param .u64 .ptr .global .align 1 b)
{
  .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<100>; .reg .f32 %f<100>; .reg .b64 %d<20>;
  mov.u32 %r0, %tid.x;
  ld.param.u64 %d0, [a];
  ld.param.u64 %d1, [b];
  mul.wide.u32 %d2, %r0, 4;
  add.s64 %d3, %d0, %d2;  // a + tid
  add.s64 %d4, %d1, %d2;  // b + tid
  mov.u32 %r99, shared_bytes;
  shl.b32 %r1, %r0, 2;
  add.u32 %r1, %r1, %r99;  // a word of shared memory for each thread
"""


def run(
    body: str, a: torch.Tensor | None = None, b: torch.Tensor | None = None, threads: int = 64, blocks: int = 1
) -> Counts:
    """Execute statements with tid in %r0, a and b in %d0 and %d1, a + tid and b + tid in %d3 and
    %d4, shared memory's first address in %r99, of the thread's word there in %r1."""
    kernel = Kernel(parse(HEAD + body + "\n  ret;\n}\n"))
    memory = GlobalMemory()
    params = b""
    for tensor in (a, b):
        params += (0 if tensor is None else tensor.data_ptr()).to_bytes(8, "little")
        if tensor is not None:
            memory.add(tensor)
    counts = Counts(kernel.program)
    Launch(kernel, params, (blocks, 1, 1), threads, 4096, memory, counts=counts).run()
    return counts


def unary(op: str, kinds: str, given: torch.Tensor, result: torch.dtype) -> torch.Tensor:
    """`op` on a tensor. kinds: register letter and type of source and of result: "f f32 r b32"."""
    register, source, to_register, to = kinds.split()
    out = torch.empty(len(given), dtype=result)
    run(
        f"mul.wide.u32 %d5, %r0, {given.element_size()}; add.s64 %d5, %d0, %d5;"
        f"mul.wide.u32 %d6, %r0, {out.element_size()}; add.s64 %d6, %d1, %d6;"
        f"ld.global.{source} %{register}9, [%d5]; {op} %{to_register}8, %{register}9;"
        f"st.global.{to} [%d6], %{to_register}8;",
        given, out, threads=len(given),
    )  # fmt: skip
    return out

"""What is read from the text of a generated module."""

from __future__ import annotations

from textwrap import dedent

import torch

from hybrid_runtime.graphs.lowering.generated_code import Allocation, parse_module

MODULE = dedent(
    """
    first = async_compile.triton('first', '''
    def first(): pass
    ''', device_str='cuda')
    second_0 = async_compile.triton('second', '''source of second''', device_str='cuda')

    def inner(args):
        first.run(args, 32, stream=raw_stream0)
        first.run(args, 32, stream=raw_stream0)

    def region(args):
        x, pool = args
        pool = copy_if_misaligned(pool)
        buf0 = empty_strided_cuda((8, 4), (4, 1), torch.float32)
        second_0.run(x, buf0, 32, stream=raw_stream0)
        extern_kernels.mm(x, x, out=buf0)
        inner(args)
        return (buf0, )

    class Runner:
        def call(self, args):
            arg0_1, arg1_1 = args
            first.run(arg0_1, 32, stream=raw_stream0)
            region_args = [arg0_1, arg1_1]
            buf1 = region(region_args)
            buf2 = region(region_args)
            buf3 = torch.ops.aten.topk.default(buf1, 3)
            buf4 = workspace_0[0 : 64].view(2, 32).sum(dim=0)
            return (reinterpret_tensor(buf3, (1, ), (1, ), 0), )

    def benchmark_compiled_module(args):
        first.run(args)
    """
)


def test_a_region_counts_as_often_as_it_is_called():
    module = parse_module(MODULE)
    assert module.launches == {"first": 1 + 2 * 2, "second_0": 2}
    assert module.extern_calls == {"extern_kernels.mm": 2, "torch.ops.aten.topk.default": 1, "Tensor.sum": 1}
    assert module.allocations == (Allocation("buf0", (8, 4), torch.float32, "cuda", 2),)
    assert module.allocations[0].num_bytes == 128
    assert module.copied_if_misaligned == ("pool",)
    assert module.host_work == ()


def test_kernels_have_their_names_and_sources():
    kernels = parse_module(MODULE).kernels
    assert (kernels["second_0"].function, kernels["second_0"].source) == ("second", "source of second")


def test_host_work_is_named():
    module = parse_module(
        dedent(
            """
            def call(args):
                buf0 = empty_strided_cpu((4, ), (1, ), torch.int64)
                buf1 = empty_strided_cuda((u0, 4), (4, 1), torch.float32)
                count = buf0.item()
                buf2 = torch.ops.aten.to(buf1, device='cpu')
            """
        )
    )
    assert [line.partition(" = ")[0] for line in module.host_work] == ["buf0", "buf1", "count", "buf2"]
    assert module.allocations[1].shape == (4,)


def test_dynamic_sizes_are_those_of_the_example():
    code = dedent(
        """
        def call(args):
            s77 = args[1]
            buf0 = empty_strided_cuda((s77, max(1, s77 // 4), 3), (3, 3, 1), torch.bfloat16)
        """
    )
    module = parse_module(code, {"s77": 8})
    assert module.allocations == (Allocation("buf0", (8, 2, 3), torch.bfloat16, "cuda", 1),)
    assert module.host_work == ()

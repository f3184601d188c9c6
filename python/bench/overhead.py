"""What a call of ``kodkod.moe`` costs on the CPU beyond the compiled module's own, with tiny inputs.

python bench/overhead.py
python bench/overhead.py cuda       # what the CPU does for passes on a GPU, which is not waited for
"""

import sys
import time

import torch

import kodkod
from kodkod import _kodkod, _ops

GPU = sys.argv[1:] == ["cuda"]


def microseconds(run, calls=20 if GPU else 300, repeats=200 if GPU else 40):
    """Of one call, in the quickest of some series: what disturbs a series makes it slower only."""
    for _ in range(calls):
        run()
    best = float("inf")
    for _ in range(repeats):
        if GPU:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, time.perf_counter() - begin)
    return best / calls * 1e6


def main():
    group = None if GPU else kodkod.ExpertGroup.cpu(1, threads=1)
    tokens, hidden, intermediate, experts, top_k = (2, 128, 64, 8, 2) if GPU else (2, 8, 8, 2, 1)
    device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    like = {"device": device, "dtype": dtype, "requires_grad": True}
    x = torch.randn(tokens, hidden, **like)
    ids = torch.zeros(tokens, top_k, dtype=torch.int32 if GPU else torch.int64, device=device)
    topk_weights = torch.rand(tokens, top_k, device=device, requires_grad=True)
    shapes = [(experts, intermediate, hidden)] * 2 + [(experts, hidden, intermediate)]
    weights = [torch.randn(shape, **like) for shape in shapes]
    leaves = [x, topk_weights, *weights]
    dy = torch.ones_like(x)

    plan = _ops.Plan([1, 1, 1, *[0] * 7], ("swiglu", None, 1.702, 0 if GPU else group._number, [-1] * 5), GPU)
    y, context = _ops._forward(plan, x, ids, topk_weights, weights, True, False)
    inputs = _ops._lay([x, ids, topk_weights, *weights], GPU)
    gradients = [torch.empty_like(t) for t in leaves]
    out, addresses = y.data_ptr(), _ops._lay(gradients, GPU)
    config = plan.config

    def layer():
        return kodkod.moe(x, ids, topk_weights, *weights, group=group)

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            return torch.empty_like(tensors[0])

        @staticmethod
        def backward(ctx, dy):
            return tuple(gradients)

    def both(out):
        torch.autograd.grad(out, leaves, dy)

    args = (config, inputs, context.data_ptr(), dy.data_ptr(), *addresses[:2], addresses[2:], not GPU, False)
    if GPU:
        place = (x.device.index, torch.cuda.current_stream().cuda_stream, False, False)
        rust = microseconds(lambda: _kodkod.cuda_forward(place, config, inputs, out, True, False))
        rust_backward = microseconds(lambda: _kodkod.cuda_backward(place, *args))
    else:
        rust = microseconds(lambda: _kodkod.forward(config, inputs, out, True))
        rust_backward = microseconds(lambda: _kodkod.backward(*args))
    with torch.no_grad():
        inference = microseconds(layer)
    training = microseconds(layer)
    step = microseconds(lambda: both(layer()))
    empty = microseconds(lambda: both(Nothing.apply(*leaves)))
    print(f"compiled forward                      {rust:6.1f} us")
    print(f"kodkod.moe, no_grad                   {inference:6.1f} us: {inference - rust:.1f} over it")
    print(f"kodkod.moe, for a backward            {training:6.1f} us: {training - rust:.1f} over it")
    print(f"compiled forward and backward         {rust + rust_backward:6.1f} us")
    print(f"forward and backward                  {step:6.1f} us")
    print(f"the same with a Function that is empty {empty:5.1f} us: torch's own part")


if __name__ == "__main__":
    main()

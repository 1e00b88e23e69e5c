"""What each of several processes does for test_torch_distributed.py:

    python ranks.py RANK SIZE FILE DEVICE

FILE is where they meet. On the CPU they talk by gloo, each on a thread of its own; on GPUs by NCCL,
each with a GPU of its own."""
import datetime
import itertools
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bindings" / "python"), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

import flashattn.torch as fa  # noqa: E402
import reference  # noqa: E402

NAMES = ("o", "dq", "dk", "dv")


def shared(*shape, dtype=torch.float32, seed=0):
    """The same numbers in every process."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_()


def context_parallel(mesh, size):
    """The ring equals one process: float32 to 1e-5, bfloat16 to twice the naive error. On GPUs
    bfloat16 alone: torch gives float32 there to its efficient kernel, past this library."""
    from torch.distributed.tensor.experimental import context_parallel as split
    from torch.distributed.tensor.experimental._attention import (_cp_options,
                                                                  context_parallel_unshard,
                                                                  set_rotate_method)
    fa.activate()
    device = mesh.device_type
    dtypes = (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16,)
    for dtype, causal, rotate in itertools.product(dtypes, (True, False),
                                                   ("allgather", "alltoall")):
        set_rotate_method(rotate)
        _cp_options.enable_load_balance = causal  # torch has it for causal masks alone
        *inputs, dout = [shared(2, 4, 64, 32, dtype=dtype, seed=i).detach().to(device)
                         for i in range(4)]
        inputs = [x.requires_grad_() for x in inputs]
        alone = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        wants = [alone.detach(), *torch.autograd.grad(alone, inputs, dout)]
        shards, before = [x.detach().clone() for x in (*inputs, dout)], fa.report()
        with split(mesh, buffers=shards, buffer_seq_dims=[2] * 4,
                   no_restore_buffers=set(shards)):
            leaves = [x.requires_grad_() for x in shards[:3]]
            assert leaves[0].shape[2] == 64 // size
            o = F.scaled_dot_product_attention(*leaves, is_causal=causal)
            o.backward(shards[3])
        after = fa.report()
        # A query's keys come in as many steps as there are processes.
        assert after["forward"] - before["forward"] == size, (before, after)
        assert after["backward"] - before["backward"] == size and not after["refused"]
        results = context_parallel_unshard(mesh, [o.detach(), *[x.grad for x in leaves]], [2] * 4)
        exact, naive = ([x for i, x in enumerate(reference.gradients(
            lambda q, k, v, causal=causal: reference.attention(
                *[x.transpose(1, 2) for x in (q, k, v)], causal=causal), inputs, kind,
            dout.transpose(1, 2))) if i != 1] for kind in (torch.float64, dtype))
        exact[0], naive[0] = exact[0].transpose(1, 2), naive[0].transpose(1, 2)
        reference.check(results, exact, naive, NAMES)
        if dtype == torch.float32:
            for got, want in zip(results, wants):
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def sharding(mesh, size):
    """Heads and batch are split without communication, and give the same as one process."""
    placements = {"batch": Shard(0), "heads": Shard(2)}
    bias, sink = shared(2, 4, 12, 12, seed=7), shared(4, seed=8)
    index = torch.tensor([[0, -1], [1, 0], [2, 1]], dtype=torch.int32)  # of blocks of 4 by 4
    lists = dict(block_index=index.expand(2, 4, 3, 2).contiguous(), block_end=index[:, 0] + 1,
                 block_lens=torch.tensor([4, 2, 3], dtype=torch.int32).expand(4, 3).contiguous())
    for name, beside in itertools.product(placements, (False, True)):
        inputs = [shared(2, 12, h, 16, seed=i) for i, h in enumerate((4, 2, 2))]
        more = {"bias": bias, "sink": sink} if beside else {}
        dout, tensors = shared(2, 12, 4, 16, seed=3).detach(), [*inputs, *more.values()]
        alone = fa.attention(*inputs, causal=True, **more)
        wants = torch.autograd.grad(alone, tensors, dout)
        split = [distribute_tensor(x.detach(), mesh, [placements[name]]).requires_grad_()
                 for x in inputs]
        given = {key: distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_()
                 for key, x in more.items()}
        o, lse = fa.attention(*split, causal=True, return_lse=True, **given)
        assert type(o) is type(lse) is DTensor and o.placements == (placements[name],)
        assert o.to_local().shape[placements[name].dim] == o.shape[placements[name].dim] // size
        assert lse.placements == (Shard(0 if name == "batch" else 1),)
        grads = torch.autograd.grad(o, [*split, *given.values()],
                                    distribute_tensor(dout, mesh, [placements[name]]))
        torch.testing.assert_close(o.full_tensor(), alone.detach(), atol=1e-6, rtol=1e-5)
        for got, want in zip(grads, wants):
            torch.testing.assert_close(got.full_tensor(), want, atol=1e-5, rtol=1e-5)
        if not beside:
            o = fa.attention(*split, block_q=4, block_kv=4, **{
                key: distribute_tensor(x, mesh, [Replicate()]) for key, x in lists.items()})
            assert o.placements == (placements[name],)
            alone = fa.attention(*inputs, block_q=4, block_kv=4, **lists)
            torch.testing.assert_close(o.full_tensor(), alone, atol=1e-6, rtol=1e-5)
        halves = [fa.attention(q, k, v, return_lse=True) for q, k, v in (
            [x if i == 0 else x[:, part] for i, x in enumerate(inputs)]
            for part in (slice(5), slice(5, None)))]
        leaves = [x.detach().requires_grad_() for column in zip(*halves) for x in column]
        wants = torch.autograd.grad(fa.merge(leaves[:2], leaves[2:])[0], leaves, dout)
        # lse has no dimension of tokens before that of heads.
        where = [placements[name]] * 2 + [Shard(placements[name].dim // 2)] * 2
        split = [distribute_tensor(x.detach(), mesh, [place]).requires_grad_()
                 for x, place in zip(leaves, where)]
        o, lse = fa.merge(split[:2], split[2:])
        assert o.placements == (where[0],) and lse.placements == (where[2],)
        torch.testing.assert_close(o.full_tensor(), fa.merge(leaves[:2], leaves[2:])[0])
        grads = torch.autograd.grad(o, split, distribute_tensor(dout, mesh, [placements[name]]))
        for got, want in zip(grads, wants):
            torch.testing.assert_close(got.full_tensor(), want)
    # Packed sequences, and heads that cannot be split evenly: three KV heads are not two shards.
    cu = distribute_tensor(torch.tensor([0, 7, 20], dtype=torch.int32), mesh, [Replicate()])
    q = shared(20, 4, 16).detach()
    split = distribute_tensor(q, mesh, [Shard(1)])
    o = fa.attention_varlen(split, split, split, cu, cu, 13, 13)
    assert o.placements == (Shard(1),)
    whole = cu.to_local()
    torch.testing.assert_close(o.full_tensor(), fa.attention_varlen(q, q, q, whole, whole, 13, 13))
    q, k = shared(1, 5, 6, 16).detach(), shared(1, 5, 3, 16).detach()
    o = fa.attention(*[distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, k)])
    torch.testing.assert_close(o.full_tensor(), fa.attention(q, k, k))


def sdpa_of_heads(mesh, size):
    """torch's SDPA on tensors split by heads, which on a CPU torch has no rule for."""
    fa.activate()
    inputs = [shared(2, 4, 12, 16, seed=i) for i in range(3)]
    dout = shared(2, 4, 12, 16, seed=3).detach()
    alone = F.scaled_dot_product_attention(*inputs, is_causal=True)
    wants = torch.autograd.grad(alone, inputs, dout)
    split = [distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in inputs]
    before = fa.report()["forward"]
    o = F.scaled_dot_product_attention(*split, is_causal=True)
    assert o.placements == (Shard(1),) and fa.report()["forward"] == before + 1
    assert o.to_local().shape[1] == 4 // size
    grads = torch.autograd.grad(o, split, distribute_tensor(dout, mesh, [Shard(1)]))
    torch.testing.assert_close(o.full_tensor(), alone.detach())
    for got, want in zip(grads, wants):
        torch.testing.assert_close(got.full_tensor(), want)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        return self.out(fa.attention(q, k, v, causal=True).flatten(2))


def data_parallel(mesh, size):
    """Three steps of training by DDP and by FSDP, each process with its part of the batch."""
    rank, device = mesh.get_rank(), mesh.device_type
    batches = [shared(2 * size, 12, 32, seed=i).detach().to(device) for i in range(3)]
    models = {}
    for name, wrap in (("alone", lambda model: model),
                       ("DDP", torch.nn.parallel.DistributedDataParallel),
                       ("FSDP", lambda model: fully_shard(model, mesh=mesh))):
        torch.manual_seed(0)
        models[name] = wrap(Layer().to(device))
        optimizer = torch.optim.SGD(models[name].parameters(), lr=0.5)
        for batch in batches:
            part = batch if name == "alone" else batch[2 * rank:2 * rank + 2]
            optimizer.zero_grad()
            models[name](part).square().mean().backward()
            optimizer.step()
    for name in ("DDP", "FSDP"):
        for got, want in zip(models[name].parameters(), models["alone"].parameters()):
            got = got.full_tensor() if isinstance(got, DTensor) else got
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    torch.manual_seed(0)  # the weights before: training has changed them
    assert not torch.allclose(Layer().to(device).qkv.weight, models["alone"].qkv.weight, atol=1e-3)


CHECKS = {"cpu": (data_parallel, sharding, sdpa_of_heads, context_parallel),
          "cuda": (data_parallel, context_parallel)}


def main():
    rank, size, meeting, device = sys.argv[1:]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", f"file://{meeting}",
                            rank=int(rank), world_size=int(size),
                            timeout=datetime.timedelta(seconds=120))
    mesh = init_device_mesh(device, (int(size),))
    for check in CHECKS[device]:
        check(mesh, int(size))
        print("equal to one process:", check.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import pytest
from .case import Case
from .repro import verify
from . import capi

B = dict(dtype="bf16", backward=True)
CASES = {}
def add(name, case): CASES[name] = case
base = Case(batch=2, seqlen_q=300, seqlen_kv=420, heads_q=4, heads_kv=2, dim_qk=64, density=0.3, **B)
for d in (64, 128, 256):
    for blocks in ((64, 64), (128, 128), (16, 16), (100, 40), (256, 256), (64, 128), (128, 64), (256, 128)):
        add(f"d{d}-{blocks[0]}-{blocks[1]}", base.replace(dim_qk=d, dim_v=d, blocks=blocks, seqlen_q=300 if d < 256 else 200))
for d in (64, 128):
  for n, blocks in enumerate(((64, 64), (128, 128))):
    b = base.replace(dim_qk=d, dim_v=d, blocks=blocks)
    t = f"d{d}-{blocks[0]}-"
    add(t + "causal", b.replace(causal=True, density=.6))
    add(t + "window", b.replace(window=(100, 9), density=.7))
    add(t + "chunk", b.replace(chunk=150, density=.7))
    add(t + "ordered", b.replace(determinism=1))
    add(t + "ordered-causal", b.replace(determinism=1, causal=True, density=.6))
    add(t + "ordered-shared", b.replace(determinism=1, block_dims=""))
    add(t + "shared", b.replace(block_dims=""))
    add(t + "b", b.replace(block_dims="b"))
    add(t + "h", b.replace(block_dims="h"))
    add(t + "h-lens", b.replace(block_dims="h", lens_q=[300, 130], lens_kv=[257, 420]))
    add(t + "lens-shared-ordered", b.replace(block_dims="", lens_q=[300, 130], lens_kv=[257, 420], determinism=1))
    add(t + "varlen", b.replace(cu_q=[300, 0, 77, 129], cu_kv=[400, 33, 130, 0], seqlen_q=1, seqlen_kv=1, density=.5))
    add(t + "varlen-ordered", b.replace(cu_q=[300, 0, 77, 129], cu_kv=[400, 33, 130, 0], seqlen_q=1, seqlen_kv=1, density=.5, determinism=1, block_dims="h"))
    add(t + "none", b.replace(density=0.0))
    add(t + "all", b.replace(density=1.0))
    add(t + "starts", b.replace(starts_kv=[0, 140], density=.5))
    add(t + "long", b.replace(batch=1, seqlen_q=150, seqlen_kv=4400, density=.1, heads_q=2, heads_kv=1, determinism=n))
add("many-heads-64", Case(seqlen_q=900, seqlen_kv=200, heads_q=40, heads_kv=1, dim_qk=64, blocks=(64, 64), density=.2, **B))
add("many-heads-100", Case(seqlen_q=2100, seqlen_kv=300, heads_q=40, heads_kv=1, dim_qk=64, blocks=(100, 64), density=.05, determinism=1, **B))
add("many-heads-128", Case(seqlen_q=2100, seqlen_kv=300, heads_q=40, heads_kv=1, dim_qk=64, blocks=(128, 128), density=.05, **B))
add("many-keys", Case(seqlen_q=70, seqlen_kv=66000, heads_q=1, dim_qk=64, blocks=(64, 128), density=.03, determinism=1, **B))
add("d256-ordered", base.replace(dim_qk=256, dim_v=256, blocks=(64, 64), determinism=1, seqlen_q=200))
add("d256-causal", base.replace(dim_qk=256, dim_v=256, blocks=(64, 64), causal=True, seqlen_q=200, density=.6))
for n, more in enumerate((dict(softcap=5.0), dict(bias="f32"), dict(dropout=.2), dict(alibi="bh", determinism=1))):
    add(f"runtime-{n}", base.replace(blocks=(64, 64), **more))
    add(f"runtime-nomask-{n}", base.replace(softcap=9.0, bias="bf16", **{k: v for k, v in more.items() if k != "bias" and k != "softcap"}))
add("runtime-causal-ordered", base.replace(softcap=9.0, bias="bf16", causal=True, determinism=1))

@pytest.mark.parametrize("name", list(CASES))
def test_it(name, device, capsys):
    case = CASES[name]
    plan = capi.Plan(capi.descriptor(case, device))
    info = plan.info(capi.BACKWARD, capi.sizes_of(case))
    with capsys.disabled(): print(name, capi.ffi.string(info.kernel).decode(), info.workspace)
    verify(case, device)

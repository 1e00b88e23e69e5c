"""Partial results through flashattn_merge."""
from . import capi
from .harness import Call, Result


def merge_parts(case, device, parts, part_dtype):
    """parts: Results over disjoint keys. The whole, in dtype_o of the case."""
    call = Call(case.replace(backward=False, dsink=False, dlse=False, dbias=None), device)
    tensors, logs = [], []
    for n, part in enumerate(parts):
        tensors.append(call.tensor("o%d" % n, part_dtype, part.o, like="o"))
        logs.append(int(capi.ffi.cast("intptr_t", call.lse_like("lse%d" % n, part.lse))))
    sizes = {name: call.sizes[name] for name in ("batch", "seqlen_q", "total_q")}
    fields = dict(sizes, dtype_part=capi.DTYPES[part_dtype], o=call.tensor("o", case.dtype_o),
                  lse=call.lse_like("lse"))
    # Rows are merged whatever lens says, padding with its NaN too.
    for name in ("o", "lse"):
        call.buffers[name].owned[:] = True
    for buffer in set(call.buffers.values()):
        buffer.push()
    device.launch(lambda stream: call.plan.merge(fields, tensors, logs, stream))
    contents = {name: buffer.pull(name) for name, buffer in call.buffers.items()}
    return Result(call.take("o", contents["o"]),
                  [contents["lse"][index] for index in call.lse_index()])

"""The handler for GPUs, without one: what programs for CUDA carry, and what it does with that
between stand-ins for XLA and for the library."""
import ctypes
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashattn.jax as fa
from flashattn._library import ffi
from flashattn.jax import _call, _handler

POINTER, INT32, INT64, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
INSTANTIATE, PREPARE, INITIALIZE, EXECUTE = range(4)
S64, F32 = 5, 11
STREAM, PLANS = 0x5000, 0x7000


def structure(**fields):
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


# Of xla/ffi/api/c_api.h.
Metadata = structure(struct_size=SIZE, version_size=SIZE, version_extension=POINTER, major=INT32,
                     minor=INT32, traits=ctypes.c_uint32, type_id=INT64)
Extension = structure(struct_size=SIZE, type=INT32, next=POINTER, metadata=POINTER)
Buffer = structure(struct_size=SIZE, extension=POINTER, dtype=INT32, data=POINTER, rank=INT64,
                   dims=POINTER)
Array = structure(dtype=INT32, size=SIZE, data=POINTER)
Scalar = structure(dtype=INT32, value=POINTER)
Answer = structure(struct_size=SIZE, extension=POINTER, context=POINTER, value=POINTER)
Error = structure(struct_size=SIZE, extension=POINTER, message=ctypes.c_char_p, code=INT32)
FUNCTIONS = ("Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get",
             "Type_Register", "ExecutionContext_Get", "State_Set", "State_Get",
             "DeviceMemory_Allocate", "DeviceMemory_Free", "ThreadPool_Schedule",
             "ThreadPool_NumThreads", "Future_Create", "Future_SetAvailable", "Future_SetError",
             "RunId_Get", "DeviceOrdinal_Get")
Api = structure(struct_size=SIZE, extension=POINTER, version_size=SIZE, version_extension=POINTER,
                major=INT32, minor=INT32, internal=POINTER, **dict.fromkeys(FUNCTIONS, POINTER))
Frame = structure(struct_size=SIZE, extension=POINTER, api=POINTER, context=POINTER, stage=INT32,
                  **{name + part: kind for name in ("args", "rets", "attrs")
                     for part, kind in (("_struct_size", SIZE), ("_extension", POINTER),
                                        ("", INT64), ("_types", POINTER),
                                        *([("_names", POINTER)] if name == "attrs" else []),
                                        ("_data", POINTER))}, future=POINTER)


def address(thing):
    return ctypes.cast(ctypes.pointer(thing), POINTER).value


@pytest.fixture
def handler(tmp_path):
    """A copy, whose library is not the one that other tests use."""
    copy = tmp_path / "handler.so"
    shutil.copy(_handler.handlers._name, copy)
    loaded = ctypes.CDLL(str(copy))
    loaded.flashattn_jax_cuda.restype = loaded.flashattn_jax_cpu.restype = POINTER
    return loaded


@pytest.mark.parametrize("platform, traits", [("cpu", 0), ("cuda", 1)])
def test_traits(handler, platform, traits):
    """Calls on a GPU may become part of a CUDA graph."""
    metadata = Metadata(traits=9)
    extension = Extension(type=1, metadata=address(metadata))
    frame = Frame(extension=address(extension))
    assert getattr(handler, f"flashattn_jax_{platform}")(ctypes.byref(frame)) is None
    assert metadata.traits == traits
    assert 1000 * metadata.major + metadata.minor == handler.flashattn_jax_api_version()


class Machine:
    """XLA and a library that write down what they are asked."""

    def __init__(self, handler):
        self.plans, self.runs, self.errors, self.ordinal, self.status = [], [], [], 0, 0
        create = ctypes.CFUNCTYPE(INT32, POINTER, ctypes.POINTER(POINTER), POINTER)
        run = ctypes.CFUNCTYPE(INT32, POINTER, POINTER, POINTER, INT64, POINTER)
        said = ctypes.CFUNCTYPE(POINTER, POINTER, POINTER)
        asked = ctypes.CFUNCTYPE(POINTER, ctypes.POINTER(Answer))
        failed = ctypes.CFUNCTYPE(POINTER, ctypes.POINTER(Error))
        self.sentence = ctypes.create_string_buffer(b"heads_q = 3; give 4")
        self.kept = [create(self.plan_create), run(self.forward), run(self.backward),
                     said(lambda reason, field: ctypes.addressof(self.sentence))]
        library = _handler._Library(*[ctypes.cast(f, POINTER).value for f in self.kept],
                                    ffi.offsetof("flashattn_desc", "device_index"))
        handler.flashattn_jax_bind(ctypes.byref(library))
        answers = {"Error_Create": failed(self.error), "Stream_Get": asked(self.stream),
                   "DeviceOrdinal_Get": asked(self.device)}
        self.kept += answers.values()
        self.api = Api(**{name: ctypes.cast(f, POINTER).value for name, f in answers.items()})

    def plan_create(self, desc, plan, error):
        if self.status:
            return self.status
        self.plans.append(ffi.new("flashattn_desc *", ffi.cast("flashattn_desc *", desc)[0]))
        plan[0] = PLANS + len(self.plans)
        return 0

    def forward(self, plan, args, workspace, size, stream):
        seen = ffi.new("flashattn_args *", ffi.cast("flashattn_args *", args)[0])
        self.runs.append((plan, seen, workspace, size, stream))
        return 0

    def backward(self, *_):
        raise AssertionError("not asked for")

    def stream(self, answer):
        answer[0].value = STREAM

    def device(self, answer):
        answer[0].value = self.ordinal  # 32 bits of it are read

    def error(self, error):
        self.errors.append((error[0].code, error[0].message))
        return 0xE


def frame_of(machine, site, arrays):
    """A call of XLA, and what it points to."""
    kept = []

    def table(entries):
        kept.append((POINTER * max(len(entries), 1))(*map(address, entries)))
        kept.append(entries)
        return ctypes.addressof(kept[-2])

    def buffer(array):
        dims = (INT64 * array.ndim)(*array.shape)
        kept.extend((dims, array))
        return Buffer(data=array.ctypes.data, rank=array.ndim, dims=ctypes.addressof(dims))
    attributes = []
    for _, value in sorted(site.attributes.items()):
        value = np.array(value)
        kept.append(value)
        attributes.append(Array(dtype=S64, size=value.size, data=value.ctypes.data) if value.ndim
                          else Scalar(dtype=S64, value=value.ctypes.data))
    results = [np.zeros(shape, dtype) for shape, dtype in site.results]
    frame = Frame(api=address(machine.api), args=len(arrays),
                  args_data=table([buffer(x) for x in arrays]), rets=len(results),
                  rets_data=table([buffer(x) for x in results]), attrs=len(attributes),
                  attrs_data=table(attributes))
    frame.kept = kept
    return frame, results


def test_stages(handler):
    """A plan for each GPU before its first run, none while it runs; buffers, workspace and stream
    are those of XLA."""
    machine = Machine(handler)
    arrays = [np.ones((2, 9, 4, 8), np.float32) for _ in range(3)]
    spec = _call.Spec(("q", "k", "v"), (("causal", True),), lse=True)
    site = _call._site(spec, tuple(map(_call.aval, arrays)), "cpu")
    # A workspace on a GPU is a result of XLA's.
    site = site._replace(results=(*site.results[:-1], ((640,), "uint8")),
                         attributes={**site.attributes, "workspace": np.int64(0)})
    site.attributes["elements"] = np.array([*site.attributes["elements"][:-1], 640])
    frame, results = frame_of(machine, site, arrays)

    def run(stage, ordinal):
        frame.stage, machine.ordinal = stage, ordinal
        return handler.flashattn_jax_cuda(ctypes.byref(frame))
    for stage, ordinal, plans in ((INSTANTIATE, 1, 1), (INITIALIZE, 0, 1), (INITIALIZE, 1, 2),
                                  (EXECUTE, 1, 2), (EXECUTE, 0, 2)):
        assert run(stage, ordinal) is None and len(machine.plans) == plans, machine.errors
    assert [plan.device_index for plan in machine.plans] == [0, 1]
    assert [seen[0] for seen in machine.runs] == [PLANS + 2, PLANS + 1]
    _, args, workspace, size, stream = machine.runs[0]
    o, lse, scratch = results
    assert (workspace, size, stream) == (scratch.ctypes.data, 640, STREAM)
    assert (args.batch, args.seqlen_q, args.seqlen_kv) == (2, 9, 9)
    for name, array in zip(("q", "k", "v", "o", "lse"), (*arrays, o, lse)):
        member = getattr(args, name)
        pointer = member if name == "lse" else member.data
        assert int(ffi.cast("intptr_t", pointer)) == array.ctypes.data
    assert not machine.errors


def test_refusals(handler):
    """The library's sentence by the code of its status; a shape that XLA changed."""
    machine = Machine(handler)
    arrays = [np.ones((2, 9, 4, 8), np.float32) for _ in range(3)]
    site = _call._site(_call.Spec(("q", "k", "v"), ()), tuple(map(_call.aval, arrays)), "cpu")
    frame, _ = frame_of(machine, site, arrays)
    for machine.status, code in ((1, 3), (2, 12), (4, 8), (5, 13)):
        assert handler.flashattn_jax_cuda(ctypes.byref(frame)) == 0xE
        assert machine.errors[-1] == (code, b"heads_q = 3; give 4")
    machine.status = 0
    frame, _ = frame_of(machine, site, [arrays[0][:1], *arrays[1:]])
    frame.stage = EXECUTE
    assert handler.flashattn_jax_cuda(ctypes.byref(frame)) == 0xE and not machine.runs
    assert b"changed the shape" in machine.errors[-1][1]


def test_programs_for_cuda():
    """They are made on machines without a GPU, too."""
    x = jnp.ones((2, 9, 4, 8), jnp.bfloat16)
    text = jax.jit(jax.grad(lambda x: fa.attention(x, x, x).astype(jnp.float32).sum())).trace(
        x).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@flashattn(" in line]
    assert len(calls) == 2
    desc = ffi.new("flashattn_desc *")
    avals = ((tuple(x.shape), "bfloat16"),) * 3
    site = _call._site(_call.Spec(("q", "k", "v"), (), lse=True), avals, "cuda:0")
    words = site.attributes["desc"]
    ffi.memmove(desc, words.tobytes(), ffi.sizeof("flashattn_desc"))
    assert desc.device == 1

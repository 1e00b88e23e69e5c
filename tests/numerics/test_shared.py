"""The cases of tests/data through Python's raw layer, and that the files are what make_cases.py
writes. The format is described there."""
import re

import numpy as np
import pytest

from . import capi, make_cases
from .buffers import Buffer
from .dtypes import NUMPY

TEXT = make_cases.FOLDER / "cases.txt"
BLOB = (make_cases.FOLDER / "cases.bin").read_bytes()
FILE_TYPES = dict(NUMPY, i32=np.dtype(np.int32), f64=np.dtype(np.float64))
BY_NUMBER = {number: name for name, number in capi.DTYPES.items()}
MEMBERS = dict(capi.ffi.typeof("flashattn_args").fields)


def read_cases():
    for paragraph in TEXT.read_text(encoding="ascii").strip().split("\n\n"):
        case = {"array": {}, "expect": {}}
        for line in paragraph.split("\n"):
            kind, *words = line.split()
            if kind == "case":
                case["name"] = words[0]
            elif kind in ("array", "expect"):
                name, dtype, dims, offset, *tolerance = words
                case[kind][name] = (array(dtype, dims, offset), dtype, *map(float, tolerance))
            else:
                pairs = (word.split("=") for word in words)
                case[kind] = {name: number(value) for name, value in pairs}
        yield case


def number(text):
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def array(dtype, dims, offset):
    shape = tuple(map(int, dims.split(",")))
    count = int(np.prod(shape))
    flat = np.frombuffer(BLOB, FILE_TYPES[dtype], count, int(offset)) if count else \
        np.zeros(0, FILE_TYPES[dtype])
    return flat.reshape(shape)


class Runner:
    """One case's buffers, between guards and filled with NaN."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        desc = dict(case["desc"], device=device.kind, struct_size=capi.ffi.sizeof("flashattn_desc"))
        self.plan = capi.Plan(desc)
        self.buffers = {}
        self.sizes = {name: value for name, value in case["args"].items() if "." not in name}
        self.fields = dict(self.sizes)
        for name, (values, dtype) in case["array"].items():
            self.add(name, FILE_TYPES[dtype], values.size).host[:] = values.ravel()
            self.fields[name] = self.field(name)

    def add(self, name, dtype, size):
        self.buffers[name] = Buffer(self.device, dtype, size)
        return self.buffers[name]

    def field(self, name):
        """The member of flashattn_args: a tensor, or a pointer."""
        address, kind = self.buffers[name].address, MEMBERS[name].type
        if kind.kind == "pointer":
            return capi.ffi.cast(kind, address)
        strides = {stride: self.case["args"].get("%s.%s" % (name, stride), -1)
                   for stride in capi.PACKED}
        return dict(strides, data=capi.pointer(address))

    def output_dtype(self, name):
        desc = self.case["desc"]
        if name == "o":
            return BY_NUMBER[desc.get("dtype_o") or desc["dtype"]]
        return BY_NUMBER[desc["dtype"]] if name in ("dq", "dk", "dv") else "f32"

    def call(self, op, names):
        """Runs an operation that writes the named arrays, and judges them."""
        for name in names:
            expected = self.case["expect"][name][0].ravel()
            buffer = self.add(name, self.output_dtype(name), expected.size)
            buffer.owned[:] = ~np.isnan(expected)
            if name == "dbias":
                # Pairs past a sequence's lengths: untouched, or zero.
                buffer.optional = np.isnan(expected)
            self.fields[name] = self.field(name)
        size = self.plan.workspace_size(op, self.sizes)
        workspace = self.add("workspace", "u8", size)
        workspace.owned[:] = True
        for buffer in self.buffers.values():
            buffer.push()
        self.device.launch(lambda stream: self.plan.run(
            op, self.fields, workspace.address if size else 0, size, stream))
        for name, buffer in self.buffers.items():
            contents = buffer.pull(name)
            if name in names:
                self.judge(name, contents.astype(np.float64))
                buffer.accept(contents)

    def judge(self, name, got):
        expected, _, tolerance = self.case["expect"][name]
        expected = expected.ravel()
        with np.errstate(invalid="ignore"):
            error = np.where(np.isnan(expected) | (got == expected), 0, np.abs(got - expected))
        bad = np.flatnonzero(~(error <= tolerance))
        assert not len(bad), "%s: %d of %d wrong; flat index %d: %.9g, expected %.9g +- %g" % (
            name, len(bad), got.size, bad[0], got[bad[0]], expected[bad[0]], tolerance)


@pytest.mark.smoke
@pytest.mark.parametrize("case", list(read_cases()), ids=lambda case: case["name"])
def test_shared(case, device):
    runner = Runner(case, device)
    forward = [name for name in case["expect"] if name in ("o", "lse")]
    runner.call(capi.FORWARD, forward)
    if case["desc"]["ops"] & capi.BACKWARD:
        runner.call(capi.BACKWARD, [name for name in case["expect"] if name not in forward])


def test_files_are_current():
    """Inputs byte for byte. The reference's own numbers and the tolerances differ a little with the
    processor's way to multiply matrices: 1e-9, and a half."""
    text, blob = make_cases.make()
    kept, made = TEXT.read_text(encoding="ascii").split("\n"), text.split("\n")
    assert len(kept) == len(made), "tests/data: run python -m tests.numerics.make_cases"
    assert len(BLOB) == len(blob)
    for line, new in zip(kept, made):
        hint = "%r is now %r: run python -m tests.numerics.make_cases" % (line, new)
        if not line.startswith("expect"):
            assert line == new, hint
        else:
            (*start, limit), (*new_start, new_limit) = line.split(), new.split()
            assert start == new_start, hint
            assert abs(float(limit) - float(new_limit)) <= 0.5 * float(limit), hint
        if not line.startswith(("array", "expect")):
            continue
        dims, offset = line.split()[3:5]
        dtype = FILE_TYPES[line.split()[2]]
        count = int(np.prod(list(map(int, dims.split(",")))))
        part = slice(int(offset), int(offset) + count * dtype.itemsize)
        if line.startswith("array"):
            assert BLOB[part] == blob[part], hint
        else:
            np.testing.assert_allclose(np.frombuffer(BLOB[part]), np.frombuffer(blob[part]),
                                       rtol=1e-9, atol=1e-9, err_msg=line)

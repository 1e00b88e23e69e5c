#!/usr/bin/env python3
"""Python's ctypes with nothing but the header's text: the block between its markers becomes
structures and prototypes here, and the case `causal` of tests/data runs through them.

    header_only.py LIBRARY HEADER FOLDER"""
import array
import ctypes
import math
import pathlib
import re
import struct
import sys

SCALARS = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64,
           "uint64_t": ctypes.c_uint64, "float": ctypes.c_float, "char": ctypes.c_char}


class Header:
    def __init__(self, text):
        block = text.split("declarations begin")[1].split("declarations end")[0]
        block = re.sub(r"/\*.*?\*/", "", block.split("*/", 1)[1] + "*/", flags=re.S)
        self.values = {name: int(value) for name, value in re.findall(r"(FLASHATTN_\w+) = (\d+)",
                                                                      block)}
        self.structs = {}
        for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", block, re.S):
            fields = [self.field(line) for line in body.split(";") if line.strip()]
            self.structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
        self.functions = re.findall(r"FLASHATTN_API ([^;(]*?)(\w+)\(([^;]*)\);", block)

    def type_of(self, text, stars):
        base = re.sub(r"\bconst\b", "", text).strip()
        if stars:
            return ctypes.c_char_p if (base, stars) == ("char", 1) else ctypes.c_void_p
        if base.endswith("_fn"):
            return ctypes.c_void_p
        return None if base == "void" else SCALARS.get(base) or self.structs[base]

    def field(self, line):
        text, name, length = re.fullmatch(r"\s*(.*?)(\w+)(?:\[(\d+)\])?\s*", line, re.S).groups()
        kind = self.type_of(text.replace("*", " "), text.count("*"))
        return name, kind * int(length) if length else kind

    def declare(self, library):
        for result, name, parameters in self.functions:
            function = getattr(library, name)
            function.restype = self.type_of(result.replace("*", " "), result.count("*"))
            function.argtypes = [self.parameter(p) for p in parameters.split(",") if p != "void"]

    def parameter(self, text):
        words = re.sub(r"\w+\s*$", "", text)  # its name
        if "_fn" in words:
            return ctypes.c_void_p
        return ctypes.c_void_p if "*" in words else self.type_of(words, 0)


class Case:
    def __init__(self, folder, name):
        text = (folder / "cases.txt").read_text()
        self.lines = text.split("case %s\n" % name)[1].split("\n\n")[0].split("\n")
        self.blob = (folder / "cases.bin").read_bytes()

    def numbers(self, kind):
        line = next((x for x in self.lines if x.split()[0] == kind), kind)
        return {k: int(v) for k, v in (word.split("=") for word in line.split()[1:])}

    def array(self, name):
        """array(typecode), tolerance or None."""
        words = next(x.split() for x in self.lines if x.split()[1:2] == [name])
        count = math.prod(map(int, words[3].split(",")))
        code = {"f32": "f", "f64": "d"}[words[2]]
        values = array.array(code, struct.unpack_from("<%d%s" % (count, code), self.blob,
                                                      int(words[4])))
        return values, float(words[5]) if len(words) > 5 else None


def main():
    library = ctypes.CDLL(sys.argv[1])
    header = Header(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8"))
    header.declare(library)
    case = Case(pathlib.Path(sys.argv[3]), "causal")
    desc = header.structs["flashattn_desc"](**case.numbers("desc"))
    desc.struct_size = ctypes.sizeof(desc)
    args = header.structs["flashattn_args"]()
    library.flashattn_args_init(ctypes.byref(args), ctypes.sizeof(args))
    for name, value in case.numbers("args").items():
        setattr(args, name, value)
    kept = [case.array(name)[0] for name in "qkv"]
    for name, values in zip("qkv", kept):
        getattr(args, name).data = values.buffer_info()[0]
    expected = {name: case.array(name) for name in ("o", "lse")}
    got = {name: array.array("f", [math.nan]) * len(values)
           for name, (values, _) in expected.items()}
    args.o.data, args.lse = (got[name].buffer_info()[0] for name in ("o", "lse"))

    def check(status):
        if status != header.values["FLASHATTN_OK"]:
            sys.exit("%s: %s" % (library.flashattn_status_name(status).decode(),
                                 library.flashattn_last_error(None, None).decode()))

    plan, size = ctypes.c_void_p(), ctypes.c_int64()
    check(library.flashattn_plan_create(ctypes.byref(desc), ctypes.byref(plan), None))
    check(library.flashattn_workspace_size(plan, header.values["FLASHATTN_OP_FORWARD"],
                                           ctypes.byref(args), ctypes.byref(size)))
    workspace = ctypes.create_string_buffer(size.value + 1)
    check(library.flashattn_forward(plan, ctypes.byref(args), workspace, size, None))
    library.flashattn_plan_destroy(plan)
    wrong = sum(not abs(x - y) <= limit for name, (values, limit) in expected.items()
                for x, y in zip(got[name], values))
    print("%d passed, %d failed, 0 skipped" % (sum(map(len, got.values())) - wrong, wrong))
    sys.exit(wrong > 0)


main()

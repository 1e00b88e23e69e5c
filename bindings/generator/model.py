"""Reads include/flashattn.h into a model that every emitter shares.

No C preprocessor takes part, so that every machine reads the same text: the block between the
header's two markers holds no preprocessor line, and comments are blanked in place, which keeps line
numbers. pycparser parses what is left; a comment that ends on the line above a declaration is its
documentation. Whatever the bindings cannot carry is an error here (HeaderError), not a surprise in
one of three languages.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List, Tuple

from pycparser import c_ast, c_parser

BEGIN, END = "declarations begin", "declarations end"
API_MACRO = "FLASHATTN_API"
SCALARS = {"int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8, "float": 4, "double": 8}
BEHIND_POINTERS = {"void", "char", "uint8_t"}  # never by value
POINTER_SIZE = 8  # every supported platform is 64-bit

KEYWORDS = frozenset("""
    False None True and as assert async await break class continue def del elif else except finally
    for from global if import in is lambda nonlocal not or pass raise return try while with yield
    abstract become box const crate do dyn enum extern final fn impl let loop macro match mod move
    mut override priv pub ref self static struct super trait type typeof unsafe unsized use virtual
    where baremodule begin catch end export function local module quote using
    alignas alignof auto bool case char decltype default delete double explicit float friend goto
    inline int long mutable namespace new noexcept nullptr operator private protected public
    register requires short signed sizeof switch template this throw typedef typeid typename union
    unsigned void volatile
""".split())


class HeaderError(Exception):
    """The header breaks one of the rules that keep bindings simple."""


@dataclass(frozen=True)
class CType:
    """`const float *const *`: base float, pointee_const (True, True), innermost pointer first."""

    base: str
    pointee_const: Tuple[bool, ...] = ()
    length: int = 0  # of a fixed array; 0: no array

    @property
    def is_pointer(self) -> bool:
        return bool(self.pointee_const)


@dataclass(frozen=True)
class Member:
    """An enumerator."""

    name: str
    short: str  # without the prefix that all of its enum share
    value: int
    doc: str


@dataclass(frozen=True)
class Enum:
    name: str
    members: Tuple[Member, ...]
    is_flags: bool
    doc: str


@dataclass(frozen=True)
class Field:
    name: str
    type: CType
    offset: int
    size: int
    doc: str


@dataclass(frozen=True)
class Struct:
    name: str
    fields: Tuple[Field, ...]
    size: int
    alignment: int
    doc: str


@dataclass(frozen=True)
class Parameter:
    name: str
    type: CType


@dataclass(frozen=True)
class Function:
    """Also the type of a callback."""

    name: str
    result: CType
    parameters: Tuple[Parameter, ...]
    doc: str
    section: str = ""


@dataclass(frozen=True)
class Model:
    version: Tuple[int, int, int]
    enums: Tuple[Enum, ...]
    structs: Tuple[Struct, ...]
    opaque: Tuple[str, ...]
    callbacks: Tuple[Function, ...]
    functions: Tuple[Function, ...]
    cdef: str  # the declarations without comments and macros
    conventions: str  # what the header says once for everything
    sections: Dict[str, str]  # what it says of a section's functions


def read(text: str) -> Model:
    """The model of a header's text."""
    return _Reader(text).model()


def _comment_text(raw: str) -> str:
    lines = [re.sub(r"^\s*\*? ?", "", line) for line in raw[2:-2].split("\n")]
    # Indentation inside a comment is kept: parameter lists and formulas are laid out with it.
    lines[0] = raw[2:-2].split("\n")[0].strip()
    return "\n".join(line.rstrip() for line in lines).strip()


class _Reader:
    def __init__(self, text: str) -> None:
        lines = text.split("\n")
        marks = [i for i, line in enumerate(lines) if BEGIN in line or END in line]
        if len(marks) != 2 or BEGIN not in lines[marks[0]] or END not in lines[marks[1]]:
            raise HeaderError(f"expected one '{BEGIN}' and one '{END}' marker")
        self.version = self._version(text)
        opening = re.match(r"/\*.*?\*/", text, flags=re.S)
        self.conventions = _comment_text(opening.group(0)).partition("\nConventions")[2] \
            .partition("\n")[2].strip("\n") if opening else ""
        first, last = marks[0] + 1, marks[1]
        for number, line in enumerate(lines[first:last], first + 1):
            if line.lstrip().startswith("#"):
                raise HeaderError(f"line {number}: preprocessor line among the declarations")
        # As many newlines as there are lines before the block: coordinates are those of the header.
        body = "\n" * first + "\n".join(lines[first:last]) + "\n"
        self.docs: Dict[int, str] = {}  # by the line a comment ends on
        self.sections: List[Tuple[int, str, str]] = []  # line, name, text
        self.code = re.sub(r"/\*.*?\*/", self._comment, body, flags=re.S)
        if "//" in self.code:
            raise HeaderError("// comments are not C90; use /* */")
        self.code = self.code.replace(API_MACRO, " " * len(API_MACRO))
        self.enums: List[Enum] = []
        self.structs: Dict[str, Struct] = {}
        self.opaque: List[str] = []
        self.callbacks: List[Function] = []
        self.functions: List[Function] = []

    @staticmethod
    def _version(text: str) -> Tuple[int, int, int]:
        found = dict(re.findall(r"#define FLASHATTN_VERSION_(\w+) (\d+)\n", text))
        try:
            return int(found["MAJOR"]), int(found["MINOR"]), int(found["PATCH"])
        except KeyError as missing:
            raise HeaderError(f"no FLASHATTN_VERSION_{missing.args[0]}") from None

    def _comment(self, match: "re.Match[str]") -> str:
        raw = match.group(0)
        start = match.string.count("\n", 0, match.start()) + 1
        text = _comment_text(raw)
        section = re.match(r"---- (.*?) ----", text)
        if section:
            self.sections.append((start, section.group(1), text[section.end():].strip("\n")))
        else:
            self.docs[start + raw.count("\n")] = text
        return re.sub(r"[^\n]", " ", raw)

    def model(self) -> Model:
        # The typedefs stand on the first line, so that line numbers stay those of the header.
        names = sorted((set(SCALARS) | BEHIND_POINTERS) - {"float", "double", "void", "char"})
        prelude = "".join(f"typedef int {name}; " for name in names)
        for node in c_parser.CParser().parse(prelude + self.code, "flashattn.h").ext[len(names):]:
            self._declaration(node)
        self._struct_size_rule()
        cdef = "\n".join(line.rstrip() for line in self.code.split("\n") if line.strip()) + "\n"
        return Model(self.version, tuple(self.enums), tuple(self.structs.values()),
                     tuple(self.opaque), tuple(self.callbacks), tuple(self.functions),
                     re.sub(r"(?m)^ {14}(?=\w)", "", cdef), self.conventions,
                     {name: text for _, name, text in self.sections})

    def _declaration(self, node: c_ast.Node) -> None:
        line = node.coord.line
        if isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.Enum):
            self._enum(node.type)
        elif isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
            if node.funcspec or node.storage:
                raise HeaderError(f"line {line}: {node.name}: plain prototypes only")
            section = [name for start, name, _ in self.sections if start < line]
            self.functions.append(self._function(node.name, node.type, line, section[-1]))
        elif isinstance(node, c_ast.Typedef) and isinstance(node.type, c_ast.PtrDecl):
            if not isinstance(node.type.type, c_ast.FuncDecl):
                raise HeaderError(f"line {line}: {node.name}: typedef of a pointer")
            self.callbacks.append(self._function(node.name, node.type.type, line))
        elif isinstance(node, c_ast.Typedef) and isinstance(node.type.type, c_ast.Struct):
            struct = node.type.type
            if struct.name != node.name:
                raise HeaderError(f"line {line}: tag and typedef of {node.name} differ")
            if struct.decls is None:
                self.opaque.append(node.name)
            else:
                self._struct(struct)
        else:
            raise HeaderError(f"line {line}: a kind of declaration the bindings cannot carry")

    def _doc(self, line: int, what: str, required: bool = True) -> str:
        if required and line - 1 not in self.docs:
            raise HeaderError(f"line {line}: {what} has no comment directly above")
        return self.docs.get(line - 1, "")

    def _check_name(self, name: str, owner: str, line: int) -> str:
        if name is None or name in KEYWORDS:
            raise HeaderError(f"line {line}: {owner}: '{name}' is no name in one of the languages")
        return name

    def _enum(self, node: c_ast.Enum) -> None:
        line = node.coord.line
        raw = []
        for item in node.values.enumerators:
            value = item.value
            if not isinstance(value, c_ast.Constant) or not re.fullmatch(r"\d+|0x[\da-f]+",
                                                                         value.value):
                raise HeaderError(f"line {item.coord.line}: {item.name} needs a plain number")
            if int(value.value, 0) > 0x7FFFFFFF:
                raise HeaderError(f"line {item.coord.line}: {item.name} is no int")
            raw.append((item.name, int(value.value, 0), item.coord.line))
        if len({value for _, value, _ in raw}) != len(raw):
            raise HeaderError(f"line {line}: enum {node.name} repeats a value")
        # Whole words that all enumerators start with: FLASHATTN_LAYOUT_.
        words = [name.split("_") for name, _, _ in raw]
        shared = 0
        while all(len(w) > shared + 1 and w[shared] == words[0][shared] for w in words):
            shared += 1
        members = tuple(
            Member(name, self._check_name("_".join(name.split("_")[shared:]), node.name, at),
                   value, self._doc(at, name, required=False))
            for name, value, at in raw)
        doc = self._doc(line, f"enum {node.name}", required=False)
        is_flags = "as bits" in doc
        if is_flags and any(m.value & (m.value - 1) or not m.value for m in members):
            raise HeaderError(f"line {line}: enum {node.name} says bits, but one is no single bit")
        self.enums.append(Enum(node.name, members, is_flags, doc))

    def _type(self, node: c_ast.Node, line: int) -> CType:
        if isinstance(node, c_ast.ArrayDecl):
            inner = self._type(node.type, line)
            if not isinstance(node.dim, c_ast.Constant) or inner.length:
                raise HeaderError(f"line {line}: arrays have one fixed length")
            return CType(inner.base, inner.pointee_const, int(node.dim.value, 0))
        if isinstance(node, c_ast.PtrDecl):
            inner = self._type(node.type, line)
            pointee = node.type
            return CType(inner.base, inner.pointee_const + ("const" in pointee.quals,))
        if isinstance(node, c_ast.TypeDecl) and isinstance(node.type, c_ast.IdentifierType):
            return CType(" ".join(node.type.names))
        raise HeaderError(f"line {line}: only fixed-width scalars, structs, pointers, fixed arrays")

    def _function(self, name: str, node: c_ast.FuncDecl, line: int, section: str = "") -> Function:
        result = self._type(node.type, line)
        if not (result.is_pointer or result.base in SCALARS or result.base == "void"):
            raise HeaderError(f"line {line}: {name} returns {result.base} by value")
        declared = [] if node.args is None else node.args.params
        parameters = []
        for item in declared:
            if isinstance(item, c_ast.EllipsisParam):
                raise HeaderError(f"line {line}: {name} takes any number of arguments")
            ctype = self._type(item.type, line)
            if ctype == CType("void"):  # (void)
                continue
            callback = any(c.name == ctype.base for c in self.callbacks)
            if ctype.length or not (ctype.is_pointer or callback or ctype.base in SCALARS):
                raise HeaderError(f"line {line}: {name} takes {ctype.base} by value")
            self._known(ctype, line)
            parameters.append(Parameter(self._check_name(item.name, name, line), ctype))
        return Function(name, result, tuple(parameters), self._doc(line, name), section)

    def _known(self, ctype: CType, line: int) -> None:
        names = {*SCALARS, *BEHIND_POINTERS, *self.structs, *self.opaque}
        if ctype.base not in names | {c.name for c in self.callbacks}:
            raise HeaderError(f"line {line}: type {ctype.base} is not for an ABI")

    def _struct(self, node: c_ast.Struct) -> None:
        offset, alignment = 0, 1
        fields: List[Field] = []
        for item in node.decls:
            line = item.coord.line
            if item.bitsize is not None:
                raise HeaderError(f"line {line}: bit-field {item.name}")
            ctype = self._type(item.type, line)
            self._known(ctype, line)
            if ctype.is_pointer:
                unit = align = POINTER_SIZE
            elif ctype.base in self.structs:
                if self.structs[ctype.base].fields[0].name == "struct_size":
                    raise HeaderError(f"line {line}: {item.name}: {ctype.base} by value, which "
                                      "grows")
                unit, align = self.structs[ctype.base].size, self.structs[ctype.base].alignment
            elif ctype.base in SCALARS:
                unit = align = SCALARS[ctype.base]
            elif ctype.base == "char" and ctype.length:  # text
                unit = align = 1
            elif any(c.name == ctype.base for c in self.callbacks):
                unit = align = POINTER_SIZE
            else:
                raise HeaderError(f"line {line}: {item.name}: {ctype.base} by value")
            if offset % align:
                raise HeaderError(f"line {line}: implicit padding before {node.name}.{item.name}")
            size = unit * max(ctype.length, 1)
            name = self._check_name(item.name, node.name, line)
            if name == "struct_size" and (fields or ctype != CType("uint32_t")):
                raise HeaderError(f"line {line}: struct_size is an uint32_t and comes first")
            doc = self._doc(line, f"{node.name}.{name}", required=False)
            fields.append(Field(name, ctype, offset, size, doc))
            offset, alignment = offset + size, max(alignment, align)
        if offset % alignment:
            raise HeaderError(f"line {node.coord.line}: implicit padding at the end of {node.name}")
        doc = self._doc(node.coord.line, node.name, required=False)
        self.structs[node.name] = Struct(node.name, tuple(fields), offset, alignment, doc)

    def _struct_size_rule(self) -> None:
        """A struct that is no part of another one grows, so it must say how long it is."""
        parts = {f.type.base for s in self.structs.values() for f in s.fields}
        for struct in self.structs.values():
            if struct.name not in parts and struct.fields[0].name != "struct_size":
                raise HeaderError(f"{struct.name} has no struct_size")

"""tests/abi/layout.c: the C compiler's opinion of the sizes, offsets and values in the model."""
from __future__ import annotations

from .model import Model

HEAD = """\
/* Written by bindings/generate.py from include/flashattn.h. Do not edit.
 *
 * Every binding relies on these sizes, offsets and values. A wrong one stops the compiler. */
#include "flashattn.h"

#define CHECK(name, condition) typedef char check_##name[(condition) ? 1 : -1]

"""


def emit(model: Model) -> str:
    lines = ["CHECK(pointer, sizeof(void *) == 8);", ""]
    for struct in model.structs:
        lines.append(f"CHECK({struct.name}, sizeof({struct.name}) == {struct.size});")
        for field in struct.fields:
            lines.append(f"CHECK({struct.name}_{field.name},\n"
                         f"      offsetof({struct.name}, {field.name}) == {field.offset});")
        lines.append("")
    for enum in model.enums:
        for member in enum.members:
            lines.append(f"CHECK({member.name}_, {member.name} == {member.value});")
        lines.append("")
    return HEAD + "\n".join(lines) + "\nint main(void) { return 0; }\n"

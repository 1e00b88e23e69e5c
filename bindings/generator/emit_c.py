"""What the C tests have of the model. tests/abi/layout.c: the compiler's opinion of the sizes,
offsets and values; tests/abi/reasons.h: the reasons by name."""
from __future__ import annotations

from .model import Model

LAYOUT = """\
/* Written by bindings/generate.py from include/flashattn.h. Do not edit.
 *
 * Every binding relies on these sizes, offsets and values. A wrong one stops the compiler. */
#include "flashattn.h"

#define CHECK(name, condition) typedef char check_##name[(condition) ? 1 : -1]

"""


REASONS = """\
/* Written by bindings/generate.py from include/flashattn.h. Do not edit.
 *
 * Numbers, so that an older header, which lacks the newest names, does as well. */
static const struct {
  const char *name;
  int32_t value;
} reasons[] = {
"""


def emit_layout(model: Model) -> str:
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
    return LAYOUT + "\n".join(lines) + "\nint main(void) { return 0; }\n"


def emit_reasons(model: Model) -> str:
    """flashattn_last_error gives a number only; the shared cases name it."""
    enum = next(enum for enum in model.enums if enum.name == "flashattn_reason")
    rows = [f'    {{"{member.short}", {member.value}}},' for member in enum.members]
    return REASONS + "\n".join(rows) + "\n};\n"

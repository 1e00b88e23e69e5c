#!/usr/bin/env python3
"""That baseline.py sees what breaks old programs, says so, and lets growth pass: the header's text
is changed in one place each time, and the sentences are compared."""
import sys

import baseline

TEXT = (baseline.ROOT / "include" / "flashattn.h").read_text(encoding="utf-8")

# What changes, the old text, the new text, a part of each sentence that must come.
CHANGES = [
    ("nothing", "int32_t ", "int32_t ", []),
    ("enumerator changed", "FLASHATTN_DTYPE_BF16 = 3", "FLASHATTN_DTYPE_BF16 = 7",
     ["FLASHATTN_DTYPE_BF16 was 3 and is now 7"]),
    ("enumerator gone", "  FLASHATTN_DTYPE_U8 = 5", "  FLASHATTN_DTYPE_U16 = 5",
     ["FLASHATTN_DTYPE_U8 is gone"]),
    ("enumerator appended", "  FLASHATTN_REASON_STREAM = 33",
     "  FLASHATTN_REASON_STREAM = 33,\n  FLASHATTN_REASON_MOOD = 34", []),
    ("member appended", "  int32_t descale_dim;\n",
     "  int32_t descale_dim;\n  int64_t more;\n", []),
    ("members swapped", "  int32_t dim_qk;", "  int32_t other;",
     ["flashattn_desc.dim_qk is gone",
      "flashattn_desc.other is new and lies where flashattn_desc.dim_qk was, byte 36"]),
    ("member inserted", "  int32_t heads_q;\n",
     "  int32_t heads;\n  int32_t more;\n  int32_t heads_q;\n",
     ["flashattn_desc.heads_q moved from byte 28 to 36", "flashattn_desc.dim_v moved",
      "flashattn_desc.heads is new and lies where flashattn_desc.heads_q was"]),
    ("member of another type", "  float scale;", "  int32_t scale;",
     ["flashattn_desc.scale was float of 4 bytes and is now int32_t of 4"]),
    ("structure shrank", "  int64_t workspace_limit;\n", "",
     ["flashattn_desc.workspace_limit is gone", "flashattn_desc shrank from 168 to 160"]),
    ("embedded structure grew", "  int64_t stride_seq;\n",
     "  int64_t stride_seq;\n  int64_t stride_page;\n",
     ["flashattn_tensor grew from 32 to 40 bytes but has no struct_size",
      "flashattn_args.k moved"]),
    ("function gone", "flashattn_version_string(void)", "flashattn_version_text(void)",
     ["flashattn_version_string is gone"]),
    ("parameter added",
     "int32_t flashattn_check(const flashattn_desc *desc, flashattn_error *error);",
     "int32_t flashattn_check(const flashattn_desc *desc, flashattn_error *error, int32_t how);",
     ["flashattn_check was int32_t(flashattn_desc-const*,flashattn_error*) and is now "
      "int32_t(flashattn_desc-const*,flashattn_error*,int32_t)"]),
    ("callback changed", "(void *user, int32_t level, const char *message)",
     "(void *user, int64_t level, const char *message)", ["callback flashattn_log_fn was"]),
]


def sentences(text):
    old = baseline.load(baseline.BASELINE.read_text(encoding="utf-8"))
    return list(baseline.broken(old, baseline.header_facts(baseline.read(text)), False)), old


def main():
    failed = 0
    for name, before, after, wanted in CHANGES:
        assert before in TEXT, name
        got, _ = sentences(TEXT.replace(before, after, 1))
        missing = [part for part in wanted if not any(part in sentence for sentence in got)]
        if missing or (got and not wanted):
            failed += 1
            print(f"failed: {name}: no sentence with {missing}, but {got}")
    # A library's side: a version node renamed, a symbol gone.
    _, old = sentences(TEXT)
    new = {key: value.replace("FLASHATTN_0", "FLASHATTN_1") for key, value in old.items()}
    del new["symbol", "flashattn_merge"]
    got = list(baseline.broken(old, new, True))
    library_ok = (any("flashattn_merge is no longer exported" in s for s in got)
                  and sum("do not start" in s for s in got) == 25)
    failed += not library_ok
    print(f"{len(CHANGES) + 1 - failed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

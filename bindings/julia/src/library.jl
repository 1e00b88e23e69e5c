# Finding and opening the shared library.

const C = LibFlashAttn
const VARIABLE = "FLASHATTN_LIBRARY"

function __init__()
    chosen = get(ENV, VARIABLE, "")
    path = isempty(chosen) ? C.lib : chosen
    handle = dlopen(path; throw_error = false)
    remedy = isempty(chosen) ? "install it, or set $VARIABLE to the path of $(C.lib)" :
             "correct or unset $VARIABLE"
    handle === nothing && error("libflashattn could not be loaded from $path; $remedy")
    dlsym(handle, :flashattn_version; throw_error = false) === nothing &&
        error("$path is not libflashattn: it has no flashattn_version; $remedy")
    # The generated functions call by the name inside the file, which must be the file just opened.
    version = C.flashattn_version()
    # Up to version 1 a minor version may change the ABI; structures only grow within one.
    version ÷ 100 == C.HEADER_VERSION ÷ 100 ||
        error("$path has version $version, this package is made for $(C.HEADER_VERSION); " *
              "install the two together")
    for (T, bytes, fields) in C.LAYOUT, (i, (name, offset, _)) in enumerate(fields)
        sizeof(T) == bytes && fieldoffset(T, i) == offset ||
            error("$T.$name does not lie where C expects it on this platform")
    end
end

"""
    FlashAttention.build_info()

One line: version, compiler, kernel families and instruction sets in the library.
"""
build_info() = unsafe_string(C.flashattn_build_info())

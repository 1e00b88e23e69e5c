# Finding and opening the shared library.

const C = LibFlashAttn
const VARIABLE = "FLASHATTN_LIBRARY"

function __init__()
    chosen = get(ENV, VARIABLE, "")
    path = isempty(chosen) ? C.lib : chosen
    # Without Julia's RTLD_DEEPBIND: a C++ exception inside the library must find one unwinder, and in
    # a Julia that is linked to libunwind the C++ runtime has found that one.
    handle = dlopen(path, RTLD_LAZY; throw_error = false)
    remedy = isempty(chosen) ? "install it, or set $VARIABLE to the path of $(C.lib)" :
             "correct or unset $VARIABLE"
    handle === nothing && error("libflashattn could not be loaded from $path; $remedy")
    dlsym(handle, :flashattn_version; throw_error = false) === nothing &&
        error("$path is not libflashattn: it has no flashattn_version; $remedy")
    # The generated functions call by the name inside the file, which must be the file just opened.
    # Compiled only here: the compiler itself opens what a function calls, where LD_LIBRARY_PATH has
    # it, and with RTLD_DEEPBIND.
    version = Base.invokelatest(C.flashattn_version)
    # Up to version 1 a minor version may change the ABI; structures only grow within one.
    compatible(version) ||
        error("libflashattn $(dotted(version)) is loaded from $path, but this package is made for " *
              "$(dotted(C.HEADER_VERSION)); install the two together")
    for (T, bytes, fields) in C.LAYOUT, (i, (name, offset, _)) in enumerate(fields)
        sizeof(T) == bytes && fieldoffset(T, i) == offset ||
            error("$T.$name does not lie where C expects it on this platform")
    end
end

compatible(version) = version ÷ 100 == C.HEADER_VERSION ÷ 100
dotted(version) = join((version ÷ 10000, version ÷ 100 % 100, version % 100), ".")

"""
    FlashAttention.build_info()

One line: version, compiler, instruction sets and GPU architectures in the library.
"""
build_info() = unsafe_string(C.flashattn_build_info())

"""
    FlashAttentionError

The library refused a call, or failed.

- `sentence`: names field, value, limit, device and remedy
- `status`: `:ERROR_INVALID_ARGUMENT`, `:ERROR_UNSUPPORTED`, ...: enum flashattn_status
- `reason`: `:HEAD_DIM_MAX`, `:DROPOUT`, ...: enum flashattn_reason
- `field`: the structure member of the C header that it is about; `""` when there is none

What this package sees by itself is a `DimensionMismatch` (sizes that do not fit together) or an
`ArgumentError` (types, strides, values).
"""
struct FlashAttentionError <: Exception
    sentence::String
    status::Symbol
    reason::Symbol
    field::String
end

function Base.showerror(io::IO, error::FlashAttentionError)
    print(io, "FlashAttentionError: ", error.sentence, " (", error.status)
    error.reason === :NONE || print(io, ", ", error.reason)
    print(io, ")")
end

# A newer library may know more of them.
function name_of(names::NamedTuple, value::Integer)
    for (name, known) in pairs(names)
        known == value && return name
    end
    return Symbol("UNKNOWN_", value)
end

check(status::Int32) = status == C.FLASHATTN_OK ? nothing : fail(status)

# Nothing may yield between the failed call and this: the sentence belongs to the thread.
@noinline function fail(status::Int32)
    reason, field = Ref(C.FLASHATTN_REASON_NONE), Ref(Cstring(C_NULL))
    sentence = unsafe_string(C.flashattn_last_error(reason, field))
    name = field[] == C_NULL ? "" : unsafe_string(field[])
    throw(FlashAttentionError(sentence, name_of(C.flashattn_status, status),
                              name_of(C.flashattn_reason, reason[]), name))
end

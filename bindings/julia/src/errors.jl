"""
    FlashAttentionError

The library refused a call, or failed.

- `sentence`: names field, value, limit, device and remedy
- `status`: `:ERROR_INVALID_ARGUMENT`, `:ERROR_UNSUPPORTED`, ...: enum flashattn_status
- `reason`: `:HEAD_DIM_MAX`, `:DROPOUT`, ...: enum flashattn_reason
- `field`: the structure member of the C header that it is about, by its name there; `""` when there
  is none

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

"The keywords of functions. For refusals: it takes its time."
function keywords(functions...)
    names = mapreduce(f -> mapreduce(Base.kwarg_decl, vcat, methods(f)), vcat, functions)
    return unique(filter(name -> !endswith(String(name), "..."), names))
end

"An option that there is not, with the known one that was meant, perhaps."
function refuse_keyword(name::Symbol, known)
    given = String(name)
    likely(other) = length(other) > 3 && occursin(other, given) ||
                    length(given) > 3 && distance(given, other) <= 2
    meant = sort(filter(likely, map(String, known)), by = other -> distance(given, other))
    hint = isempty(meant) ? "" : ": did you mean $(join(meant, " or "))?"
    throw(ArgumentError("there is no option $name$hint (?attention names all)"))
end

"Letters to add, drop or change between two words (Levenshtein 1966)."
function distance(a::String, b::String)
    row = collect(0:length(b))
    for (i, x) in enumerate(a)
        above, row[1] = row[1], i
        for (j, y) in enumerate(b)
            above, row[j + 1] = row[j + 1], min(row[j + 1] + 1, row[j] + 1, above + (x != y))
        end
    end
    return row[end]
end

# Where the header's names are not those of this package.
const RENAMED = Dict("heads_q" => "heads", "heads_kv" => "kv_heads", "dim_qk" => "dim",
                     "lens_q" => "q_lens", "lens_kv" => "kv_lens", "seqlen_kv" => "seqlen_k",
                     "cu_seqlens_kv" => "cu_seqlens_k", "max_seqlen_kv" => "max_seqlen_k",
                     "total_kv" => "total_k", "max_total_kv" => "max_total_k")

"The library's sentence in the words of this package."
function spoken(sentence::String, reason::Integer)
    words = Regex("\\b(?:inputs\\.|(?:" * join(keys(RENAMED), "|") * ")\\b)")
    sentence = replace(sentence, words => word -> get(RENAMED, word, ""))
    return reason == C.FLASHATTN_REASON_LENGTHS ?
           sentence * " (here everything is counted from 0)" : sentence
end

check(status::Int32) = status == C.FLASHATTN_OK ? nothing : fail(status)

# Nothing may yield between the failed call and this: the sentence belongs to the thread.
@noinline function fail(status::Int32)
    reason, field = Ref(C.FLASHATTN_REASON_NONE), Ref(Cstring(C_NULL))
    sentence = unsafe_string(C.flashattn_last_error(reason, field))
    name = field[] == C_NULL ? "" : unsafe_string(field[])
    sentence = spoken(sentence, reason[])
    throw(FlashAttentionError(sentence, name_of(C.flashattn_status, status),
                              name_of(C.flashattn_reason, reason[]), name))
end

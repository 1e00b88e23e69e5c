"""
    FlashAttentionError

A call was refused, by the library or by this package, or failed.

- `message`: names field, value, limit, device and remedy
- `status`: `:ERROR_INVALID_ARGUMENT`, `:ERROR_UNSUPPORTED`, ...: enum flashattn_status
- `reason`: `:HEAD_DIM_MAX`, `:DROPOUT`, ...: enum flashattn_reason
- `field`: the structure member of the C header that it is about, by its name there; `""` when there
  is none

Options that there are not are an `ArgumentError`.
"""
struct FlashAttentionError <: Exception
    message::String
    status::Symbol
    reason::Symbol
    field::String
end

function Base.showerror(io::IO, error::FlashAttentionError)
    print(io, "FlashAttentionError: ", error.message, " (", error.status)
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

"What the library would refuse if it could see it: sizes and types of arrays, strides inside a head."
@noinline refuse(reason::Symbol, field, message::String) =
    throw(FlashAttentionError(message, :ERROR_INVALID_ARGUMENT, reason, String(field)))

"Runs f, whose refusals are about one array, and says which."
function about(f::F, name) where {F}
    try
        return f()
    catch error
        error isa FlashAttentionError && isempty(error.field) || rethrow()
        throw(FlashAttentionError("$name: $(error.message)", error.status, error.reason,
                                  String(name)))
    end
end

"Options by the names that other packages give them: what to give here."
const ELSEWHERE = Dict(
    # FlashAttention and PyTorch
    :softmax_scale => "scale", :sm_scale => "scale", :window_size => "window",
    :dropout_p => "dropout", :is_causal => "causal", :attn_mask => "bias; of Bool, true = visible",
    :attention_mask => "bias; of Bool, true = visible", :attn_bias => "bias",
    :deterministic => "determinism", :num_splits => "splits", :block_table => "page_table",
    :cache_seqlens => "lens_kv", :seqused_k => "lens_kv", :cu_seqlens_k => "cu_seqlens_kv",
    :max_seqlen_k => "max_seqlen_kv", :return_attn_probs => "return_lse", :sinks => "sink",
    :s_aux => "sink", :attention_chunk => "chunk",
    # NNlib, LuxLib, NNop
    :mask => "bias; of Bool, true = visible", :fdrop => "dropout with rng_seed",
    :kpad_mask => "lens_kv, or starts_kv for padding on the left", :pair => "bias",
    :nheads => "the second size of q, k and v",
    # version 0.1
    :q_lens => "lens_q", :kv_lens => "lens_kv", :out_dtype => "dtype_o", :seed => "rng_seed",
    :offset => "rng_offset", :block_size => "block_q and block_kv")

"An option that there is not, with the known one that was meant, perhaps."
function refuse_keyword(name::Symbol, known, help = "attention")
    given = String(name)
    likely(other) = length(other) > 3 && occursin(other, given) ||
                    length(given) > 3 && distance(given, other) <= 2
    meant = sort(filter(likely, String[String(name) for name in known]), by = other -> distance(given, other))
    # Only what this function takes.
    there = get(ELSEWHERE, name, "")
    hint = any(word -> Symbol(word) in known, split(there, r"[ ;,]+")) || name === :nheads ?
           "; here it is $there" : isempty(meant) ? "" : ": did you mean $(join(meant, " or "))?"
    throw(ArgumentError("there is no option $name$hint (?$help names all)"))
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

function refusal(status::Integer, reason::Integer, field::String, message::String)
    # The messages of lengths name values, which are C's.
    reason == C.FLASHATTN_REASON_LENGTHS && (message *= " (here everything is counted from 0)")
    return FlashAttentionError(message, name_of(C.flashattn_status, status),
                               name_of(C.flashattn_reason, reason), field)
end

"""
Memory for one flashattn_error. Each call has its own: a task may go on on another thread, whose last
error is another one.
"""
struct ErrorMemory
    bytes::Vector{UInt8}
end

function ErrorMemory()
    error = ErrorMemory(zeros(UInt8, sizeof(C.flashattn_error)))
    GC.@preserve error unsafe_store!(member(UInt32, error, :struct_size), sizeof(error.bytes))
    return error
end

Base.unsafe_convert(::Type{Ptr{C.flashattn_error}}, error::ErrorMemory) =
    Ptr{C.flashattn_error}(pointer(error.bytes))
member(::Type{T}, error::ErrorMemory, name::Symbol) where {T} =
    Ptr{T}(pointer(error.bytes) +
           fieldoffset(C.flashattn_error, Base.fieldindex(C.flashattn_error, name)))

"Throws what a call wrote in its own error."
check(status::Int32, error::ErrorMemory) =
    status == C.FLASHATTN_OK ? nothing : fail(status, error)

@noinline function fail(status::Int32, error::ErrorMemory)
    GC.@preserve error begin
        throw(refusal(status, unsafe_load(member(Int32, error, :reason)),
                      unsafe_string(member(UInt8, error, :field)),
                      unsafe_string(member(UInt8, error, :message))))
    end
end

"Throws the last error of this thread, for the few functions that take none of the caller's."
check(status::Int32) = status == C.FLASHATTN_OK ? nothing : fail(status)

# Nothing may yield between the failed call and this.
@noinline function fail(status::Int32)
    reason, field = Ref(C.FLASHATTN_REASON_NONE), Ref(Cstring(C_NULL))
    message = unsafe_string(C.flashattn_last_error(reason, field))
    name = field[] == C_NULL ? "" : unsafe_string(field[])
    throw(refusal(status, reason[], name, message))
end

"Sets a member of a structure, by its name in the header."
function set!(x::Base.RefValue{T}, name::Symbol, value) where {T}
    index = Base.fieldindex(T, name)
    kind = fieldtype(T, index)
    GC.@preserve x begin
        place = Ptr{kind}(Base.unsafe_convert(Ptr{T}, x) + fieldoffset(T, index))
        unsafe_store!(place, convert(kind, value))
    end
    return x
end

# Arrays as the library sees them: a type, an address, strides, and the device they lie on. A
# package for another device adds methods of `device`, `address`, `stream`, `int32` and `release`
# for its array; views are taken apart here, whatever lies below.

const Wrapped = Union{SubArray,PermutedDimsArray,Base.ReshapedArray,Base.ReinterpretArray}

"The code of an element type: enum flashattn_dtype."
dtype(::Type{Float32}) = C.FLASHATTN_DTYPE_F32
dtype(::Type{Float16}) = C.FLASHATTN_DTYPE_F16
dtype(::Type{BFloat16}) = C.FLASHATTN_DTYPE_BF16
dtype(::Type{F8E4M3}) = C.FLASHATTN_DTYPE_F8E4M3
dtype(::Type{Bool}) = C.FLASHATTN_DTYPE_U8
dtype(::Type{UInt8}) = C.FLASHATTN_DTYPE_U8
dtype(::Type{Int8}) = C.FLASHATTN_DTYPE_I8
dtype(::Type) = C.FLASHATTN_DTYPE_DEFAULT  # none

const CACHE_8BIT = (F8E4M3, Int8)
const ELEMENTS = (Float32, Float16, BFloat16, CACHE_8BIT...)

"The element type of a code."
element(code::Integer) = ELEMENTS[findfirst(T -> dtype(T) == code, ELEMENTS)]

"The same for an array, or a member that says it, that must have one; `mask`: a bias, for which bytes will do, but not
those of F8E4M3 or Int8."
function dtype(T::Type, name::String; mask::Bool = false)
    code = dtype(T)
    types = mask ? filter(!in(CACHE_8BIT), collect(ELEMENTS)) : collect(ELEMENTS)
    code in map(dtype, types) && return code
    mask && code == C.FLASHATTN_DTYPE_U8 && return code
    refuse(:DTYPE, name, "the element type $T of $name is none of $(join(types, ", "))" *
                         (mask ? ", Bool (true = visible)" : "") * "; convert it")
end

"The array below all views: it says where the memory is."
storage(x::AbstractArray) = x
storage(x::Wrapped) = storage(parent(x))

"Where an array's memory is: (enum flashattn_device, index)."
device(::Array) = (C.FLASHATTN_DEVICE_CPU, 0)
device(x::AbstractArray) = refuse(:DTYPE, "",
    "the memory of a $(typeof(x)) is out of reach; give an Array or a view of one, or collect it")

"The stream on which the library is to work with an array: `C_NULL` on the CPU."
stream(::Array) = C_NULL

"The address of the first element."
address(x::Array) = Ptr{Cvoid}(pointer(x))
address(x::Wrapped) = address(parent(x))
address(x::SubArray) = address(parent(x)) + sizeof(eltype(x)) * offset(x)

offset(x::SubArray) = _offset(steps(parent(x)), axes(parent(x)), parentindices(x))
_offset(::Tuple{}, ::Tuple{}, ::Tuple{}) = 0
_offset(s::Tuple, a::Tuple, i::Tuple) =
    (isempty(i[1]) ? 0 : s[1] * (Int(first(i[1])) - first(a[1]))) +
    _offset(Base.tail(s), Base.tail(a), Base.tail(i))

"Strides in elements. Views of any depth; an index that is no range has none."
steps(x::AbstractArray) = strides(x)
steps(x::PermutedDimsArray{<:Any,<:Any,order}) where {order} =
    (s = steps(parent(x)); map(d -> s[d], order))
steps(x::SubArray) = _steps(steps(parent(x)), parentindices(x))
function steps(x::Base.ReinterpretArray)
    sizeof(eltype(x)) == sizeof(eltype(parent(x))) && ndims(x) == ndims(parent(x)) ||
        refuse(:STRIDE, "", "a reinterpreted array must keep the size of its elements; copy it")
    return steps(parent(x))
end
function steps(x::Base.ReshapedArray)
    isdense(parent(x)) || refuse(:STRIDE, "", "a reshaped view with gaps has no strides; copy it")
    return packed(size(x))
end
_steps(::Tuple{}, ::Tuple{}) = ()
_steps(s::Tuple, i::Tuple{Integer,Vararg{Any}}) = _steps(Base.tail(s), Base.tail(i))
_steps(s::Tuple, i::Tuple{AbstractRange,Vararg{Any}}) =
    (s[1] * step(i[1]), _steps(Base.tail(s), Base.tail(i))...)
_steps(::Tuple, i::Tuple) = refuse(:STRIDE, "",
    "a view with an index of type $(typeof(i[1])) has no strides; copy it")

"The strides of an array without gaps."
packed(dims::Dims) = cumprod1(1, dims)
cumprod1(step::Int, ::Tuple{}) = ()
cumprod1(step::Int, dims::Dims) = (step, cumprod1(step * dims[1], Base.tail(dims))...)

function isdense(x::AbstractArray)
    isempty(x) && return true
    return all(((n, given, wanted),) -> n == 1 || given == wanted,
               zip(size(x), steps(x), packed(size(x))))
end

"Scratch memory beside an array."
function scratch(::Array, bytes::Integer)
    held = get!(() -> UInt8[], task_local_storage(), :FlashAttention_scratch)::Vector{UInt8}
    # It grows and is kept: a task runs one call at a time.
    length(held) < bytes && resize!(empty!(held), bytes)
    return held
end
scratch(x::AbstractArray, bytes::Integer) = similar(x, UInt8, (Int(bytes),))

"""
Gives back the memory of an array that a call made for itself, behind the work that was enqueued:
the collector, which knows nothing of how full a device is, may come late. Host memory is its own.
"""
release(::AbstractArray) = nothing

"Lengths and offsets, and numbers for each head, as the library reads them."
int32(x::Array{Int32}) = x
function int32(x::AbstractArray{<:Integer})
    try
        return Int32.(x)
    catch error
        error isa InexactError || rethrow()
        refuse(:LENGTHS, "", "$(error.val) is past the range of Int32; give what an array holds")
    end
end
int32(x::AbstractArray) = refuse(:DTYPE, "",
    "lengths, offsets, block and page numbers are integers, but an array of $(eltype(x)) is given")
singles(x::Array{Float32}) = x
singles(x::AbstractArray{<:Real}) = isdense(x) && eltype(x) === Float32 ? x : float32.(x)

"Masks as bytes: a BitArray has none."
bytes(x::BitArray) = Array{Bool}(x)
bytes(x::AbstractArray) = x

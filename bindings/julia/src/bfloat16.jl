# Julia 1.11 has the type, and the package BFloat16s its arithmetic. Before, the type is made here,
# with conversions and what tests and printing need.

@static if isdefined(Core, :BFloat16)
    const BFloat16 = Core.BFloat16
else
    """
        BFloat16

    The upper half of a Float32. A storage format: arithmetic goes through Float32.
    """
    primitive type BFloat16 <: AbstractFloat 16 end

    BFloat16(x::BFloat16) = x
    BFloat16(x::Float32) = bfloat16(x)
    BFloat16(x::Real) = bfloat16(Float32(x))
    Base.Float32(x::BFloat16) = float32(x)
    Base.Float64(x::BFloat16) = Float64(float32(x))
    Base.Float16(x::BFloat16) = Float16(float32(x))
    Base.promote_rule(::Type{BFloat16}, ::Type{<:Integer}) = BFloat16
    Base.promote_rule(::Type{BFloat16}, ::Type{Float16}) = Float32
    Base.promote_rule(::Type{BFloat16}, ::Type{Float32}) = Float32
    Base.promote_rule(::Type{BFloat16}, ::Type{Float64}) = Float64
    for op in (:+, :-, :*, :/)
        @eval Base.$op(x::BFloat16, y::BFloat16) = bfloat16($op(float32(x), float32(y)))
    end
    for op in (:<, :<=, :(==))
        @eval Base.$op(x::BFloat16, y::BFloat16) = $op(float32(x), float32(y))
    end
    Base.:-(x::BFloat16) = bfloat16(-float32(x))
    Base.eps(::Type{BFloat16}) = bfloat16(0.0078125f0)
    Base.isnan(x::BFloat16) = isnan(float32(x))
    Base.isfinite(x::BFloat16) = isfinite(float32(x))
    Base.show(io::IO, x::BFloat16) = print(io, "BFloat16(", float32(x), ")")
end

"""
    FlashAttention.bfloat16(x::Real)

`x` rounded to the nearest BFloat16, ties to even. Works with and without the package BFloat16s.
"""
function bfloat16(x::Float32)
    bits = reinterpret(UInt32, x)
    isnan(x) && return reinterpret(BFloat16, ((bits >> 16) | 0x0040) % UInt16)
    return reinterpret(BFloat16, ((bits + 0x7fff + ((bits >> 16) & 0x01)) >> 16) % UInt16)
end
bfloat16(x::Real) = bfloat16(Float32(x))

"""
    FlashAttention.float32(x)

`x` as a Float32. Works with and without the package BFloat16s.
"""
float32(x::BFloat16) = reinterpret(Float32, UInt32(reinterpret(UInt16, x)) << 16)
float32(x::Real) = Float32(x)

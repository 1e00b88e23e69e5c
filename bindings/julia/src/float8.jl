# A type of 8 bits, as the library reads it. Julia has none.

"""
    F8E4M3

OCP E4M3: a number of 8 bits with 4 bits of exponent, no infinity, up to 448. A storage format:
`F8E4M3(x)` rounds to the nearest, ties to even, and to 448 what is larger; `FlashAttention.float32`
gives the number.
"""
primitive type F8E4M3 <: AbstractFloat 8 end

function F8E4M3(x::Float32)
    bits = reinterpret(UInt32, x)
    magnitude = bits & 0x7fffffff
    code = if isnan(x)
        0x0000007f
    elseif magnitude >= reinterpret(UInt32, 448.0f0)
        0x0000007e
    elseif magnitude < reinterpret(UInt32, 0.015625f0)
        # Adding 2^14 leaves multiples of 2^-9, the unit of subnormals, in the low bits.
        reinterpret(UInt32, abs(x) + 16384.0f0) - reinterpret(UInt32, 16384.0f0)
    else
        (magnitude + 0x0007ffff + ((magnitude >> 20) & 0x01) - 0x3c000000) >> 20
    end
    return reinterpret(F8E4M3, (code | ((bits >> 24) & 0x80)) % UInt8)
end
F8E4M3(x::F8E4M3) = x
F8E4M3(x::Real) = F8E4M3(Float32(x))

function float32(x::F8E4M3)
    bits = reinterpret(UInt8, x)
    magnitude = UInt32(bits & 0x7f)
    value = magnitude == 0x7f ? NaN32 : magnitude < 8 ? Float32(magnitude) / 512 :
            reinterpret(Float32, (magnitude << 20) + 0x3c000000)
    return bits < 0x80 ? value : -value
end
Base.Float32(x::F8E4M3) = float32(x)
Base.Float64(x::F8E4M3) = Float64(float32(x))
Base.isnan(x::F8E4M3) = isnan(float32(x))
Base.:(==)(x::F8E4M3, y::F8E4M3) = float32(x) == float32(y)
Base.show(io::IO, x::F8E4M3) = print(io, "F8E4M3(", float32(x), ")")

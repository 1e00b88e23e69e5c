# Attention as the formula says, in Float64, for arrays (dim, heads, sequence, batch).

"bias: a function (j, i, h, b) -> number; visible: (j, i) -> Bool. Returns out, lse."
function reference(q, k, v; scale = 1 / sqrt(size(q, 1)), visible = (j, i) -> true,
                   bias = (j, i, h, b) -> 0.0, softcap = 0.0, keep = nothing, dropout = 0.0,
                   sink = nothing)
    _, heads, queries, batch = size(q)
    keys, group = size(k, 3), heads ÷ size(k, 2)
    out = zeros(size(v, 1), heads, queries, batch)
    lse = fill(-Inf, queries, heads, batch)
    threshold = round(65536 * dropout)
    for b in 1:batch, h in 1:heads, i in 1:queries
        g = cld(h, group)
        s = map(1:keys) do j
            visible(j, i) || return -Inf
            x = scale * sum(Float64.(q[:, h, i, b]) .* Float64.(k[:, g, j, b]))
            softcap == 0 || (x = softcap * tanh(x / softcap))
            return x + bias(j, i, h, b)
        end
        sunk = sink === nothing ? -Inf : Float64(sink[h])
        m = max(maximum(s), sunk)
        m == -Inf && continue
        total = sum(exp.(s .- m)) + exp(sunk - m)
        lse[i, h, b] = m + log(total)
        for j in 1:keys
            weight = exp(s[j] - lse[i, h, b])
            keep === nothing || (weight *= keep[j, i, h, b] * 65536 / (65536 - threshold))
            out[:, h, i, b] .+= weight .* Float64.(v[:, g, j, b])
        end
    end
    return out, lse
end

near(a, b, tolerance) = size(a) == size(b) && all(x -> x <= tolerance, distance.(a, b))
distance(x, y) = x == y ? 0.0 : abs(Float64(float32(x)) - Float64(float32(y)))

const TOLERANCE = Dict(Float32 => 1e-5, Float16 => 4e-3, BFloat16 => 4e-2)

"Standard normal numbers of a type."
normal(T::Type, dims...) = T === BFloat16 ? bfloat16.(randn(Float32, dims...)) : T.(randn(Float32, dims...))
swap(x) = permutedims(x, (1, 3, 2, 4))

"The exception that f throws, as text."
function said(f, T)
    try
        f()
    catch error
        error isa T || rethrow()
        return sprint(showerror, error)
    end
    return "nothing was thrown"
end

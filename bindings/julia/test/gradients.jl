# Against finite differences of the formula in Float64.

"d/dx of sum(f(x) .* weights), by central differences at some places."
function slopes(f, x, places)
    map(places) do at
        moved(step) = (y = copy(x); y[at] += step; f(y))
        (moved(1e-5) - moved(-1e-5)) / 2e-5
    end
end

@testset "gradients" begin
    q, k, v = randn(6, 4, 5, 2), randn(6, 2, 7, 2), randn(3, 2, 7, 2)
    bias, sink = randn(7, 5, 4, 1), randn(4)
    dout, dlse = randn(3, 4, 5, 2), randn(5, 4, 2)
    options = (causal = true, softcap = 3.0)
    function loss(q, k, v, bias, sink)
        o, l = reference(q, k, v; visible = (j, i) -> j <= i + 2, softcap = 3.0, sink = sink,
                         bias = (j, i, h, b) -> bias[j, i, h, 1])
        return sum(o .* dout) + sum(l .* dlse)
    end
    single = map(x -> Float32.(x), (q = q, k = k, v = v, bias = bias, sink = sink))
    out, lse = attention(single.q, single.k, single.v; bias = single.bias, sink = single.sink,
                         return_lse = true, options...)
    arrays = (bias = single.bias, sink = single.sink, dlse = Float32.(dlse))
    grads = attention_backward(Float32.(dout), single.q, single.k, single.v, out, lse;
                               return_dbias = true, return_dsink = true, arrays..., options...)
    @test size(grads.dbias) == size(bias) && size(grads.dsink) == (4,)
    for (name, x, f) in ((:dq, q, x -> loss(x, k, v, bias, sink)),
                         (:dk, k, x -> loss(q, x, v, bias, sink)),
                         (:dv, v, x -> loss(q, k, x, bias, sink)),
                         (:dbias, bias, x -> loss(q, k, v, x, sink)),
                         (:dsink, sink, x -> loss(q, k, v, bias, x)))
        places = name === :dsink ? (1:4) : rand(eachindex(x), 12)
        @test near(grads[name][places], slopes(f, x, places), 2e-4)
    end
    # Into arrays of the caller's, dbias summed over queries and heads.
    into = map(x -> fill(NaN32, size(x)), (q, k, v))
    dbias, dsink = fill(NaN32, 7, 1, 1, 2), fill(NaN32, 4)
    attention_backward!(into..., Float32.(dout), single.q, single.k, single.v, out, lse;
                        dbias = dbias, dsink = dsink, arrays..., options...)
    @test into[1] == grads.dq && into[2] == grads.dk && into[3] == grads.dv && dsink == grads.dsink
    @test near(sum(dbias, dims = 4), sum(grads.dbias, dims = (2, 3)), 1e-4)
    plain = attention_backward(Float32.(dout), single.q, single.k, single.v, out, lse)
    @test plain.dbias === nothing && plain.dsink === nothing
end

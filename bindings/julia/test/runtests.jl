using FlashAttention, Test
using FlashAttention: LibFlashAttn, Plan, bfloat16, float32
import Random

include("reference.jl")
Random.seed!(20)

@testset "FlashAttention" begin
    include("parallel.jl")
    include("layout.jl")
    include("arrays.jl")
    include("options.jl")
    include("eightbit.jl")
    include("gradients.jl")
    include("errors.jl")
    include("plans.jl")
    include("append.jl")
    include("quantize.jl")
    include("frameworks.jl")
    include("extensions.jl")
    include("lux.jl")
    include("readme.jl")
    include("shared_cases.jl")
end

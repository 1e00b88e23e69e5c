@testset "the C structures" begin
    for (T, bytes, fields) in LibFlashAttn.LAYOUT
        @test sizeof(T) == bytes
        @test isbitstype(T)
        @test fieldcount(T) == length(fields)
        for (i, (name, offset, size)) in enumerate(fields)
            @test fieldname(T, i) === name
            @test fieldoffset(T, i) == offset
            @test sizeof(fieldtype(T, i)) == size
        end
        :struct_size in fieldnames(T) && @test T().struct_size == bytes
    end
    @test LibFlashAttn.flashattn_version() == LibFlashAttn.HEADER_VERSION
    @test all(FlashAttention.compatible, (200, 299)) && !any(FlashAttention.compatible, (100, 300, 10200))
    @test unsafe_string(LibFlashAttn.flashattn_status_name(Int32(2))) == "FLASHATTN_ERROR_UNSUPPORTED"
    # The init functions agree with the keyword constructors.
    for name in (:desc, :args, :merge_args)
        T = getfield(LibFlashAttn, Symbol("flashattn_", name))
        init = getfield(LibFlashAttn, Symbol("flashattn_", name, "_init"))
        x = Ref(T(struct_size = 7))
        @test init(x, UInt32(sizeof(T))) == LibFlashAttn.FLASHATTN_OK
        @test x[] == T()
    end
    @test LibFlashAttn.flashattn_args().q.stride_seq == -1
    @test all(==(0), LibFlashAttn.flashattn_error().message)
end

@testset "BFloat16" begin
    @test float32(bfloat16(1.0)) === 1.0f0
    @test float32(bfloat16(1.00390625)) === 1.0f0  # a tie, to even
    @test float32(bfloat16(1.01171875)) === 1.015625f0
    @test float32(bfloat16(-Inf)) === -Inf32
    @test isnan(float32(bfloat16(NaN)))
    @test sizeof(BFloat16) == 2
    if !isdefined(Core, :BFloat16)
        @test BFloat16(2) + BFloat16(1) == BFloat16(3)
        @test BFloat16(2) < 3.0f0
        @test Float64(BFloat16(0.5)) === 0.5
        @test sprint(show, BFloat16(0.5)) == "BFloat16(0.5)"
    end
end

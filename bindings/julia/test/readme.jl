# The programs of README.md run as they stand.

@testset "README" begin
    text = read(joinpath(@__DIR__, "..", "README.md"), String)
    programs = [m[1] for m in eachmatch(r"^```julia\n(.*?)^```"ms, text)]
    @test !isempty(programs)
    for program in programs
        Base.include_string(Module(), program, "README.md")
        @test true
    end
end

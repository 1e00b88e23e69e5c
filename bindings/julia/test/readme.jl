# The programs of README.md run as they stand.

@testset "README" begin
    text = read(joinpath(@__DIR__, "..", "README.md"), String)
    programs = [m[1] for m in eachmatch(r"^```julia\n(.*?)^```"ms, text)]
    @test !isempty(programs)
    for program in programs
        place = Module()
        Core.eval(place, :(using Base))
        Base.include_string(place, program, "README.md")
        @test true
    end
end

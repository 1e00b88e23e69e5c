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

@testset "the manual" begin
    pages = joinpath(@__DIR__, "..", "docs", "src")
    listed = String[]
    for page in readdir(pages), block in eachmatch(r"^```@docs\n(.*?)^```"ms, read(joinpath(pages, page), String))
        append!(listed, split(block[1]))
    end
    @test allunique(listed)
    # Each is there, with a docstring, and all that is exported is listed.
    for name in listed
        object = Symbol(split(name, '.')[end])
        binding = Base.Docs.Binding(FlashAttention, object)
        @test isdefined(FlashAttention, object)
        @test haskey(Base.Docs.meta(FlashAttention), binding)
    end
    @test issubset(setdiff(names(FlashAttention), [:BFloat16]), Symbol.(listed))
end

@testset "the recipe of the JLL" begin
    # The recipe asks a stand-in for BinaryBuilder.
    recipe = Module()
    Core.eval(recipe, quote
        GitSource(url, commit) = (url, commit)
        Platform(arch, system; libc) = (arch, system, libc)
        expand_cxxstring_abis(platforms) = platforms
        LibraryProduct(name, symbol) = (name, symbol)
        Dependency(name) = name
        build_tarballs(arguments...; options...) = (arguments, values(options))
    end)
    text = read(joinpath(@__DIR__, "..", "jll", "build_tarballs.jl"), String)
    asked, options = withenv("FLASHATTN_COMMIT" => "0"^40) do
        Base.include_string(recipe, replace(text, "using BinaryBuilder, Pkg" => ""), "build_tarballs.jl")
    end
    _, name, version, sources, script, platforms, products, dependencies = asked
    v = LibFlashAttn.HEADER_VERSION
    @test (name, version) == ("libflashattn", VersionNumber(v ÷ 10000, v ÷ 100 % 100, v % 100))
    @test occursin("the tag v$version.", text)
    # As the loader finds it, the library's name begins with the product's.
    @test products == [("libflashattn", :libflashattn)] && startswith(LibFlashAttn.lib, products[1][1])
    # The script is one of bash, and gives Meson options that there are.
    @test success(pipeline(IOBuffer(script), `bash -n`))
    options_file = joinpath(@__DIR__, "..", "..", "..", "meson_options.txt")
    if isfile(options_file)  # in the library's own tree
        known = read(options_file, String)
        for option in eachmatch(r"-D(\w+)=", script)
            @test occursin("option('$(option[1])'", known)
        end
    end
end

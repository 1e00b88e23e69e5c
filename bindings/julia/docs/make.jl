# The manual as a site, in docs/build. Julia 1.9 or newer and libflashattn (FLASHATTN_LIBRARY):
#
#     julia --project=bindings/julia/docs -e 'using Pkg; Pkg.develop(path = "bindings/julia")'
#     julia --project=bindings/julia/docs bindings/julia/docs/make.jl
using Documenter, FlashAttention

makedocs(sitename = "FlashAttention.jl", modules = [FlashAttention, FlashAttention.LibFlashAttn],
         format = Documenter.HTML(prettyurls = false, size_threshold = nothing), remotes = nothing,
         checkdocs = :exports,
         pages = ["Attention" => "index.md", "Other packages" => "packages.md",
                  "Plans" => "plans.md", "The C header" => "header.md"])

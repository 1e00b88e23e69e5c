module flashattn.test/foreign

go 1.21

require github.com/ebitengine/purego v0.9.1

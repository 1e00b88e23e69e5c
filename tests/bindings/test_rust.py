"""The Rust crates: their own tests, and what a Rust user expects to be clean.

Needs cargo, and crates.io for one small dependency (the crates burn, candle and cudarc: for more)
unless they are there already; what is missing is skipped and said. Everything that cargo makes lies
in build/rust and its neighbours; crates that several bridges need are compiled once.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from crates import BRIDGES, LINKED, ROOT, RUST, cargo, fetched, has, passed, succeed


def paragraphs(name):
    """How many cases or refusals all languages share."""
    return len((ROOT / "tests" / "data" / name).read_text().strip().split("\n\n"))


@pytest.fixture(scope="module", autouse=True)
def dependencies():
    missing = fetched(RUST)
    if missing:
        pytest.skip(f"the crates' dependencies cannot be fetched: {missing}")


def test_version():
    """The header is where the version stands; the crates repeat it."""
    header = (ROOT / "include" / "flashattn.h").read_text()
    version = ".".join(re.search(rf"VERSION_{part} (\d+)", header).group(1)
                       for part in ("MAJOR", "MINOR", "PATCH"))
    assert f'version = "{version}"' in (RUST / "Cargo.toml").read_text()
    raw = (RUST / "flashattn-sys" / "Cargo.toml").read_text()
    assert f'version = "{version}+flashattn.{version}"' in raw


def test_crates():
    said = succeed("test", "--locked", "--workspace", "--features", "rayon", "--", "--show-output")
    cases = re.search(r"(\d+) shared cases forward, (\d+) of them backward", said)
    assert cases, said[-4000:]
    print(f"Rust: {passed(said)} tests; {cases.group(0)}")
    assert passed(said) >= 60
    assert int(cases.group(1)) == paragraphs("cases.txt")
    refusals = re.search(r"(\d+) shared refusals", said)
    assert refusals and int(refusals.group(1)) == paragraphs("refusals.txt"), said[-4000:]


@pytest.mark.parametrize("example", ["attention", "varlen_backward"])
def test_examples(example):
    assert succeed("run", "--locked", "--example", example)


def test_clippy():
    if not has("clippy"):
        pytest.skip("cargo has no clippy: rustup component add clippy")
    for features in ([], ["--features", "rayon"]):
        succeed("clippy", "--locked", "--workspace", "--all-targets", *features, "--", "-D",
                "warnings")


def test_format():
    if not has("fmt"):
        pytest.skip("cargo has no fmt: rustup component add rustfmt")
    succeed("fmt", "--all", "--check")


def test_documentation():
    succeed("doc", "--locked", "--workspace", "--no-deps", "--features", "rayon",
            RUSTDOCFLAGS="-D warnings")


def test_a_field_is_a_line_of_the_header(tmp_path):
    """An array and a number that a later header adds have their methods, checks and comments."""
    pytest.importorskip("pycparser")
    sys.path.insert(0, str(ROOT / "bindings"))
    from generator import emit_julia, emit_rust, model
    header = (ROOT / "include" / "flashattn.h").read_text(encoding="utf-8")
    for end, added in (
            ("} flashattn_args;", "  /* (batch, heads_kv, ceil(seqlen_kv / page_size)); f32; "
             "optional. Weights. */\n  flashattn_tensor page_weights;\n"),
            ("} flashattn_args;", "  /* (heads_q); f32; optional. Forward writes it. */\n"
             "  flashattn_tensor most;\n"),
            ("} flashattn_append_kv_args;", "  /* (batch); i32; optional. As new. */\n"
             "  const int32_t *first;\n"),
            ("} flashattn_append_kv_args;", "  /* (batch); i32; optional. Written. */\n"
             "  int32_t *left_out;\n"),
            ("} flashattn_quantize_args;", "  /* (batch, heads_kv); f32; optional. Written. */\n"
             "  flashattn_tensor error_k;\n"),
            ("} flashattn_merge_args;", "  /* (heads_q); f32; optional. Written. */\n"
             "  flashattn_tensor most;\n"),
            ("} flashattn_desc;", "  /* Bytes of a cache. */\n  int64_t cache_limit;\n")):
        assert end in header
        header = header.replace(end, added + end)
    read = model.read(header)
    for name in ("flashattn", "flashattn-sys"):
        shutil.copytree(RUST / name, tmp_path / name)
    for name in ("Cargo.toml", "Cargo.lock"):
        shutil.copy(RUST / name, tmp_path)
    (tmp_path / "flashattn-sys" / "src" / "lib.rs").write_text(emit_rust.emit(read),
                                                               encoding="utf-8")
    (tmp_path / "flashattn" / "examples" / "later.rs").write_text("""
use flashattn::{AppendInputs, AppendOutput, Array, DescBuilder, Dtype, Inputs, Output};
use flashattn::{QuantizeOutput, View, ViewMut};

fn main() {
    let (x, mut y, mut n) = ([0f32; 16], [0f32; 16], [0i32; 1]);
    let view = View::new(&x, [1, 1, 1, 16]).unwrap();
    let weights = Array::from(&x).dims([1, 1, 16]);
    let _ = Inputs::new(view, view, view).page_weights(weights);
    let _ = DescBuilder::new(Dtype::F32, 1, 16).cache_limit(1 << 40);
    let _ = AppendInputs::new(view, view).first(&[0]);
    let _ = AppendOutput::<f32>::default().left_out(&mut n);
    let _ = QuantizeOutput::<f32>::new().error_k(&mut y);
    let mut o = [0f32; 16];
    // Arrays of flashattn_args and of flashattn_merge_args.
    let _ = Output::new(ViewMut::new(&mut o, [1, 1, 1, 16]).unwrap()).most(&mut y);
}
""", encoding="utf-8")
    succeed("check", "--locked", "-p", "flashattn", "--example", "later", folder=tmp_path,
            target=ROOT / "build" / "rust-later", lookup={"DOCS_RS": "1"})
    emitted = emit_julia.emit(read)
    for field in (":page_weights, :input, true, :f32,", ":left_out, :output, false, :i32,",
                  ":error_k, :output, true, :f32,"):
        assert f"ArrayField({field}" in emitted


class TestBuildScript:
    """The places that build.rs looks at, in their order."""

    TARGET = ROOT / "build" / "rust-lookup"
    NO_PKG_CONFIG = {"PKG_CONFIG": "false"}

    def test_documentation_needs_no_library(self):
        succeed("check", "--locked", "-p", "flashattn", target=self.TARGET,
                lookup={"DOCS_RS": "1", **self.NO_PKG_CONFIG})

    def test_missing_library_is_said(self):
        code, said = cargo("check", "--locked", "-p", "flashattn-sys", target=self.TARGET,
                           lookup=self.NO_PKG_CONFIG)
        assert code and "Set FLASHATTN_LIB_DIR to the folder" in said and "panicked" not in said

    def test_pkg_config(self, tmp_path):
        if not shutil.which("pkg-config"):
            pytest.skip("no pkg-config")
        folder = LINKED["FLASHATTN_LIB_DIR"]
        (tmp_path / "flashattn.pc").write_text(
            f"libdir={folder}\nName: flashattn\nDescription: -\nVersion: 0.2.0\n"
            "Libs: -L${libdir} -lflashattn\n")
        said = succeed("test", "--locked", "-p", "flashattn-sys", target=self.TARGET,
                       lookup={"PKG_CONFIG_PATH": str(tmp_path)})
        assert passed(said) > 10

    def test_a_static_build_is_for_the_cpu(self, tmp_path):
        """CUDA's objects would need libraries that are not linked beside the archive."""
        said = tmp_path / "said"
        for tool in ("meson", "ninja"):
            (tmp_path / tool).write_text(f'#!/bin/sh\necho {tool} "$@" >>"{said}"\n')
            (tmp_path / tool).chmod(0o755)
        (tmp_path / "meson.build").touch()
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        succeed("check", "--locked", "-p", "flashattn-sys", target=self.TARGET,
                lookup={"FLASHATTN_BUILD_FROM": str(tmp_path), "PATH": path, **self.NO_PKG_CONFIG})
        setup, build = said.read_text().splitlines()
        assert setup.startswith("meson setup") and "-Dcuda=disabled" in setup.split()
        assert build.startswith("ninja") and build.endswith("libflashattn.a")


class TestPackages:
    """The crates as crates.io would hand them out."""

    CRATES = ("flashattn-sys", "flashattn", "cudarc", "candle", "burn")

    @pytest.fixture(scope="class")
    def packages(self, tmp_path_factory):
        """Folders of the unpacked crates."""
        target = tmp_path_factory.mktemp("package")
        for crate in self.CRATES:
            if missing := fetched(RUST / crate):
                pytest.skip(f"{crate} cannot be fetched: {missing}")
            # A patch that a crate has no use for would be written into its lock file.
            bridge = {"flashattn_cudarc": RUST / "cudarc"} if crate == "candle" else {}
            own = self.found_in(flashattn=RUST / "flashattn",
                                flashattn_sys=RUST / "flashattn-sys", **bridge)
            succeed("package", "--offline", "--no-verify", "--allow-dirty", *own,
                    folder=RUST / crate, target=target)
        for archive in (target / "package").glob("*.crate"):
            subprocess.run(["tar", "-xf", archive, "-C", target], check=True)
        return {re.split(r"-\d", path.name)[0]: path for path in target.glob("flashattn*")}

    @staticmethod
    def found_in(**folders):
        """Options by which cargo finds crates that no registry has yet."""
        return [word for name, folder in folders.items() for word in
                ("--config", f"patch.crates-io.{name.replace('_', '-')}.path='{folder}'")]

    def test_what_a_registry_asks_for(self, packages):
        assert set(packages) == {"flashattn-sys", "flashattn", "flashattn-burn", "flashattn-candle",
                                 "flashattn-cudarc"}
        address = re.search(r'Repository = "(.*)"', (ROOT / "pyproject.toml").read_text()).group(1)
        for name, folder in packages.items():
            said = succeed("metadata", "--no-deps", "--offline", "--format-version=1",
                           folder=folder)
            (package,) = json.loads(said[said.index("{"):])["packages"]
            assert package["publish"] is None and package["description"], name
            assert (package["license"], package["repository"]) == ("Apache-2.0", address)
            assert len(package["keywords"]) <= 5 and package["categories"]
            assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
            assert (folder / "README.md").read_bytes() == (RUST / "README.md").read_bytes()

    def test_the_library_is_built_from_a_package(self, packages, tmp_path):
        """For the baseline alone, which other instruction sets would not make truer."""
        for tool in ("meson", "ninja"):
            if not shutil.which(tool):
                pytest.skip(f"no {tool}")
        own = tmp_path / "meson"
        own.write_text(f'#!/bin/sh\nexec "{shutil.which("meson")}" "$@" "-Dcpu_isas=[]"\n')
        own.chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        said = succeed("run", "--offline", "--features", "build", "--example", "attention",
                       *self.found_in(flashattn_sys=packages["flashattn-sys"]),
                       folder=packages["flashattn"], target=tmp_path / "target",
                       lookup={"PATH": path, **TestBuildScript.NO_PKG_CONFIG})
        assert "baseline" in said, said[-4000:]

    @pytest.mark.parametrize("crate", ["burn", "candle", "cudarc"])
    def test_bridges_are_built_from_packages(self, packages, crate):
        """With their tests, and so with the dependencies that test_bridges compiles: without tests
        some have other features."""
        siblings = {name.replace("-", "_"): packages[name]
                    for name in ("flashattn", "flashattn-sys", "flashattn-cudarc")
                    if crate == "candle" or name != "flashattn-cudarc"}
        succeed("build", "--tests", "--offline", *self.found_in(**siblings),
                folder=packages[f"flashattn-{crate}"], target=BRIDGES)


@pytest.mark.parametrize("crate, least", [("burn", 9), ("candle", 12), ("cudarc", 8)])
def test_bridges(crate, least):
    folder = RUST / crate
    missing = fetched(folder)
    if missing:
        pytest.skip(f"{crate} cannot be fetched: {missing}")
    said = succeed("test", "--locked", folder=folder, target=BRIDGES)
    assert passed(said) >= least
    print(f"Rust: {passed(said)} tests of the {crate} crate")
    if has("clippy"):
        succeed("clippy", "--locked", "--all-targets", "--", "-D", "warnings", folder=folder,
                target=BRIDGES)
    if has("fmt"):
        succeed("fmt", "--check", folder=folder)
    succeed("doc", "--locked", "--no-deps", folder=folder, target=BRIDGES,
            RUSTDOCFLAGS="-D warnings")


def public_names(text):
    """The public functions and structures of a Rust source: arguments or fields, with their types,
    and what is returned."""
    text = re.sub(r"//.*", "", text)
    found = re.findall(r"^pub (fn|struct|enum|trait|type|const|static|mod|use|union) "
                       r"([\w:*]+)(.*?)^([)}].*?)?$", text, re.M | re.S)
    return {name: (kind, re.sub(r"\s+|\bpub\b|,(?=\s*$)", "", body), end.rstrip(" {"))
            for kind, name, body, end in found}


def test_candles_names(tmp_path):
    """Each public name of candle-flash-attn, with its arguments or fields, is here, too."""
    ours = RUST / "candle-flash-attn"
    (version,) = re.findall(r'^version = "(.*)"', (ours / "Cargo.toml").read_text(), re.M)
    said = cargo("info", f"candle-flash-attn@{version}", folder=tmp_path)[1]  # it fetches the crate
    home = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))
    found = list(home.glob(f"registry/src/*/candle-flash-attn-{version}/src/lib.rs"))
    if not found:
        pytest.skip(f"candle-flash-attn {version} cannot be fetched: {said.splitlines()[-1]}")
    theirs = public_names(found[0].read_text(encoding="utf-8"))
    assert len(theirs) >= 12 and "FlashAttn" in theirs, theirs
    sources = RUST / "candle" / "src"
    here = {}
    for name in ("functions", "flash_attn"):
        here.update(public_names((sources / f"{name}.rs").read_text(encoding="utf-8")))
    assert {name: here.get(name) for name in theirs} == theirs
    root = (sources / "lib.rs").read_text(encoding="utf-8")
    assert "pub use flash_attn::FlashAttn;" in root and "pub use functions::*;" in root


# Makes empty files for NVIDIA's compiler to have made, and says a version as that does.
NO_NVCC = r"""#!/bin/sh
case "$*" in
  *--version*) printf '%s\n' nvcc of NVIDIA "tools, release 13.0, V13.0.48"; exit ;;
esac
for word; do
  case $word in *.cu) source=$(basename "$word" .cu) ;; esac
  case $before in -o) : >"$word" ;; --output-directory) folder=$word ;; esac
  before=$word
done
[ -z "$folder" ] || : >"$folder/$source.ptx"
"""


def test_patch():
    """A program that depends on candle-flash-attn gets libflashattn, of candle's newest version."""
    folder = RUST / "candle-flash-attn" / "consumer"
    if missing := fetched(folder):
        pytest.skip(f"candle-flash-attn's consumer cannot be fetched: {missing}")
    said = succeed("run", "--locked", folder=folder, target=BRIDGES,
                   LD_LIBRARY_PATH=LINKED["FLASHATTN_LIB_DIR"])
    assert "candle-flash-attn by libflashattn: [2, 5, 4, 16]" in said, said[-4000:]


def test_patch_on_gpus(tmp_path):
    """The same program with the feature cuda of candle's newest version: it compiles, as Rust; its
    kernels are not compiled, and nothing is linked."""
    folder = RUST / "candle-flash-attn" / "consumer"
    if missing := fetched(folder, "--features", "cuda"):
        pytest.skip(f"candle-flash-attn's consumer cannot be fetched: {missing}")
    (tmp_path / "nvcc").write_text(NO_NVCC, encoding="utf-8")
    (tmp_path / "nvcc").chmod(0o755)
    succeed("rustc", "--locked", "--features", "cuda", "--", "-C", "linker=true", folder=folder,
            target=BRIDGES, CUDA_COMPUTE_CAP="90", CUDA_HOME=str(tmp_path),
            PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

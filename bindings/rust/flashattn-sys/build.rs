//! Finds libflashattn, in this order:
//!
//! 1. `DOCS_RS`: nothing is linked, so that documentation builds anywhere.
//! 2. `FLASHATTN_LIB_DIR`: the folder that holds the library.
//! 3. The program `pkg-config` (or the one that `PKG_CONFIG` names) and its `flashattn.pc`.
//! 4. `FLASHATTN_BUILD_FROM`, the path of the repository, or the feature `build`, the sources in this
//!    crate: built with Meson and Ninja for the CPU only, linked statically.
//!
//! Dependents read the folder as `DEP_FLASHATTN_LIBDIR`.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    for name in ["DOCS_RS", "FLASHATTN_LIB_DIR", "FLASHATTN_BUILD_FROM", "PKG_CONFIG"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    for name in ["PKG_CONFIG_PATH", "PKG_CONFIG_LIBDIR"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    if env::var_os("DOCS_RS").is_some() {
        return;
    }
    if let Err(message) = link() {
        eprintln!("flashattn-sys: {message}");
        std::process::exit(1);
    }
}

fn link() -> Result<(), String> {
    if let Some(folder) = env::var_os("FLASHATTN_LIB_DIR") {
        return link_folder(Path::new(&folder));
    }
    let missing = match link_pkg_config() {
        Ok(()) => return Ok(()),
        Err(message) => message,
    };
    let source = match env::var_os("FLASHATTN_BUILD_FROM") {
        Some(path) => PathBuf::from(path),
        None if env::var_os("CARGO_FEATURE_BUILD").is_some() => {
            PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("libflashattn")
        }
        None => {
            return Err(format!(
                "libflashattn was not found: {missing}. Set FLASHATTN_LIB_DIR to the folder that \
                 holds libflashattn.so, or PKG_CONFIG_PATH to that of flashattn.pc, or \
                 FLASHATTN_BUILD_FROM to the library's repository to build it, or switch on the feature \
                 build of this crate to build the sources in it"
            ))
        }
    };
    build_from(&source)
}

fn link_folder(folder: &Path) -> Result<(), String> {
    let folder = folder
        .canonicalize()
        .map_err(|error| format!("FLASHATTN_LIB_DIR = {}: {error}", folder.display()))?;
    search(&folder);
    println!("cargo:rustc-link-lib=dylib=flashattn");
    Ok(())
}

fn search(folder: &Path) {
    println!("cargo:rustc-link-search=native={}", folder.display());
    println!("cargo:libdir={}", folder.display());
    // For the tests of this crate only: it does not reach dependents.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.display());
}

fn link_pkg_config() -> Result<(), String> {
    let program = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let name = program.to_string_lossy().into_owned();
    let ask = |option: &str| -> Result<String, String> {
        let output = Command::new(&program)
            .args([option, "flashattn"])
            .output()
            .map_err(|error| format!("{name}: {error}"))?;
        if !output.status.success() {
            return Err(format!("{name} knows no package flashattn"));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    // -L is left out for folders that the linker searches anyway.
    let folder = ask("--variable=libdir")?;
    if !folder.is_empty() {
        search(Path::new(&folder));
    }
    for flag in ask("--libs")?.split_whitespace() {
        if let Some(library) = flag.strip_prefix("-l") {
            println!("cargo:rustc-link-lib=dylib={library}");
        } else if let Some(folder) = flag.strip_prefix("-L") {
            println!("cargo:rustc-link-search=native={folder}");
        }
    }
    Ok(())
}

fn build_from(source: &Path) -> Result<(), String> {
    let source = source
        .canonicalize()
        .map_err(|error| format!("FLASHATTN_BUILD_FROM = {}: {error}", source.display()))?;
    if !source.join("meson.build").is_file() {
        return Err(format!(
            "{} holds no meson.build: set FLASHATTN_BUILD_FROM to the library's repository",
            source.display()
        ));
    }
    for path in ["meson.build", "meson_options.txt", "src", "include"] {
        println!("cargo:rerun-if-changed={}", source.join(path).display());
    }
    let build = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("meson");
    let mut setup = Command::new("meson");
    setup.arg("setup").arg(&build).arg(&source);
    // Kernels for GPUs would need CUDA's static runtime beside the archive: 1 to 3 are for them.
    setup.args(["-Dtests=false", "-Dpython=disabled", "-Dcuda=disabled"]);
    if build.join("build.ninja").is_file() {
        setup.arg("--reconfigure");
    }
    run(&mut setup)?;
    run(Command::new("ninja").arg("-C").arg(&build).arg("src/libflashattn.a"))?;

    search(&build.join("src"));
    println!("cargo:rustc-link-lib=static=flashattn");
    let target = env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    let runtime = if target == "macos" { "c++" } else { "stdc++" };
    println!("cargo:rustc-link-lib=dylib={runtime}");
    Ok(())
}

fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{program} is needed to build libflashattn: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(format!("{program} failed:\n{}", String::from_utf8_lossy(&said)))
}

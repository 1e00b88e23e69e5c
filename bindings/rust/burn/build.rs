//! Lets this crate's own tests and examples find the library that flashattn-sys found. Programs that
//! depend on the crate find it as any shared library: an rpath printed here does not reach them.

fn main() {
    if let Some(folder) = std::env::var_os("DEP_FLASHATTN_LIBDIR") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.to_string_lossy());
    }
}

//! Names the library as the driver's is named: who asks the dynamic linker for `libcuda.so.1`
//! by that name, by `DT_NEEDED` or by `dlopen`, is given the object that already bears it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // What we take for our own function must be ours, also where the driver was loaded before us.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Nothing that we need may be looked up lazily inside somebody's signal handler or small stack.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,now");
}

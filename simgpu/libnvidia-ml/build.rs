//! Gives the library the driver's SONAME, and binds its own calls to itself: without `-Bsymbolic` a
//! preloaded library of the same names would be called from inside, and a broken hook would look
//! complete.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}

//! Counting the calls that this driver receives from outside, where `SUBLET_SIM_CALLS` names a
//! directory: the truth that a test of the preload library holds its own counts against.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicPtr, Ordering};

use memmap2::MmapOptions;
use shim_ffi::Symbol;
use shim_ffi::counts::{Counts, Note, RECEIVED, RECEIVED_VARIABLE};

/// The page, or null where nobody asked for it. Read by the exported symbols.
pub static PAGE: AtomicPtr<Counts> = AtomicPtr::new(std::ptr::null_mut());

/// Opens this process's page, if one is asked for: a new file `PID-N.received`.
pub fn begin() {
    let Some(directory) = std::env::var_os(RECEIVED_VARIABLE).filter(|name| !name.is_empty())
    else {
        return;
    };
    // TRIES: as many images as one process is likely to execute one after the other.
    let file = (0..1000).find_map(|image| {
        let name = format!("{}-{image}{RECEIVED}", std::process::id());
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(std::path::Path::new(&directory).join(name))
            .ok()
    });
    let Some(file) = file else { return };
    if file.set_len(Counts::BYTES as u64).is_err() {
        return;
    }
    let Ok(page) = MmapOptions::new().len(Counts::BYTES).map_raw(&file) else {
        return;
    };
    let page = ManuallyDrop::new(page).as_mut_ptr().cast::<Counts>();
    // SAFETY: fresh zero pages of a new file of ours, mapped whole and never unmapped.
    unsafe { Counts::begin(page, std::process::id()) };
    PAGE.store(page, Ordering::Release);
}

/// Notes what is no call.
pub fn note(note: Note) {
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: null, or begun and never unmapped.
    if let Some(page) = unsafe { page.as_ref() } {
        page.note(note, 1);
    }
}

/// Counts one call.
pub fn count(symbol: Symbol) {
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: null, or begun and never unmapped.
    if let Some(page) = unsafe { page.as_ref() } {
        page.call(symbol as usize);
    }
}

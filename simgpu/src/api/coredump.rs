//! Settings of core dumps: kept, and given back. Nothing is ever dumped.

use std::ffi::c_void;

use shim_ffi::CUresult;

use super::Done;
use crate::context::current_any;
use crate::driver::driver;
use crate::entry::{In, Out, api};

/// The settings that are one byte: yes or no.
const SWITCHES: std::ops::RangeInclusive<u32> = 1..=4;
const FILE: u32 = 5;
const PIPE: u32 = 6;
const FLAGS: u32 = 7;
/// Most bytes of a path, with its NUL.
const PATH: usize = 1024;

fn check(id: u32) -> Done {
    if SWITCHES.contains(&id) || matches!(id, FILE | PIPE | FLAGS) {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}

fn usual(id: u32) -> Vec<u8> {
    match id {
        FILE => b"core_%t_%h_%p.nvcudmp\0".to_vec(),
        PIPE => b"corepipe.cuda.%h.%p\0".to_vec(),
        FLAGS => vec![0; 4],
        _ => vec![0],
    }
}

fn get(context: u64, id: u32, to: Out<c_void>, bytes: Out<usize>) -> Done {
    check(id)?;
    let settings = driver()?.coredump.lock();
    let own = settings.get(&(context, id)).or(settings.get(&(0, id)));
    let value = own.cloned().unwrap_or_else(|| usual(id));
    if to.is_null() {
        return bytes.put(value.len());
    }
    let capacity = bytes.get()?;
    // SAFETY: the program says that it has space for so many bytes.
    unsafe { Out::new(to.raw().cast::<u8>()) }.put_all(&value, capacity)?;
    bytes.put(value.len().min(capacity))
}

fn set(context: u64, id: u32, from: *const c_void, bytes: In<usize>) -> Done {
    check(id)?;
    let count = bytes.get()?;
    let most = match id {
        FILE | PIPE => PATH,
        FLAGS => 4,
        _ => 1,
    };
    if count == 0 || count > most {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: null is refused, and the program vouches for so many bytes.
    let mut value = unsafe { In::new(from.cast::<u8>()) }.list(count)?;
    if matches!(id, FILE | PIPE) && value.last() != Some(&0) {
        value.push(0);
    }
    driver()?.coredump.lock().insert((context, id), value);
    Ok(())
}

api! {
    fn cuCoredumpGetAttribute(id: u32, to: Out<c_void>, bytes: Out<usize>) {
        get(current_any()?.1.id, id, to, bytes)
    }

    fn cuCoredumpGetAttributeGlobal(id: u32, to: Out<c_void>, bytes: Out<usize>) {
        get(0, id, to, bytes)
    }

    fn cuCoredumpSetAttribute(id: u32, from: *const c_void, bytes: In<usize>) {
        set(current_any()?.1.id, id, from, bytes)
    }

    fn cuCoredumpSetAttributeGlobal(id: u32, from: *const c_void, bytes: In<usize>) {
        set(0, id, from, bytes)
    }
}

//! The dynamic linker: the real `dlsym`, and ours in front of it.
//!
//! Programs that open the driver by another name than its SONAME hold a handle of the real library; what they look up
//! through it is swapped for ours here. Anything else must reach the C library's `dlsym` by a *jump*: `RTLD_NEXT` and
//! `RTLD_DEFAULT` mean something relative to the caller's return address.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use shim_ffi::Symbol;

use crate::errno::Preserve;
use crate::{exports, real};

static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static REAL_DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// `dlsym` of the C library, for handles (not for `RTLD_NEXT`, which would mean next after us).
pub(crate) fn real_dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    find_real();
    let at = REAL_DLSYM.load(Ordering::Acquire);
    if at.is_null() {
        return at;
    }
    // SAFETY: the address of the C library's `dlsym`; the name is NUL-terminated.
    let found = unsafe { std::mem::transmute::<*mut c_void, Dlsym>(at)(handle, name.as_ptr()) };
    if found.is_null() {
        // SAFETY: clears the error that our own look-up left behind.
        unsafe { libc::dlerror() };
    }
    found
}

fn find_real() {
    if !REAL_DLSYM.load(Ordering::Acquire).is_null() {
        return;
    }
    let _errno = Preserve::new();
    let mut search = Search {
        dlsym: std::ptr::null_mut(),
        dlvsym: std::ptr::null_mut(),
    };
    // SAFETY: the callback matches the prototype and its data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    REAL_DLVSYM.store(search.dlvsym, Ordering::Release);
    REAL_DLSYM.store(search.dlsym, Ordering::Release);
}

struct Search {
    dlsym: *mut c_void,
    dlvsym: *mut c_void,
}

/// Looks into one loaded object: the C library (2.34 and later) or libdl (before).
unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    // SAFETY: the dynamic linker hands us a valid object description and our own data.
    let (info, search) = unsafe { (&*info, &mut *data.cast::<Search>()) };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: a NUL-terminated name.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    let file = name.rsplit(|byte| *byte == b'/').next().unwrap_or(name);
    if !(file.starts_with(b"libc.so") || file.starts_with(b"libc-") || file.starts_with(b"libdl")) {
        return 0;
    }
    // SAFETY: the object is mapped while the dynamic linker iterates over it.
    let Some(symbols) = (unsafe { Symbols::of(info) }) else {
        return 0;
    };
    for (name, found) in [
        (c"dlsym", &mut search.dlsym),
        (c"dlvsym", &mut search.dlvsym),
    ] {
        if found.is_null() {
            // SAFETY: as above.
            *found = unsafe { symbols.find(name) };
        }
    }
    c_int::from(!search.dlsym.is_null() && !search.dlvsym.is_null())
}

/// The dynamic symbols of a mapped object.
struct Symbols {
    base: usize,
    table: *const libc::Elf64_Sym,
    strings: *const c_char,
    count: usize,
}

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

impl Symbols {
    /// # Safety
    /// `info` describes an object that stays mapped while the value is used.
    unsafe fn of(info: &libc::dl_phdr_info) -> Option<Self> {
        let base = info.dlpi_addr as usize;
        // SAFETY: the object's own program headers.
        let headers =
            unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let dynamic = headers
            .iter()
            .find(|header| header.p_type == libc::PT_DYNAMIC)?;
        let mut at = (base + dynamic.p_vaddr as usize) as *const Dynamic;
        let (mut table, mut strings, mut gnu, mut sysv) = (0, 0, 0, 0);
        // SAFETY: the dynamic section ends in a null tag.
        unsafe {
            while (*at).tag != 0 {
                let value = (*at).value as usize;
                match (*at).tag {
                    DT_SYMTAB => table = value,
                    DT_STRTAB => strings = value,
                    DT_GNU_HASH => gnu = value,
                    DT_HASH => sysv = value,
                    _ => {}
                }
                at = at.add(1);
            }
        }
        if table == 0 || strings == 0 {
            return None;
        }
        // glibc relocates these in place; others leave offsets.
        let mapped = |value: usize| if value < base { value + base } else { value };
        let count = if gnu != 0 {
            // SAFETY: the object's own hash table.
            unsafe { gnu_count(mapped(gnu) as *const u32) }
        } else if sysv != 0 {
            // SAFETY: the second word of a SysV hash table is the number of symbols.
            unsafe { *(mapped(sysv) as *const u32).add(1) as usize }
        } else {
            return None;
        };
        Some(Self {
            base,
            table: mapped(table) as *const libc::Elf64_Sym,
            strings: mapped(strings) as *const c_char,
            count,
        })
    }

    /// # Safety
    /// As for [`Symbols::of`].
    unsafe fn find(&self, name: &CStr) -> *mut c_void {
        for at in 0..self.count {
            // SAFETY: below the table's length; names are NUL-terminated strings of the string table.
            let (symbol, own) = unsafe {
                let symbol = &*self.table.add(at);
                (
                    symbol,
                    CStr::from_ptr(self.strings.add(symbol.st_name as usize)),
                )
            };
            // Defined, and a function.
            if symbol.st_shndx != 0 && symbol.st_info & 0xf == 2 && own == name {
                return (self.base + symbol.st_value as usize) as *mut c_void;
            }
        }
        std::ptr::null_mut()
    }
}

/// Number of symbols behind a GNU hash table: one more than the last index of its longest chain.
///
/// # Safety
/// `table` points to a well-formed GNU hash table.
unsafe fn gnu_count(table: *const u32) -> usize {
    // SAFETY: header of four words, bloom filter of 64-bit words, buckets, chains.
    unsafe {
        let (buckets, first, bloom) = (
            *table as usize,
            *table.add(1) as usize,
            *table.add(2) as usize,
        );
        let bucket = table.add(4 + 2 * bloom);
        let chain = bucket.add(buckets);
        let mut last = (0..buckets)
            .map(|at| *bucket.add(at) as usize)
            .max()
            .unwrap_or(0);
        if last < first {
            return first;
        }
        while *chain.add(last - first) & 1 == 0 {
            last += 1;
        }
        last + 1
    }
}

/// What a look-up of `name` through `handle` is to answer, or null for "ask the C library, by jumping there".
extern "C" fn filter(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    find_real();
    let pass = std::ptr::null_mut();
    // RTLD_DEFAULT and RTLD_NEXT find us by the ordinary search, or mean to find somebody after us.
    if name.is_null() || handle.is_null() || handle == libc::RTLD_NEXT {
        return pass;
    }
    // SAFETY: the caller's name, NUL-terminated by the contract of `dlsym`.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(symbol) = Symbol::from_name(name.to_bytes()) else {
        return pass;
    };
    let _errno = Preserve::new();
    let found = if version.is_null() {
        real_dlsym(handle, name)
    } else {
        let at = REAL_DLVSYM.load(Ordering::Acquire);
        if at.is_null() {
            return pass;
        }
        // SAFETY: the C library's `dlvsym` with the caller's own arguments; an explicit handle needs no return address.
        unsafe { std::mem::transmute::<*mut c_void, Dlvsym>(at)(handle, name.as_ptr(), version) }
    };
    // By address: only what is the real driver's own function is ours to replace. Another library's function of the same
    // name stays as it is.
    if !found.is_null() && real::found() && found == real::address(symbol) {
        exports::own(symbol)
    } else {
        pass
    }
}

/// In front of the C library's `dlsym`.
///
/// # Safety
/// As the C library says; every argument is passed on as it came.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "xor edx, edx",
        "call {filter}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jne 2f",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "je 2f",
        "jmp rax",
        "2: ret",
        filter = sym filter,
        real = sym REAL_DLSYM,
    )
}

/// In front of the C library's `dlvsym`.
///
/// # Safety
/// As the C library says; every argument is passed on as it came.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {filter}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jne 2f",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "je 2f",
        "jmp rax",
        "2: ret",
        filter = sym filter,
        real = sym REAL_DLVSYM,
    )
}

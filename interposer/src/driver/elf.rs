//! As much of a mapped ELF object as is needed to look up, and to redirect, what it exports.
//! Layout: elf(5).

use std::ffi::{CStr, c_char, c_void};

/// The dynamic symbols of a mapped object.
pub(crate) struct Symbols {
    /// What is added to addresses in the file.
    pub(crate) base: usize,
    table: *const libc::Elf64_Sym,
    strings: *const c_char,
    /// SysV hash table, or null.
    buckets: *const u32,
    soname: Option<usize>,
    /// GNU hash table, or null.
    hash: *const u32,
}

/// An entry of a dynamic section.
#[repr(C)]
pub(crate) struct Dynamic {
    tag: i64,
    value: u64,
}

/// The dynamic linker's description of an object, which is what its handles point to. ABI: the
/// public part of `link_map`.
#[repr(C)]
pub struct LinkMap {
    pub(crate) address: usize,
    pub(crate) name: *const c_char,
    pub(crate) section: *const Dynamic,
    pub(crate) next: *const LinkMap,
}

/// What it keeps for debuggers. ABI: the beginning of `r_debug`.
#[repr(C)]
struct Debug {
    version: i32,
    first: *const LinkMap,
}

const STT_FUNC: u8 = 2;
const R_X86_64_64: u32 = 1;
const R_X86_64_GLOB_DAT: u32 = 6;
const R_X86_64_JUMP_SLOT: u32 = 7;
const DT_NEEDED: i64 = 1;
const DT_PLTRELSZ: i64 = 2;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_SONAME: i64 = 14;
const DT_DEBUG: i64 = 21;
const DT_JMPREL: i64 = 23;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

impl Symbols {
    /// # Safety
    /// `info` describes an object that stays mapped while the value is used.
    pub(crate) unsafe fn of(info: &libc::dl_phdr_info) -> Option<Self> {
        // SAFETY: as the caller promises.
        unsafe { Self::at(info.dlpi_addr as usize, section(info)) }
    }

    /// Of an object that is mapped at `base`, by its dynamic section; null: it has none.
    ///
    /// # Safety
    /// That is so, and stays so while the value is used.
    pub(crate) unsafe fn at(base: usize, section: *const Dynamic) -> Option<Self> {
        let (mut table, mut strings, mut gnu, mut sysv, mut soname) = (0, 0, 0, 0, None);
        // SAFETY: as the caller promises.
        for (tag, value) in unsafe { entries(section) } {
            match tag {
                DT_SYMTAB => table = value,
                DT_STRTAB => strings = value,
                DT_GNU_HASH => gnu = value,
                DT_HASH => sysv = value,
                DT_SONAME => soname = Some(value),
                _ => {}
            }
        }
        if table == 0 || strings == 0 {
            return None;
        }
        // glibc relocates these in place; others leave offsets.
        let mapped = |value: usize| if value < base { value + base } else { value };
        if gnu == 0 && sysv == 0 {
            return None;
        }
        let table_at = |value: usize| match value {
            0 => std::ptr::null(),
            _ => mapped(value) as *const u32,
        };
        Some(Self {
            base,
            table: mapped(table) as *const libc::Elf64_Sym,
            strings: mapped(strings) as *const c_char,
            soname,
            hash: table_at(gnu),
            buckets: table_at(sysv),
        })
    }

    /// Number of symbols. Not looked up before it is needed: the tables of a large library are many
    /// pages.
    fn count(&self) -> usize {
        if self.hash.is_null() {
            // SAFETY: one of both is not null; the second word of a SysV hash table is the number
            // of symbols.
            return unsafe { *self.buckets.add(1) as usize };
        }
        // SAFETY: the object's own hash table.
        unsafe { gnu_count(self.hash) }
    }

    /// The object's SONAME.
    pub(crate) fn soname(&self) -> Option<&CStr> {
        // SAFETY: an offset into the object's own string table, which is mapped while `self` is
        // used.
        self.soname
            .map(|at| unsafe { CStr::from_ptr(self.strings.add(at)) })
    }

    /// The functions that the object defines: each symbol and its name.
    pub(crate) fn functions(&self) -> impl Iterator<Item = (*const libc::Elf64_Sym, &CStr)> {
        (0..self.count()).filter_map(|at| self.function(at))
    }

    /// Symbol `at`, one of the table, and its name, if it is a function that the object defines.
    fn function(&self, at: usize) -> Option<(*const libc::Elf64_Sym, &CStr)> {
        // SAFETY: below the table's length, or found in its hash table; names are NUL-terminated
        // strings of the string table.
        unsafe {
            let symbol = self.table.add(at);
            let defined = (*symbol).st_shndx != 0 && (*symbol).st_info & 0xf == STT_FUNC;
            defined.then(|| {
                let name = CStr::from_ptr(self.strings.add((*symbol).st_name as usize));
                (symbol, name)
            })
        }
    }

    /// Name of symbol `index` of `count`, which may be undefined here.
    fn name(&self, index: usize, count: usize) -> Option<&CStr> {
        // SAFETY: as above.
        (index < count).then(|| unsafe {
            CStr::from_ptr(self.strings.add((*self.table.add(index)).st_name as usize))
        })
    }

    /// First byte of the symbols, and the first behind them.
    pub(crate) fn span(&self) -> (usize, usize) {
        let first = self.table as usize;
        (first, first + self.count() * size_of::<libc::Elf64_Sym>())
    }

    /// Address of the function `name`, or null.
    pub(crate) fn find(&self, name: &CStr) -> *mut c_void {
        let found = if self.hash.is_null() {
            self.functions().find(|(_, own)| *own == name)
        } else {
            // SAFETY: the object's own hash table.
            let mut at = unsafe { gnu_chain(self.hash, gnu_hash(name.to_bytes())) };
            at.find_map(|at| self.function(at).filter(|(_, own)| *own == name))
        };
        found.map_or(std::ptr::null_mut(), |(symbol, _)| {
            // SAFETY: a symbol of this table. Wrapping, as the dynamic linker adds: a redirected
            // symbol may lie below.
            let value = unsafe { (*symbol).st_value } as usize;
            self.base.wrapping_add(value) as *mut c_void
        })
    }
}

/// The hash of a name in a GNU hash table.
fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381u32, |hash, byte| {
        hash.wrapping_mul(33).wrapping_add(u32::from(*byte))
    })
}

/// Indices of the symbols whose names may have this hash.
///
/// # Safety
/// `table` points to a well-formed GNU hash table, which stays mapped while the iterator is used.
unsafe fn gnu_chain(table: *const u32, hash: u32) -> impl Iterator<Item = usize> {
    // SAFETY: header of four words, bloom filter of 64-bit words, buckets, chains.
    let (first, chain, mut next) = unsafe {
        let (buckets, first, bloom) = (*table, *table.add(1) as usize, *table.add(2) as usize);
        let bucket = table.add(4 + 2 * bloom);
        let start = if buckets == 0 {
            0
        } else {
            *bucket.add((hash % buckets) as usize) as usize
        };
        (first, bucket.add(buckets as usize), start)
    };
    std::iter::from_fn(move || {
        loop {
            if next < first {
                return None;
            }
            let at = next;
            // SAFETY: at or above the first symbol that is hashed; a chain ends in a word with its
            // lowest bit set.
            let word = unsafe { *chain.add(at - first) };
            next = if word & 1 == 1 { 0 } else { at + 1 };
            if word | 1 == hash | 1 {
                return Some(at);
            }
        }
    })
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

/// The dynamic section of an object, or null.
fn section(info: &libc::dl_phdr_info) -> *const Dynamic {
    let mut all = headers(info).iter();
    all.find(|header| header.p_type == libc::PT_DYNAMIC)
        .map_or(std::ptr::null(), |header| {
            (info.dlpi_addr as usize + header.p_vaddr as usize) as *const Dynamic
        })
}

/// Tags and values of an object's dynamic section.
///
/// # Safety
/// `info` describes an object that stays mapped while the iterator is used.
unsafe fn dynamic(info: &libc::dl_phdr_info) -> impl Iterator<Item = (i64, usize)> {
    // SAFETY: as the caller promises.
    unsafe { entries(section(info)) }
}

/// The same by the section's address; none where that is null.
///
/// # Safety
/// A dynamic section that stays mapped while the iterator is used.
unsafe fn entries(mut next: *const Dynamic) -> impl Iterator<Item = (i64, usize)> {
    std::iter::from_fn(move || {
        if next.is_null() {
            return None;
        }
        // SAFETY: the dynamic section ends in a null tag, behind which nothing is read.
        let (tag, value) = unsafe { ((*next).tag, (*next).value as usize) };
        if tag == 0 {
            next = std::ptr::null();
            return None;
        }
        next = next.wrapping_add(1);
        Some((tag, value))
    })
}

/// Where the dynamic linker keeps the list of the program's objects for debuggers: the first of
/// them. Null where it does not say. Nothing is called for it.
pub(crate) fn first_object() -> *const LinkMap {
    // SAFETY: a look into the auxiliary vector.
    let (at, count) = unsafe {
        (
            libc::getauxval(libc::AT_PHDR) as *const libc::Elf64_Phdr,
            libc::getauxval(libc::AT_PHNUM) as usize,
        )
    };
    if at.is_null() {
        return std::ptr::null();
    }
    // SAFETY: the program's own headers, which the kernel has mapped.
    let headers = unsafe { std::slice::from_raw_parts(at, count) };
    let address = |kind: u32| {
        let mut all = headers.iter().filter(|header| header.p_type == kind);
        all.next().map(|header| header.p_vaddr as usize)
    };
    // The headers are where they say, unless the program was moved.
    let base = address(libc::PT_PHDR).map_or(0, |linked| (at as usize).wrapping_sub(linked));
    let section = address(libc::PT_DYNAMIC).map_or(std::ptr::null(), |linked| {
        base.wrapping_add(linked) as *const Dynamic
    });
    // SAFETY: the program's own dynamic section; what it says of debuggers is the dynamic linker's
    // structure: its version, then the first object.
    unsafe {
        let debug = entries(section).find(|(tag, value)| *tag == DT_DEBUG && *value != 0);
        debug.map_or(std::ptr::null(), |(_, at)| (*(at as *const Debug)).first)
    }
}

/// Whether the object is linked against the library of this SONAME.
///
/// # Safety
/// `info` describes an object that stays mapped meanwhile.
pub(crate) unsafe fn needs(info: &libc::dl_phdr_info, soname: &CStr) -> bool {
    // SAFETY: as the caller promises; a needed library's name is an offset into the object's own
    // string table.
    unsafe {
        let Some(symbols) = Symbols::of(info) else {
            return false;
        };
        dynamic(info)
            .any(|(tag, at)| tag == DT_NEEDED && CStr::from_ptr(symbols.strings.add(at)) == soname)
    }
}

/// Calls `visit` with each word of the object that the dynamic linker has filled with the address
/// of a symbol, and with the symbol's name.
///
/// # Safety
/// `info` describes an object that stays mapped, and `symbols` are its own.
pub(crate) unsafe fn filled_words(
    info: &libc::dl_phdr_info,
    symbols: &Symbols,
    mut visit: impl FnMut(usize, &CStr),
) {
    let (base, count) = (info.dlpi_addr as usize, symbols.count());
    let (mut plt, mut plt_bytes, mut data, mut data_bytes) = (0, 0, 0, 0);
    // SAFETY: as the caller promises.
    for (tag, value) in unsafe { dynamic(info) } {
        match tag {
            DT_JMPREL => plt = value,
            DT_PLTRELSZ => plt_bytes = value,
            DT_RELA => data = value,
            DT_RELASZ => data_bytes = value,
            _ => {}
        }
    }
    for (at, bytes) in [(plt, plt_bytes), (data, data_bytes)] {
        if at == 0 {
            continue;
        }
        let at = if at < base { at + base } else { at } as *const libc::Elf64_Rela;
        for index in 0..bytes / size_of::<libc::Elf64_Rela>() {
            // SAFETY: below the length that the object itself gives.
            let entry = unsafe { &*at.add(index) };
            // CAST: the low half is the kind, the high half the symbol.
            let (kind, symbol) = (entry.r_info as u32, (entry.r_info >> 32) as usize);
            if matches!(kind, R_X86_64_64 | R_X86_64_GLOB_DAT | R_X86_64_JUMP_SLOT)
                && symbol != 0
                && let Some(name) = symbols.name(symbol, count)
            {
                visit(base + entry.r_offset as usize, name);
            }
        }
    }
}

fn headers(info: &libc::dl_phdr_info) -> &[libc::Elf64_Phdr] {
    // SAFETY: the object's own program headers.
    unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) }
}

/// The part of an object that the dynamic linker has made read-only after filling it: first
/// address, first behind.
pub(crate) fn sealed(info: &libc::dl_phdr_info) -> Option<(usize, usize)> {
    headers(info)
        .iter()
        .find(|header| header.p_type == libc::PT_GNU_RELRO)
        .map(|header| {
            let first = info.dlpi_addr as usize + header.p_vaddr as usize;
            (first, first + header.p_memsz as usize)
        })
}

/// The loadable segments of an object: first address, first behind, and flags of each.
pub(crate) fn segments(info: &libc::dl_phdr_info) -> impl Iterator<Item = (usize, usize, u32)> {
    headers(info)
        .iter()
        .filter(|header| header.p_type == libc::PT_LOAD)
        .map(|header| {
            let first = info.dlpi_addr as usize + header.p_vaddr as usize;
            (first, first + header.p_memsz as usize, header.p_flags)
        })
}

/// Whether `address` lies in a loadable segment of the object.
pub(crate) fn holds(info: &libc::dl_phdr_info, address: usize) -> bool {
    segments(info).any(|(first, end, _)| (first..end).contains(&address))
}

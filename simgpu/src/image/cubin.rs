//! Cubins: ELF files of the device, with what their notes and `.nv.info` sections say of kernels.
//!
//! The layout is not documented by NVIDIA. What is read here was found with NVRTC's cubins of
//! kernels whose parameters and bounds are known.

use std::collections::BTreeMap;

use object::LittleEndian;
use object::elf::{FileHeader64, SHT_NOBITS, STB_LOCAL, STT_FUNC, STT_OBJECT};
use object::read::elf::{FileHeader as _, SectionHeader as _, SectionTable, Sym as _};

use super::{EntryPoint, Image, Param, Variable};

type Header = FileHeader64<LittleEndian>;
const ENDIAN: LittleEndian = LittleEndian;

/// ABI: `st_other` of a function that is a kernel.
const STO_CUDA_ENTRY: u8 = 0x10;
/// ABI: OS ABI of the files that CUDA 12 and earlier make; later ones count differently.
const OSABI_FIRST: u8 = 0x33;

/// ABI: attributes of `.nv.info` sections.
mod attribute {
    pub const MAX_THREADS: u8 = 0x05;
    pub const REQUIRED_THREADS: u8 = 0x10;
    pub const FRAME_BYTES: u8 = 0x11;
    pub const PARAM: u8 = 0x17;
    pub const REGISTERS: u8 = 0x2f;
    pub const PARAM_V2: u8 = 0x45;
}

/// One attribute: its number and its value, or the half word that it consists of.
struct Info<'a> {
    id: u8,
    value: &'a [u8],
}

/// The attributes of an `.nv.info` section.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = Info<'_>> {
    /// ABI: a value with a length before it; the others have two bytes.
    const SIZED: u8 = 4;
    std::iter::from_fn(move || {
        let [format, id, low, high, rest @ ..] = bytes else {
            return None;
        };
        let count = match *format {
            SIZED => usize::from(u16::from_le_bytes([*low, *high])),
            _ => 0,
        };
        let value = if *format == SIZED {
            rest.get(..count)?
        } else {
            &bytes[2..4]
        };
        bytes = rest.get(count..)?;
        Some(Info { id: *id, value })
    })
}

fn word(value: &[u8], at: usize) -> Option<u32> {
    let raw = value.get(4 * at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*raw))
}

/// A parameter with its number: `[index, number and offset, alignment and space and bytes]`.
fn param(info: &Info) -> Option<(u16, Param)> {
    let place = word(info.value, 1)?;
    let kind = word(info.value, 2)?;
    // CAST: the two halves of the word.
    let (number, offset) = (place as u16, place >> 16);
    let bytes = match info.id {
        attribute::PARAM => kind >> 18,
        // The newer form has the size in a word of its own.
        _ => word(info.value, 3)?,
    };
    let param = Param {
        offset: offset as usize,
        bytes: bytes as usize,
    };
    Some((number, param))
}

/// What `.nv.info` says of one kernel.
#[derive(Default)]
struct Said {
    params: BTreeMap<u16, Param>,
    max_threads: Option<u32>,
    local_bytes: u32,
    registers: Option<u32>,
}

impl Said {
    fn note(&mut self, info: &Info) {
        match info.id {
            attribute::PARAM | attribute::PARAM_V2 => {
                self.params.extend(param(info));
            }
            attribute::MAX_THREADS | attribute::REQUIRED_THREADS => {
                let sides = (0..3).map(|at| word(info.value, at).unwrap_or(1).max(1));
                self.max_threads = Some(sides.product());
            }
            _ => {}
        }
    }
}

struct Cubin<'a> {
    bytes: &'a [u8],
    sections: SectionTable<'a, Header>,
}

impl<'a> Cubin<'a> {
    fn section(&self, name: &str) -> Option<&'a object::elf::SectionHeader64<LittleEndian>> {
        self.sections
            .section_by_name(ENDIAN, name.as_bytes())
            .map(|(_, section)| section)
    }

    fn data(&self, name: &str) -> &'a [u8] {
        self.section(name)
            .and_then(|section| section.data(ENDIAN, self.bytes).ok())
            .unwrap_or_default()
    }

    fn bytes_of(&self, name: &str) -> u32 {
        // CAST: nothing of a kernel is larger than 4 GiB.
        self.section(name)
            .map_or(0, |section| section.sh_size(ENDIAN) as u32)
    }

    /// What a kernel has of its own. Since compute capability 9.0 the section begins with what the
    /// system keeps of every block.
    fn shared_bytes(&self, name: &str) -> u32 {
        let all = self.bytes_of(&format!(".nv.shared.{name}"));
        let kept = match capability(self.bytes) {
            Some(90..) => 1024,
            _ => 0,
        };
        all.checked_sub(kept).unwrap_or(all)
    }

    /// By the symbol's number in the table of symbols: what is said of all functions in one place.
    fn common(&self) -> BTreeMap<u32, Said> {
        let mut said = BTreeMap::<u32, Said>::new();
        for info in attributes(self.data(".nv.info")) {
            let (Some(symbol), Some(value)) = (word(info.value, 0), word(info.value, 1)) else {
                continue;
            };
            match info.id {
                attribute::REGISTERS => said.entry(symbol).or_default().registers = Some(value),
                attribute::FRAME_BYTES => said.entry(symbol).or_default().local_bytes = value,
                _ => {}
            }
        }
        said
    }

    fn kernel(&self, name: &str, mut said: Said) -> EntryPoint {
        for info in attributes(self.data(&format!(".nv.info.{name}"))) {
            said.note(&info);
        }
        // Files of early toolkits have the registers in the section of the code.
        let registers = said.registers.or_else(|| {
            let code = self.section(&format!(".text.{name}"))?;
            Some(code.sh_info(ENDIAN) >> 24).filter(|count| *count > 0)
        });
        // A kernel that has a section of its own and no parameters in it has none.
        let known = self.section(&format!(".nv.info.{name}")).is_some();
        EntryPoint {
            name: name.to_owned(),
            params: known.then(|| said.params.into_values().collect()),
            shared_bytes: self.shared_bytes(name),
            max_threads: said.max_threads,
            registers,
            local_bytes: said.local_bytes,
            const_bytes: self.bytes_of(".nv.constant3"),
        }
    }
}

/// The compute capability that a cubin is made for, times ten.
pub fn capability(bytes: &[u8]) -> Option<i32> {
    let header = Header::parse(bytes).ok()?;
    let flags = header.e_flags(ENDIAN);
    let number = if header.e_ident.os_abi == OSABI_FIRST {
        flags & 0xff
    } else {
        flags >> 8 & 0xff
    };
    i32::try_from(number).ok()
}

/// Kernels and variables of a cubin; none where it is not one.
pub fn read(bytes: &[u8]) -> Option<Image> {
    let header = Header::parse(bytes).ok()?;
    let sections = header.sections(ENDIAN, bytes).ok()?;
    let symbols = sections
        .symbols(ENDIAN, bytes, object::elf::SHT_SYMTAB)
        .ok()?;
    let cubin = Cubin { bytes, sections };
    let mut common = cubin.common();
    let mut image = Image::default();
    for (index, symbol) in symbols.enumerate() {
        let name = symbol.name(ENDIAN, symbols.strings()).ok()?;
        let Ok(name) = std::str::from_utf8(name) else {
            continue;
        };
        let section = symbols.symbol_section(ENDIAN, symbol, index).ok().flatten();
        let Some(section) = section.filter(|_| !name.is_empty()) else {
            continue;
        };
        match symbol.st_type() {
            STT_FUNC
                if symbol.st_other() & STO_CUDA_ENTRY != 0 && symbol.st_bind() != STB_LOCAL =>
            {
                // CAST: a table of symbols has fewer than 2^32.
                let said = common.remove(&(index.0 as u32)).unwrap_or_default();
                image.entries.push(cubin.kernel(name, said));
            }
            // Also those that only this file's kernels know by name: the driver finds them.
            STT_OBJECT => {
                let bytes = symbol.st_size(ENDIAN);
                let initial = cubin
                    .sections
                    .section(section)
                    .ok()
                    .filter(|section| section.sh_type(ENDIAN) != SHT_NOBITS)
                    .and_then(|section| section.data(ENDIAN, cubin.bytes).ok())
                    .and_then(|data| {
                        let from = usize::try_from(symbol.st_value(ENDIAN)).ok()?;
                        data.get(from..)?.get(..usize::try_from(bytes).ok()?)
                    })
                    .unwrap_or_default();
                image.variables.push(Variable {
                    name: name.to_owned(),
                    bytes,
                    initial: initial.to_vec(),
                });
            }
            _ => {}
        }
    }
    Some(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts an ELF file together, section by section.
    struct Builder {
        names: Vec<u8>,
        headers: Vec<[u64; 7]>,
        body: Vec<u8>,
    }

    impl Builder {
        const SYMTAB: u64 = 2;
        const STRTAB: u64 = 3;
        const NOBITS: u64 = 8;
        const PROGBITS: u64 = 1;

        fn new() -> Self {
            Self {
                names: vec![0],
                headers: vec![[0; 7]],
                body: vec![0; 64],
            }
        }

        /// Adds a section; its number.
        fn add(&mut self, name: &str, kind: u64, bytes: &[u8], link: u64, size: u64) -> u16 {
            let at = self.names.len() as u64;
            self.names.extend(name.bytes().chain([0]));
            self.body.resize(self.body.len().next_multiple_of(8), 0);
            let entry = if kind == Self::SYMTAB { 24 } else { 0 };
            let offset = self.body.len() as u64;
            self.headers
                .push([at, kind, offset, size, link, entry, u64::from(kind == 2)]);
            self.body.extend(bytes);
            (self.headers.len() - 1) as u16
        }

        fn finish(mut self, flags: u32) -> Vec<u8> {
            let names = self.names.clone();
            let size = names.len() as u64 + 10;
            let last = self.add(".shstrtab", Self::STRTAB, &names, 0, size);
            // The name that was added last is in no copy yet.
            let own = b".shstrtab\0";
            self.body.extend(own);
            self.body.resize(self.body.len().next_multiple_of(8), 0);
            let table = self.body.len() as u64;
            for [name, kind, offset, size, link, entry, info] in &self.headers {
                let words = |value: &u64| (*value as u32).to_le_bytes();
                self.body.extend(words(name));
                self.body.extend(words(kind));
                self.body.extend([0; 16]);
                self.body.extend(offset.to_le_bytes());
                self.body.extend(size.to_le_bytes());
                self.body.extend(words(link));
                self.body.extend(words(info));
                self.body.extend(8_u64.to_le_bytes());
                self.body.extend(entry.to_le_bytes());
            }
            let header = &mut self.body[..64];
            header[..9].copy_from_slice(b"\x7fELF\x02\x01\x01\x41\x08");
            header[16..18].copy_from_slice(&2_u16.to_le_bytes());
            header[18..20].copy_from_slice(&190_u16.to_le_bytes());
            header[20..24].copy_from_slice(&1_u32.to_le_bytes());
            header[40..48].copy_from_slice(&table.to_le_bytes());
            header[48..52].copy_from_slice(&flags.to_le_bytes());
            header[52..54].copy_from_slice(&64_u16.to_le_bytes());
            header[58..60].copy_from_slice(&64_u16.to_le_bytes());
            header[60..62].copy_from_slice(&(self.headers.len() as u16).to_le_bytes());
            header[62..64].copy_from_slice(&last.to_le_bytes());
            self.body
        }
    }

    fn symbol(name: u32, kind: u8, other: u8, section: u16, value: u64, size: u64) -> Vec<u8> {
        let mut bytes = name.to_le_bytes().to_vec();
        bytes.extend([kind, other]);
        bytes.extend(section.to_le_bytes());
        bytes.extend(value.to_le_bytes());
        bytes.extend(size.to_le_bytes());
        bytes
    }

    fn sized(id: u8, words: &[u32]) -> Vec<u8> {
        let mut bytes = vec![4, id];
        bytes.extend((4 * words.len() as u16).to_le_bytes());
        words
            .iter()
            .for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes
    }

    /// A kernel `axpy(int, double *)` of at most 128 threads, and a variable.
    fn cubin() -> Vec<u8> {
        let mut builder = Builder::new();
        let code = builder.add(".text.axpy", Builder::PROGBITS, &[0; 16], 0, 16);
        let first = 7_u32.to_le_bytes();
        let data = builder.add(".nv.global.init", Builder::PROGBITS, &first, 0, 4);
        builder.add(".nv.shared.axpy", Builder::NOBITS, &[], 0, 1024 + 256);
        builder.add(".nv.constant3", Builder::PROGBITS, &[0; 24], 0, 24);
        // Symbol 1 has 40 registers and a frame of 16 bytes.
        let common = [sized(0x2f, &[1, 40]), sized(0x11, &[1, 16])].concat();
        builder.add(
            ".nv.info",
            Builder::PROGBITS,
            &common,
            0,
            common.len() as u64,
        );
        let own = [
            // A half word, which is passed over.
            vec![3, 0x19, 16, 0],
            sized(0x17, &[0, 8 << 16 | 1, 8 << 18]),
            sized(0x17, &[0, 0, 4 << 18]),
            sized(0x05, &[64, 2, 1]),
        ]
        .concat();
        builder.add(
            ".nv.info.axpy",
            Builder::PROGBITS,
            &own,
            0,
            own.len() as u64,
        );
        let names = b"\0axpy\0seven\0helper\0";
        let strings = builder.add(".strtab", Builder::STRTAB, names, 0, names.len() as u64);
        let symbols = [
            symbol(0, 0, 0, 0, 0, 0),
            symbol(1, 0x12, STO_CUDA_ENTRY, code, 0, 16),
            // A variable that only this file knows by name, and a function that is no kernel.
            symbol(6, 0x01, 0, data, 0, 4),
            symbol(12, 0x12, 0, code, 0, 16),
        ]
        .concat();
        builder.add(
            ".symtab",
            Builder::SYMTAB,
            &symbols,
            strings.into(),
            symbols.len() as u64,
        );
        builder.finish(90 << 8)
    }

    #[test]
    fn a_cubin_tells_its_kernels_their_needs_and_its_variables() {
        let bytes = cubin();
        assert_eq!(capability(&bytes), Some(90));
        let image = read(&bytes).unwrap();
        let param = |offset, bytes| Param { offset, bytes };
        assert_eq!(
            image.entries,
            [EntryPoint {
                name: "axpy".to_owned(),
                params: Some(vec![param(0, 4), param(8, 8)]),
                shared_bytes: 256,
                max_threads: Some(128),
                registers: Some(40),
                local_bytes: 16,
                const_bytes: 24,
            }]
        );
        assert_eq!(
            image.variables,
            [Variable {
                name: "seven".to_owned(),
                bytes: 4,
                initial: 7_u32.to_le_bytes().to_vec(),
            }]
        );
    }

    #[test]
    fn a_cubin_of_another_device_has_no_binary_for_this_one() {
        let read = |capability| super::super::read(&cubin(), capability).map(|_| ());
        assert_eq!(read((9, 0)), Ok(()));
        let none = Err(shim_ffi::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        assert_eq!(read((8, 0)), none);
        assert_eq!(read((10, 0)), none);
    }

    #[test]
    fn a_cubin_that_is_cut_short_is_no_image_and_no_crash() {
        let whole = cubin();
        for length in 0..whole.len() {
            let _ = read(&whole[..length]);
            let _ = capability(&whole[..length]);
        }
    }
}

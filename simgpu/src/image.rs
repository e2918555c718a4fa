//! Reading module images: PTX text, cubins (ELF) and fat binaries. Finds out what they export;
//! compiles nothing.

mod cubin;

use shim_ffi::CUresult;

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Offset in the parameter block.
    pub offset: usize,
    /// Bytes.
    pub bytes: usize,
}

/// A kernel of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryPoint {
    /// Name.
    pub name: String,
    /// Parameters, where the image says so.
    pub params: Option<Vec<Param>>,
    /// Static shared memory, in bytes.
    pub shared_bytes: u32,
    /// Largest block from `.maxntid`.
    pub max_threads: Option<u32>,
    /// Registers of a thread, where the image says so.
    pub registers: Option<u32>,
    /// Local memory of a thread, in bytes.
    pub local_bytes: u32,
    /// Constant memory of the module's own, in bytes.
    pub const_bytes: u32,
}

/// A global variable of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Name.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// First bytes; the rest is zero.
    pub initial: Vec<u8>,
}

/// What an image exports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// Kernels.
    pub entries: Vec<EntryPoint>,
    /// Variables.
    pub variables: Vec<Variable>,
}

const ELF: &[u8] = b"\x7fELF";
const FATBIN: u32 = 0xba55_ed50;
const FATBIN_WRAPPER: u32 = 0x4662_43b1;
/// ABI: intermediate code that is compiled when it is linked. What is in it is not known here.
const LINKABLE: u32 = 0x7f4e_43ed;
/// Longest image that is believed.
const LIMIT: usize = 1 << 31;

/// Reads an image whose length its own headers tell.
///
/// # Safety
/// `image` points to a complete image: NUL-terminated PTX text, an ELF file, a fat binary or the
/// wrapper of one.
///
/// # Errors
/// `INVALID_IMAGE`, `INVALID_PTX` or `NO_BINARY_FOR_GPU`.
pub unsafe fn read_pointer(image: *const u8, capability: (i32, i32)) -> Result<Image, CUresult> {
    if image.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // A shorter text than four bytes is not an image; do not read past its end.
    let mut head = [0_u8; 4];
    for (at, byte) in head.iter_mut().enumerate() {
        // SAFETY: an image has a byte here unless the one before ended a text.
        *byte = unsafe { image.add(at).read() };
        if *byte == 0 {
            break;
        }
    }
    let word = u32::from_le_bytes(head);
    if word == FATBIN_WRAPPER {
        // SAFETY: a wrapper holds two words and then the pointer to the fat binary.
        let inner = unsafe { image.add(8).cast::<*const u8>().read_unaligned() };
        if inner.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
        }
        // SAFETY: as vouched for by the caller.
        return unsafe { read_pointer(inner, capability) };
    }
    if word == LINKABLE {
        return Ok(Image::default());
    }
    let bytes = if word == FATBIN {
        // SAFETY: a fat binary starts with magic, version, header bytes (u16 each after the magic)
        // and a u64 length.
        unsafe {
            image.add(6).cast::<u16>().read_unaligned() as usize
                + image.add(8).cast::<u64>().read_unaligned() as usize
        }
    } else if head == ELF {
        // SAFETY: an ELF file has a 64-byte header.
        let header = unsafe { std::slice::from_raw_parts(image, 64) };
        elf_bytes(header)
    } else {
        // SAFETY: anything else has to be text that ends in a NUL.
        unsafe { std::ffi::CStr::from_ptr(image.cast()) }
            .to_bytes()
            .len()
    };
    if bytes > LIMIT {
        return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
    }
    // SAFETY: the image's own headers say that it is this long.
    read(
        unsafe { std::slice::from_raw_parts(image, bytes) },
        capability,
    )
}

/// Reads an image.
///
/// # Errors
/// As [`read_pointer`].
pub fn read(image: &[u8], capability: (i32, i32)) -> Result<Image, CUresult> {
    if image.starts_with(ELF) {
        return elf(image, capability);
    }
    if image.len() >= 16 && image[..4] == FATBIN.to_le_bytes() {
        return fat(image, capability);
    }
    if image.starts_with(&LINKABLE.to_le_bytes()) {
        return Ok(Image::default());
    }
    let text = image.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = std::str::from_utf8(text).map_err(|_| CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    if text.trim().is_empty() {
        return Err(CUresult::CUDA_ERROR_INVALID_IMAGE);
    }
    ptx(text, capability)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    field(bytes, at).map(|raw| u16::from_le_bytes(raw) as usize)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<usize> {
    field(bytes, at).map(|raw| u32::from_le_bytes(raw) as usize)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<usize> {
    field(bytes, at).map(|raw| u64::from_le_bytes(raw) as usize)
}

fn elf_bytes(header: &[u8]) -> usize {
    let sections = u64_at(header, 0x28).unwrap_or(0);
    let size = u16_at(header, 0x3a).unwrap_or(0) * u16_at(header, 0x3c).unwrap_or(0);
    sections.saturating_add(size).max(64)
}

/// A cubin, where the device can run it: one of its own major version, and of no later minor one.
fn elf(image: &[u8], capability: (i32, i32)) -> Result<Image, CUresult> {
    let read = cubin::read(image).ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    match cubin::capability(image) {
        Some(made_for) if made_for / 10 != capability.0 || made_for % 10 > capability.1 => {
            Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU)
        }
        _ => Ok(read),
    }
}

/// The best part of a fat binary that we can read: PTX if it is not compressed, else a cubin.
fn fat(image: &[u8], capability: (i32, i32)) -> Result<Image, CUresult> {
    const COMPRESSED: usize = 0x2000;
    let header = u16_at(image, 6).ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    let mut at = header;
    let mut best: Option<Image> = None;
    while let (Some(kind), Some(head), Some(bytes), Some(flags)) = (
        u16_at(image, at),
        u32_at(image, at + 4),
        u64_at(image, at + 8),
        u64_at(image, at + 40),
    ) {
        let Some(part) = image.get(at + head..).and_then(|rest| rest.get(..bytes)) else {
            break;
        };
        if flags & COMPRESSED == 0 {
            let read = if kind == 1 {
                ptx(&String::from_utf8_lossy(part), capability)
            } else {
                elf(part, capability)
            };
            if let Ok(read) = read
                && (kind == 1 || best.is_none())
            {
                best = Some(read);
            }
        }
        if head == 0 {
            break;
        }
        at += head + bytes;
    }
    best.ok_or(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU)
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        if from.starts_with("//") {
            rest = from.find('\n').map_or("", |end| &from[end..]);
        } else if let Some(comment) = from.strip_prefix("/*") {
            out.push(' ');
            rest = comment.split_once("*/").map_or("", |(_, after)| after);
        } else {
            out.push('/');
            rest = &from[1..];
        }
    }
    out.push_str(rest);
    out
}

fn type_bytes(name: &str) -> Option<usize> {
    Some(match name {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        ".b128" => 16,
        _ => return None,
    })
}

/// A declaration such as `.param .align 8 .b8 name[24]`: name, bytes, alignment, bytes of an
/// element.
fn declaration(text: &str) -> Option<(String, usize, usize, usize)> {
    let mut align = None;
    let mut element = None;
    let mut rest = text.trim();
    while let Some(stripped) = rest.strip_prefix('.') {
        let end = stripped
            .find(|c: char| c.is_whitespace())
            .unwrap_or(stripped.len());
        let word = &rest[..=end.min(rest.len() - 1)];
        let word = word.trim();
        rest = rest[word.len()..].trim_start();
        if word == ".align" {
            let end = rest
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(rest.len());
            let value = rest[..end].parse::<usize>().ok()?;
            // `.ptr .global .align 16` describes what a pointer points to, not the parameter.
            if element.is_none() {
                align = Some(value);
            }
            rest = rest[end..].trim_start();
        } else if word.starts_with(".v") && word.len() == 3 {
            return None;
        } else if let Some(bytes) = type_bytes(word) {
            element = Some(bytes);
        }
    }
    let element = element?;
    let name_end = rest
        .find(|c: char| c == '[' || c == '=' || c.is_whitespace())
        .unwrap_or(rest.len());
    let name = rest[..name_end].to_owned();
    let mut count = 1_usize;
    let mut dims = rest[name_end..].trim_start();
    while let Some(inner) = dims.strip_prefix('[') {
        let (number, after) = inner.split_once(']')?;
        count = count.checked_mul(number.trim().parse().ok()?)?;
        dims = after.trim_start();
    }
    (!name.is_empty()).then_some((name, count * element, align.unwrap_or(element), element))
}

fn literal(text: &str, element: usize) -> Option<Vec<u8>> {
    let text = text.trim().trim_end_matches('U');
    let value = if let Some(hex) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        u64::from(u32::from_str_radix(hex, 16).ok()?)
    } else if let Some(hex) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        u64::from_str_radix(hex, 16).ok()?
    } else if let Some(hex) = text.strip_prefix("0x") {
        u64::from_str_radix(hex, 16).ok()?
    } else {
        text.parse::<i64>().ok()? as u64
    };
    Some(value.to_le_bytes().get(..element)?.to_vec())
}

fn params(list: &str) -> Option<Vec<Param>> {
    let mut offset = 0_usize;
    let mut params = Vec::new();
    for one in list.split(',').filter(|one| !one.trim().is_empty()) {
        let (_, bytes, align, _) = declaration(one)?;
        offset = offset.next_multiple_of(align.max(1));
        params.push(Param { offset, bytes });
        offset += bytes;
    }
    Some(params)
}

fn ptx(text: &str, capability: (i32, i32)) -> Result<Image, CUresult> {
    let text = without_comments(text);
    if !text.trim_start().starts_with(".version") {
        return Err(if text.contains(".version") {
            CUresult::CUDA_ERROR_INVALID_PTX
        } else {
            CUresult::CUDA_ERROR_INVALID_IMAGE
        });
    }
    let target = text
        .find(".target")
        .map(|at| text[at + 7..].trim_start())
        .and_then(|rest| rest.strip_prefix("sm_"))
        .map(|rest| {
            rest.chars()
                .take_while(char::is_ascii_digit)
                .collect::<String>()
        })
        .and_then(|digits| digits.parse::<i32>().ok())
        .ok_or(CUresult::CUDA_ERROR_INVALID_PTX)?;
    if target > capability.0 * 10 + capability.1 {
        return Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    }
    let mut image = Image::default();
    let mut depth = 0_usize;
    let mut statement = String::new();
    let mut body = String::new();
    let mut initialiser = false;
    for c in text.chars() {
        match c {
            '{' if depth == 0 && statement.contains('=') => initialiser = true,
            '}' if initialiser => initialiser = false,
            '{' => {
                depth += 1;
                body.clear();
                continue;
            }
            '}' => {
                depth = depth
                    .checked_sub(1)
                    .ok_or(CUresult::CUDA_ERROR_INVALID_PTX)?;
                if depth == 0 {
                    if statement.contains(".entry") {
                        image.entries.push(
                            entry(&statement, &body).ok_or(CUresult::CUDA_ERROR_INVALID_PTX)?,
                        );
                    }
                    statement.clear();
                }
                continue;
            }
            ';' if depth == 0 && !initialiser => {
                if let Some(variable) = variable(&statement) {
                    image.variables.push(variable);
                }
                statement.clear();
                continue;
            }
            // Directives that end with their line.
            '\n' if depth == 0
                && [".version", ".target", ".address_size", ".file"]
                    .iter()
                    .any(|d| statement.trim_start().starts_with(d)) =>
            {
                statement.clear();
                continue;
            }
            _ => {}
        }
        if depth == 0 {
            statement.push(c)
        } else {
            body.push(c)
        }
    }
    // A kernel that was begun has a body, and the body an end.
    if depth != 0 || statement.contains(".entry") {
        return Err(CUresult::CUDA_ERROR_INVALID_PTX);
    }
    Ok(image)
}

fn entry(statement: &str, body: &str) -> Option<EntryPoint> {
    let after = statement.split_once(".entry")?.1.trim_start();
    let end = after
        .find(|c: char| c == '(' || c == '.' || c.is_whitespace())
        .unwrap_or(after.len());
    let name = after[..end].to_owned();
    let list = match after[end..].trim_start().strip_prefix('(') {
        Some(list) => params(list.split_once(')')?.0)?,
        None => Vec::new(),
    };
    let max_threads = after
        .split_once(".maxntid")
        .map(|(_, rest)| {
            rest.split(|c: char| !(c.is_ascii_digit() || c == ',' || c.is_whitespace()))
                .next()
                .unwrap_or_default()
                .split(',')
                .filter_map(|one| one.trim().parse::<u32>().ok())
                .product()
        })
        .filter(|threads| *threads > 0);
    let shared_bytes = body
        .split(';')
        .filter(|line| line.trim_start().starts_with(".shared"))
        .filter_map(|line| declaration(line.trim_start().strip_prefix(".shared")?))
        .map(|(_, bytes, _, _)| bytes as u32)
        .sum();
    (!name.is_empty()).then_some(EntryPoint {
        name,
        params: Some(list),
        shared_bytes,
        max_threads,
        registers: None,
        local_bytes: 0,
        const_bytes: 0,
    })
}

fn variable(statement: &str) -> Option<Variable> {
    let at = [".global", ".const", ".managed"]
        .iter()
        .filter_map(|space| statement.find(space))
        .min()?;
    if statement.contains(".extern") || statement.contains(".func") {
        return None;
    }
    let (declared, initial) = match statement[at..].split_once('=') {
        Some((declared, initial)) => (declared, Some(initial)),
        None => (&statement[at..], None),
    };
    let (name, bytes, _, element) = declaration(declared)?;
    let initial = initial
        .map(|list| {
            list.trim()
                .trim_start_matches('{')
                .trim_end_matches('}')
                .split(',')
                .map_while(|one| literal(one, element))
                .flatten()
                .take(bytes)
                .collect()
        })
        .unwrap_or_default();
    Some(Variable {
        name,
        bytes: bytes as u64,
        initial,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r"
//
// Generated by somebody
//
.version 8.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 counters[4] = {1, 2, 3, 4};
.const .align 8 .b8 table[32];
.visible .entry axpy(
	.param .u32 axpy_param_0,
	.param .f32 axpy_param_1,
	.param .u64 .ptr .global .align 16 axpy_param_2,
	.param .align 8 .b8 axpy_param_3[24]
)
.maxntid 256, 1, 1
{
	.reg .pred %p<2>;
	.shared .align 4 .b8 tile[1024];
	{ ret; }
}
.entry empty() { ret; }
";

    #[test]
    fn ptx_tells_kernels_parameters_and_variables() {
        let image = read(TEXT.as_bytes(), (9, 0)).unwrap();
        let names: Vec<_> = image
            .entries
            .iter()
            .map(|entry| entry.name.as_str())
            .collect();
        assert_eq!(names, ["axpy", "empty"]);
        let params = image.entries[0].params.clone().unwrap();
        let layout: Vec<_> = params
            .iter()
            .map(|param| (param.offset, param.bytes))
            .collect();
        assert_eq!(layout, [(0, 4), (4, 4), (8, 8), (16, 24)]);
        assert_eq!(image.entries[0].max_threads, Some(256));
        assert_eq!(image.entries[1].params, Some(Vec::new()));
        assert_eq!(image.variables.len(), 2);
        assert_eq!(
            (image.variables[0].name.as_str(), image.variables[0].bytes),
            ("counters", 16)
        );
        assert_eq!(image.variables[0].initial[4..8], 2_u32.to_le_bytes());
        assert_eq!(
            (image.variables[1].name.as_str(), image.variables[1].bytes),
            ("table", 32)
        );
    }

    #[test]
    fn what_is_not_an_image_is_refused() {
        assert_eq!(read(b"", (9, 0)), Err(CUresult::CUDA_ERROR_INVALID_IMAGE));
        assert_eq!(
            read(b"hello", (9, 0)),
            Err(CUresult::CUDA_ERROR_INVALID_IMAGE)
        );
        assert_eq!(
            read(b".version 8.0\n.entry x(", (9, 0)),
            Err(CUresult::CUDA_ERROR_INVALID_PTX)
        );
        assert_eq!(
            read(b".version 8.0\n.target sm_90\n.entry x() {", (9, 0)),
            Err(CUresult::CUDA_ERROR_INVALID_PTX)
        );
        assert_eq!(
            read(b".version 8.0\n.target sm_90\n.entry x(", (9, 0)),
            Err(CUresult::CUDA_ERROR_INVALID_PTX)
        );
        assert_eq!(
            read(b"\x7fELF garbage", (9, 0)),
            Err(CUresult::CUDA_ERROR_INVALID_IMAGE)
        );
    }

    #[test]
    fn a_newer_target_than_the_device_has_no_binary() {
        assert_eq!(
            read(TEXT.replace("sm_70", "sm_100").as_bytes(), (9, 0)),
            Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU)
        );
    }
}
